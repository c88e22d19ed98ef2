"""How wrong an answer is: one number an image.

Shapes:  B images   K classes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Literal["softmax", "sigmoid"]


def losses(
    logits_BK: Tensor, targets_BK: Tensor, kind: Loss, smoothing: float = 0.0, weights_K: Tensor | None = None
) -> Tensor:
    """B. Softmax: one of K classes, cross-entropy. Sigmoid: K yes-or-no questions, their cross-entropies added up.

    Targets are rows of class probabilities. An image weighs as much as the classes in its target do.
    """
    smoothed = targets_BK * (1 - smoothing) + smoothing / targets_BK.shape[1]
    if kind == "softmax":
        each = F.cross_entropy(logits_BK, smoothed, reduction="none")
    else:
        each = F.binary_cross_entropy_with_logits(logits_BK, smoothed, reduction="none").sum(dim=1)
    return each if weights_K is None else each * (targets_BK @ weights_K)


Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # the first three arguments of `judged`


def judged(
    logits_BK: Tensor,
    targets_BK: Tensor,
    labels_B: Tensor,
    kind: Loss,
    smoothing: float = 0.0,
    weights_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of a batch, the sum of the losses and the number of right answers."""
    each_B = losses(logits_BK.float(), targets_BK, kind, smoothing, weights_K)
    return each_B.sum(), (logits_BK.detach().argmax(dim=1) == labels_B).sum()


def guessing(classes: int) -> float:
    """The softmax loss of who knows nothing; that of the sigmoid is 1 more."""
    return math.log(max(classes, 2))


def balanced_weights(labels_N: Tensor, classes: int) -> Tensor:
    """K: inversely proportional to how often a class occurs, and 1 on average over the images."""
    counts = torch.bincount(labels_N, minlength=classes)
    present = (counts > 0).sum()
    return len(labels_N) / (present * counts.clamp(min=1).float())
