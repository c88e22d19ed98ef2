"""Average precision and F1 scores of multi-label predictions.

Shapes:  N images   K classes
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def average_precisions(scores_NK: Tensor, labels_NK: Tensor) -> Tensor:
    """Average precision (K,) of each class, fp64; NaN for a class without positive images.

    AP is the sum over thresholds of precision times the increase in recall, without interpolation. Images with equal
    scores share a threshold.
    """
    scores, order = scores_NK.double().sort(dim=0, descending=True, stable=True)
    positives = labels_NK.to(scores.device).double().gather(0, order)
    ranks_N1 = torch.arange(1, len(scores) + 1, device=scores.device, dtype=torch.float64)[:, None]
    precision = positives.cumsum(dim=0) / ranks_N1
    return (positives * precision.gather(0, tie_ends(scores))).sum(dim=0) / positives.sum(dim=0)


def tie_ends(sorted_NK: Tensor) -> Tensor:
    """For each row the last row with an equal score of the same class, (N, K): the next one that ends a tie."""
    N = len(sorted_NK)
    ends_tie = torch.ones_like(sorted_NK, dtype=torch.bool)
    ends_tie[:-1] = sorted_NK[:-1] != sorted_NK[1:]
    rows_N1 = torch.arange(N, device=sorted_NK.device)[:, None]
    return torch.where(ends_tie, rows_N1, N - 1).flip(0).cummin(dim=0).values.flip(0)


def mean_average_precision(scores_NK: Tensor, labels_NK: Tensor) -> float:
    """Mean of the average precisions of the classes that occur; 0 if none does."""
    mean = average_precisions(scores_NK, labels_NK).nanmean().item()
    return 0.0 if math.isnan(mean) else mean


def image_f1_scores(predicted_NK: Tensor, labels_NK: Tensor) -> Tensor:
    """F1 score (N,) of the label set of each image: 1 if nothing is predicted and there is nothing to predict."""
    predicted, labels = predicted_NK.float(), labels_NK.to(predicted_NK.device).float()
    num_correct, total = (predicted * labels).sum(dim=1), predicted.sum(dim=1) + labels.sum(dim=1)
    return torch.where(total > 0, 2 * num_correct / total.clamp(min=1), 1.0)
