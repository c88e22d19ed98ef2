"""Does 90 % sure mean right nine times in ten? Expected calibration error, Brier score, reliability diagram.

Shapes:  N images   K classes   b bins
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.evaluation.metrics import wilson

BINS = 15


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Images about which a model was about equally sure."""

    confidence: float  # mean of the largest probability
    accuracy: float
    low: float  # 95 % interval of the accuracy (Wilson)
    high: float
    images: int


@dataclass(frozen=True, kw_only=True)
class Reliability:
    ece: float  # expected calibration error: mean distance of confidence and accuracy, over bins of equally many images
    nll: float  # mean surprise: minus the logarithm of the true class's probability
    brier: float  # mean squared distance of the probabilities from 0 … 1 … 0; at most 2
    confidence: float  # mean
    bins: tuple[Bin, ...]


def reliability(probabilities_NK: Tensor, labels_N: Tensor, bins: int = BINS) -> Reliability:
    p, labels_N = probabilities_NK.double().cpu(), labels_N.cpu()
    confidence_N, said_N = p.max(dim=1)
    right_N = (said_N == labels_N).double()
    members_Nb = membership(confidence_N, bins)
    images, sure, right = (values @ members_Nb for values in (torch.ones_like(right_N), confidence_N, right_N))
    rows = zip(sure.tolist(), right.tolist(), images.tolist(), strict=True)
    found = [(s / n, r / n, int(n)) for s, r, n in rows]
    return Reliability(
        ece=((sure - right).abs().sum() / len(p)).item(),
        nll=surprise(p, labels_N).mean().item(),
        brier=squared(p, labels_N).mean().item(),
        confidence=confidence_N.mean().item(),
        bins=tuple(
            Bin(confidence=s, accuracy=r, low=wilson(r, n)[0], high=wilson(r, n)[1], images=n) for s, r, n in found
        ),
    )


def membership(confidence_N: Tensor, bins: int = BINS) -> Tensor:
    """Which bin an image is in, N b, ones and zeros. Adaptive: equally many images a bin, equal confidence in one bin.

    With few images there are fewer bins, of about ten each.
    """
    N = len(confidence_N)
    bins = max(min(bins, N // 10), 1)
    cuts = torch.arange(1, bins) * N // bins
    edges = confidence_N.sort().values[cuts].unique()
    place_N = torch.bucketize(confidence_N, edges, right=True)
    members = F.one_hot(place_N, len(edges) + 1).double()
    return members[:, members.any(dim=0)]


def surprise(p_NK: Tensor, labels_N: Tensor) -> Tensor:
    return -p_NK.gather(1, labels_N[:, None])[:, 0].clamp_min(torch.finfo(p_NK.dtype).tiny).log()


def squared(p_NK: Tensor, labels_N: Tensor) -> Tensor:
    return (p_NK - F.one_hot(labels_N, p_NK.shape[1])).square().sum(dim=1)
