"""Per-image classification losses.

Shapes: B images, K classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.recipes.options import LossName


def per_image_losses(
    logits_BK: Tensor,
    targets_BK: Tensor,
    loss: LossName,
    label_smoothing: float = 0.0,
    class_weights_K: Tensor | None = None,
    logit_offsets_K: Tensor | None = None,
) -> Tensor:
    """Loss of each image, (B,), for targets that are rows of class probabilities.

    "softmax" is the cross-entropy over K exclusive classes. "sigmoid" is the sum of K binary cross-entropies. With
    class weights, an image is weighted by the mean weight of the classes in its target. Logit offsets are added to
    the logits (`logit_adjustment_offsets`).
    """
    if logit_offsets_K is not None:
        logits_BK = logits_BK + logit_offsets_K
    smoothed_BK = targets_BK * (1 - label_smoothing) + label_smoothing / targets_BK.shape[1]
    if loss == "softmax":
        losses_B = F.cross_entropy(logits_BK, smoothed_BK, reduction="none")
    else:
        losses_B = F.binary_cross_entropy_with_logits(logits_BK, smoothed_BK, reduction="none").sum(dim=1)
    return losses_B if class_weights_K is None else losses_B * (targets_BK @ class_weights_K)


def loss_and_correct(
    logits_BK: Tensor,
    targets_BK: Tensor,
    labels_B: Tensor,
    loss: LossName,
    label_smoothing: float = 0.0,
    class_weights_K: Tensor | None = None,
    logit_offsets_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of a batch and the number of correct predictions, without logit offsets; both scalars."""
    losses_B = per_image_losses(logits_BK.float(), targets_BK, loss, label_smoothing, class_weights_K, logit_offsets_K)
    return losses_B.sum(), (logits_BK.detach().argmax(dim=1) == labels_B).sum()


def uniform_loss(num_classes: int) -> float:
    """Softmax loss of a uniform prediction. The sigmoid loss is about 1 higher."""
    return math.log(max(num_classes, 2))


def balanced_class_weights(labels_N: Tensor, num_classes: int) -> Tensor:
    """Class weights (K,) inversely proportional to the class frequencies, with mean 1 over the images."""
    counts_K = torch.bincount(labels_N, minlength=num_classes)
    num_present = (counts_K > 0).sum()
    return len(labels_N) / (num_present * counts_K.clamp(min=1).float())


def logit_adjustment_offsets(labels_N: Tensor, num_classes: int, tau: float) -> Tensor:
    """Logit offsets (K,) for the loss: tau times the log of the class frequencies (arXiv 2007.07314).

    A model trained with them leaves the frequencies out of its own logits, which therefore rank the classes as if all
    were equally frequent. A class without images counts as one image, because log 0 is not finite.
    """
    counts_K = torch.bincount(labels_N, minlength=num_classes)
    return tau * (counts_K.clamp(min=1).float() / len(labels_N)).log()
