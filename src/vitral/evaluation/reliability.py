"""Calibration quality: expected calibration error, Brier score, reliability diagram.

Shapes:  N images   K classes   b bins
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.utils.intervals import wilson_interval

NUM_BINS = 15
MIN_IMAGES_PER_BIN = 10


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Images with similar confidence."""

    confidence: float  # mean of the largest probability
    accuracy: float
    low: float  # 95% Wilson interval of the accuracy
    high: float
    images: int


@dataclass(frozen=True, kw_only=True)
class Reliability:
    ece: float  # expected calibration error: mean |confidence - accuracy| over equal-mass bins
    nll: float  # mean negative log-likelihood of the true class
    brier: float  # mean squared distance between probabilities and one-hot labels, in [0, 2]
    confidence: float  # mean
    bins: tuple[Bin, ...]


def reliability(probabilities_NK: Tensor, labels_N: Tensor, bins: int = NUM_BINS) -> Reliability:
    p, labels_N = probabilities_NK.double().cpu(), labels_N.cpu()
    confidence_N, predicted_N = p.max(dim=1)
    correct_N = (predicted_N == labels_N).double()
    members_Nb = bin_membership(confidence_N, bins)
    counts, confidence_sums, correct_sums = (
        values @ members_Nb for values in (torch.ones_like(correct_N), confidence_N, correct_N)
    )
    rows = zip(confidence_sums.tolist(), correct_sums.tolist(), counts.tolist(), strict=True)
    return Reliability(
        ece=((confidence_sums - correct_sums).abs().sum() / len(p)).item(),
        nll=negative_log_likelihoods(p, labels_N).mean().item(),
        brier=brier_scores(p, labels_N).mean().item(),
        confidence=confidence_N.mean().item(),
        bins=tuple(_make_bin(confidence / n, correct / n, int(n)) for confidence, correct, n in rows),
    )


def _make_bin(confidence: float, accuracy: float, images: int) -> Bin:
    low, high = wilson_interval(accuracy, images)
    return Bin(confidence=confidence, accuracy=accuracy, low=low, high=high, images=images)


def bin_membership(confidence_N: Tensor, bins: int = NUM_BINS) -> Tensor:
    """Bin of each image, one-hot (N, b). Bins hold equally many images; equal confidences share a bin.

    Small sets get fewer bins, with about ten images each.
    """
    N = len(confidence_N)
    bins = max(min(bins, N // MIN_IMAGES_PER_BIN), 1)
    cuts = torch.arange(1, bins) * N // bins
    edges = confidence_N.sort().values[cuts].unique()
    bin_N = torch.bucketize(confidence_N, edges, right=True)
    members = F.one_hot(bin_N, len(edges) + 1).double()
    return members[:, members.any(dim=0)]


def negative_log_likelihoods(p_NK: Tensor, labels_N: Tensor) -> Tensor:
    return -p_NK.gather(1, labels_N[:, None])[:, 0].clamp_min(torch.finfo(p_NK.dtype).tiny).log()


def brier_scores(p_NK: Tensor, labels_N: Tensor) -> Tensor:
    return (p_NK - F.one_hot(labels_N, p_NK.shape[1])).square().sum(dim=1)
