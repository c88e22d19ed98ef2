"""Measures of collapse: how many dimensions the features use, and whether the teacher distinguishes images.

A collapsed encoder gives all images nearly the same features. Its loss is low, so that only the features show it.

Shapes:  N images   D features   K outputs of the teacher's head
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RANK_EPSILON = 1e-7  # RankMe, equation 1
MIN_RANK = 3.0  # a Ti/16 has about 50 before training; ten classes have 12 after supervised training
MIN_RANK_FRACTION = 0.1  # of the best effective rank so far
MAX_COSINE = 0.999  # untrained: 0.4
ENTROPY_TOLERANCE = 0.01  # in units of log K
PATIENCE = 3  # consecutive checks, so that one unlucky check does not end a run
MIN_DEVIATION = 0.01  # of images from their mean, as a fraction of the pixel range; photographs: 0.2
RECOVERY = 1.1  # a value that grows by more than this factor over these checks is recovering


@dataclass(frozen=True, kw_only=True)
class CollapseMetrics:
    """One check. Entropies are None for methods whose teacher has no distribution over outputs."""

    effective_rank: float  # RankMe: 1 if all features are equal, at most min(N, D)
    feature_std: float  # of normalised features, times √D: 0 if all are equal, 1 if isotropic
    mean_cosine: float  # mean cosine similarity of two images: 1 if all are equal, 0 if isotropic
    teacher_entropy: float | None = None  # mean entropy of the outputs of one image
    teacher_marginal_entropy: float | None = None  # entropy of the outputs averaged over the images
    num_outputs: int | None = None  # K


class Collapse(NamedTuple):
    """What has collapsed, and what to do: the arguments of `VitralError`."""

    what: str
    hint: str


@torch.no_grad()
def measure_collapse(features_ND: Tensor, teacher_probs_NK: Tensor | None = None) -> CollapseMetrics:
    """All metrics of the features and the teacher's output distributions of the same images."""
    teacher = {}
    if teacher_probs_NK is not None:
        entropy, marginal_entropy = output_entropies(teacher_probs_NK)
        teacher = {"teacher_entropy": entropy, "teacher_marginal_entropy": marginal_entropy}
    return CollapseMetrics(
        effective_rank=effective_rank(features_ND),
        feature_std=feature_std(features_ND),
        mean_cosine=mean_cosine(features_ND),
        num_outputs=None if teacher_probs_NK is None else teacher_probs_NK.shape[1],
        **teacher,
    )


def effective_rank(features_ND: Tensor) -> float:
    """RankMe (arXiv 2210.02885, equation 1): exp of the entropy of the singular values, normalised to sum to 1.

    The features are not centred, so that constant features have rank 1 however small their noise is. NaN for features
    that are not finite. Singular values are the roots of the eigenvalues of the smaller Gram matrix, in fp64.
    """
    features = features_ND.double()
    if not features.isfinite().all():
        return math.nan
    if features.shape[0] < features.shape[1]:
        features = features.T
    singular_values = torch.linalg.eigvalsh(features.T @ features).clamp(min=0).sqrt()
    p = singular_values / singular_values.sum().clamp(min=torch.finfo(torch.float64).tiny) + RANK_EPSILON
    return float(torch.special.entr(p).sum().exp())


def feature_std(features_ND: Tensor) -> float:
    """Standard deviation of L2-normalised features over the images, averaged over dimensions, times √D.

    SimSiam (arXiv 2011.10566, section 4.1) uses it without the factor √D, where isotropic features have 1 / √D.
    """
    normalised = F.normalize(features_ND.double(), dim=1)
    return float(normalised.std(dim=0, correction=0).mean() * math.sqrt(features_ND.shape[1]))


def mean_cosine(features_ND: Tensor) -> float:
    """Mean cosine similarity over all pairs of different images: (‖Σ z‖² - Σ ‖z‖²) / (N (N - 1)) for unit vectors z."""
    N = len(features_ND)
    normalised = F.normalize(features_ND.double(), dim=1)
    return float((normalised.sum(dim=0).square().sum() - normalised.square().sum()) / max(N * (N - 1), 1))


def output_entropies(probs_NK: Tensor) -> tuple[float, float]:
    """Mean entropy of the rows, and entropy of the mean row, in nats.

    DINO (arXiv 2104.14294, section 5.3) tells two forms of collapse apart by the entropy of the teacher: log K if its
    output is uniform, 0 if it is one constant dimension. The difference of the two values is the mutual information of
    image and output. It is 0 in both cases.
    """
    probs = probs_NK.double()
    entropy = torch.special.entr(probs).sum(dim=1).mean()
    return float(entropy), float(torch.special.entr(probs.mean(dim=0)).sum())


def image_deviation(images_NCHW: Tensor) -> float:
    """Mean absolute difference of images from their mean image, in the units of the pixels."""
    images = images_NCHW.float()
    return float((images - images.mean(dim=0)).abs().mean())


def advice_for_similar_images(deviation: float) -> str | None:
    """What to do first if features of images collapse whose deviation is this fraction of the pixel range.

    None if the images differ: then the training is to blame.
    """
    if deviation >= MIN_DEVIATION:
        return None
    if deviation == 0:
        return "All images are the same: check them first"
    return f"The images are nearly the same, {deviation:.1%} of the pixel range from their mean: check them first"


def collapse_reason(history: Sequence[CollapseMetrics], remedy: str | None = None) -> Collapse | None:
    """The collapse that the last checks agree on; None if there is none, or fewer than PATIENCE checks.

    `history` has the oldest check first. Features may lose rank for a while after the start of training, so that no
    limit applies while the value recovers. `remedy`: what helps the method, in addition to a lower learning rate.
    """
    if history and not math.isfinite(history[-1].effective_rank):
        return Collapse("features are not finite", "Lower --optim.lr, or use --precision fp32")
    recent = history[-PATIENCE:]
    if len(recent) < PATIENCE:
        return None
    ranks, best_rank = [check.effective_rank for check in recent], max(check.effective_rank for check in history)
    if _stays_below(MIN_RANK, ranks):
        what = f"features have collapsed: their effective rank is {ranks[-1]:.1f}"
    elif _stays_below(1 - MAX_COSINE, [1 - check.mean_cosine for check in recent]):
        what = f"features have collapsed: images have a mean cosine similarity of {recent[-1].mean_cosine:.4f}"
    elif _stays_below(MIN_RANK_FRACTION * best_rank, ranks):
        what = f"features are collapsing: their effective rank fell from {best_rank:.1f} to {ranks[-1]:.1f}"
    else:
        return _teacher_collapse(recent)
    last = f"lengthen --optim.warmup, or {remedy}" if remedy else "or lengthen --optim.warmup"
    return Collapse(what, f"Lower --optim.lr, {last}")


def _teacher_collapse(recent: Sequence[CollapseMetrics]) -> Collapse | None:
    """A teacher whose output is the same for every image: uniform, one constant dimension, or anything else."""
    entropies, marginals = [], []  # relative to log K
    for check in recent:
        if check.teacher_entropy is None or check.teacher_marginal_entropy is None or not check.num_outputs:
            return None
        entropies.append(check.teacher_entropy / math.log(max(check.num_outputs, 2)))
        marginals.append(check.teacher_marginal_entropy / math.log(max(check.num_outputs, 2)))
    if _stays_below(ENTROPY_TOLERANCE, [1 - entropy for entropy in entropies]):
        what = "the teacher has collapsed: its output is uniform for every image"
        return Collapse(what, "Lower --dino.teacher-temperature, or lengthen --optim.warmup")
    if _stays_below(ENTROPY_TOLERANCE, marginals):
        what = "the teacher has collapsed: its output is the same single dimension for every image"
        return Collapse(what, "Raise --dino.teacher-temperature, or use --dino.balance sinkhorn")
    information = [marginal - entropy for entropy, marginal in zip(entropies, marginals, strict=True)]
    if _stays_below(ENTROPY_TOLERANCE, information):
        what = "the teacher has collapsed: its output is the same for every image"
        return Collapse(what, "Raise --dino.momentum, use --dino.balance sinkhorn, or lower --optim.lr")
    return None


def _stays_below(limit: float, values: Sequence[float]) -> bool:
    """Whether all values are below the limit and do not recover."""
    slack = 0.01 * limit  # noise of values that are practically 0
    return max(values) < limit and values[-1] <= RECOVERY * values[0] + slack
