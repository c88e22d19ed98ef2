"""Per-image losses.

Shapes: B images, K outputs: classes, or targets of a regression.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.recipes.options import LossName
from vitral.recipes.schema import Recipe
from vitral.tasks.task import Task


def per_image_losses(
    logits_BK: Tensor,
    targets_BK: Tensor,
    loss: LossName,
    label_smoothing: float = 0.0,
    class_weights_K: Tensor | None = None,
    logit_offsets_K: Tensor | None = None,
) -> Tensor:
    """Loss of each image, (B,).

    Targets are class probabilities for "softmax", the cross-entropy over K exclusive classes, and for "sigmoid",
    "asymmetric" and "focal", sums of K binary losses. For "mse" and "huber", means over the targets of a regression,
    they are standardised values. Label smoothing and class weights apply to "softmax" and "sigmoid"; with class
    weights, an image is weighted by the mean weight of the classes in its target. Logit offsets are added to the
    logits (`logit_adjustment_offsets`).
    """
    if loss == "asymmetric":
        return asymmetric_losses(logits_BK, targets_BK)
    if loss == "focal":
        return focal_losses(logits_BK, targets_BK)
    if loss == "mse":
        return F.mse_loss(logits_BK, targets_BK, reduction="none").mean(dim=1)
    if loss == "huber":
        return F.huber_loss(logits_BK, targets_BK, reduction="none").mean(dim=1)
    if logit_offsets_K is not None:
        logits_BK = logits_BK + logit_offsets_K
    smoothed_BK = targets_BK * (1 - label_smoothing) + label_smoothing / targets_BK.shape[1]
    if loss == "softmax":
        losses_B = F.cross_entropy(logits_BK, smoothed_BK, reduction="none")
    else:
        losses_B = F.binary_cross_entropy_with_logits(logits_BK, smoothed_BK, reduction="none").sum(dim=1)
    return losses_B if class_weights_K is None else losses_B * (targets_BK @ class_weights_K)


def loss_and_score(
    task: Task,
    logits_BK: Tensor,
    targets_BK: Tensor,
    labels: Tensor,
    loss: LossName,
    label_smoothing: float = 0.0,
    class_weights_K: Tensor | None = None,
    logit_offsets_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over a batch of the losses and of the running training scores, which ignore logit offsets; both scalars."""
    losses_B = per_image_losses(logits_BK.float(), targets_BK, loss, label_smoothing, class_weights_K, logit_offsets_K)
    return losses_B.sum(), task.scores(logits_BK.detach(), labels).sum()


def asymmetric_losses(
    logits_BK: Tensor, targets_BK: Tensor, gamma_pos: float = 0.0, gamma_neg: float = 4.0, margin: float = 0.05
) -> Tensor:
    """Asymmetric loss (arXiv 2009.14119), (B,): easy negatives count less than easy positives.

    Negatives with a probability below `margin` do not count at all.
    """
    p = logits_BK.sigmoid()
    negative = (1 - p + margin).clamp(max=1)
    log_likelihood = targets_BK * F.logsigmoid(logits_BK) + (1 - targets_BK) * negative.clamp(min=1e-8).log()
    p_target = targets_BK * p + (1 - targets_BK) * negative
    gamma = gamma_pos * targets_BK + gamma_neg * (1 - targets_BK)
    return -(log_likelihood * (1 - p_target).pow(gamma)).sum(dim=1)


def focal_losses(logits_BK: Tensor, targets_BK: Tensor, gamma: float = 2.0, alpha: float = 0.25) -> Tensor:
    """Focal loss (arXiv 1708.02002), (B,): well-classified labels count less; positives are weighted by `alpha`."""
    p = logits_BK.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none")
    p_target = targets_BK * p + (1 - targets_BK) * (1 - p)
    weights = alpha * targets_BK + (1 - alpha) * (1 - targets_BK)
    return (weights * (1 - p_target).pow(gamma) * cross_entropy).sum(dim=1)


def uniform_loss(num_classes: int) -> float:
    """Softmax loss of a uniform prediction. The sigmoid loss is about 1 higher."""
    return math.log(max(num_classes, 2))


def balanced_class_weights(labels_N: Tensor, num_classes: int) -> Tensor:
    """Class weights (K,) inversely proportional to the class frequencies, with mean 1 over the images."""
    counts_K = torch.bincount(labels_N, minlength=num_classes)
    num_present = (counts_K > 0).sum()
    return len(labels_N) / (num_present * counts_K.clamp(min=1).float())


def class_balance_terms(recipe: Recipe, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Class weights (K,) and logit offsets (K,) of a recipe's loss; None if the recipe does not use them."""
    num_classes = recipe.model.num_classes
    return (
        balanced_class_weights(labels, num_classes) if recipe.class_weights == "balanced" else None,
        logit_adjustment_offsets(labels, num_classes, recipe.logit_adjustment) if recipe.logit_adjustment else None,
    )


def logit_adjustment_offsets(labels_N: Tensor, num_classes: int, tau: float) -> Tensor:
    """Logit offsets (K,) for the loss: tau times the log of the class frequencies (arXiv 2007.07314).

    The model's own logits then do not contain the frequencies: they rank the classes as if all were equally frequent. A
    class without images counts as one image, because log 0 is not finite.
    """
    counts_K = torch.bincount(labels_N, minlength=num_classes)
    return tau * (counts_K.clamp(min=1).float() / len(labels_N)).log()
