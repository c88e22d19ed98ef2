"""How wrong an answer is: one number an image.

Shapes:  B images   K classes
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def guessing(classes: int) -> float:
    """The softmax loss of who knows nothing; that of the sigmoid is 1 more."""
    return math.log(max(classes, 2))


def balanced_weights(labels_N: Tensor, classes: int) -> Tensor:
    """K: inversely proportional to how often a class occurs, and 1 on average over the images."""
    counts = torch.bincount(labels_N, minlength=classes)
    present = (counts > 0).sum()
    return len(labels_N) / (present * counts.clamp(min=1).float())


@torch.no_grad()
def start_at_even_odds(model: nn.Module) -> None:
    """Sigmoid: a head that has not learned yet begins by giving each class 1/K, not 1/2.

    AugReg's biases (arXiv 2106.10270) are these: -6.9 for ImageNet's 1000 classes, -10 for ImageNet-21k's 21,843.
    """
    for head in (module for name, module in model.named_modules() if name.endswith("head.out")):
        if isinstance(head, nn.Linear) and not head.weight.any() and not head.bias.any():
            head.bias.fill_(-math.log(max(len(head.bias) - 1, 1)))
