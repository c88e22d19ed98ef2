"""Telling what a model was trained on from what it was not: scores, and how well they do against another set.

Shapes:  N images   M unknown images   D features   K classes   R resamples
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.bootstrap import Interval, bootstrap, intervals
from vitral.evaluation.calibration import FALSE_ALARMS, threshold

ScoreName = Literal["max-logit", "energy", "mahalanobis"]
BARS = 40  # of the histograms


@dataclass(frozen=True, kw_only=True)
class UnknownScore:
    """One score: high for known images. The threshold is the validation images', or the model's own without any."""

    name: ScoreName
    auroc: Interval  # chance that a known image scores above an unknown one
    fpr95: Interval  # share of unknown images taken for known where 95 % of the known ones are
    below: float | None  # the threshold; None: too few validation images
    caught: float  # share of the unknown images below it
    false_alarms: float  # share of the known ones
    edges: tuple[float, ...]  # of the histograms
    known: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unknown:
    against: str
    images: int
    known_images: int
    scores: tuple[UnknownScore, ...]

    @property
    def best(self) -> UnknownScore:
        return max(self.scores, key=lambda score: score.auroc.value)


class Mahalanobis:
    """Minus the squared distance to the nearest class in feature space, in units of the classes' common spread.

    Class means and one covariance for all, from training images (arXiv 1807.03888); a thousandth of its mean variance
    is added to its diagonal, so that features without spread do not decide.
    """

    def __init__(self, features_ND: Tensor, labels_N: Tensor) -> None:
        x = features_ND.double()
        if not len(x):
            raise VitralError("there are no training images to measure distances from", "give the features of some")
        names, label_N = labels_N.unique(return_inverse=True)
        sums = torch.zeros(len(names), x.shape[1], dtype=torch.float64).index_add_(0, label_N, x)
        self.means_KD = sums / label_N.bincount()[:, None]
        rest = x - self.means_KD[label_N]
        covariance = rest.T @ rest / len(x)
        ridge = max(1e-3 * covariance.trace().item() / len(covariance), 1e-12)
        self.root = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))

    def score(self, features_ND: Tensor) -> Tensor:
        x, means = (self._whitened(rows) for rows in (features_ND.double(), self.means_KD))
        return -torch.cdist(x, means).amin(dim=1).square()

    def _whitened(self, rows_ND: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root, rows_ND.T, upper=False).T


def judge_score(
    name: ScoreName,
    scores: tuple[Tensor, Tensor, Tensor],
    false_alarms: float = FALSE_ALARMS,
    below: float | None = None,
) -> UnknownScore:
    """`scores` of the validation images, of known and of unknown images. `below`: the threshold without the first."""
    validation, known, unknown = (one.double().cpu() for one in scores)
    below = threshold(validation, false_alarms) if len(validation) else below
    auroc, fpr95 = separation(known, unknown)
    edges = torch.linspace(*_range(torch.cat([known, unknown])), BARS + 1, dtype=torch.float64)
    places = (torch.bucketize(one, edges[1:-1], right=True) for one in (known, unknown))
    counts = [place.bincount(minlength=BARS).tolist() for place in places]
    least = -math.inf if below is None else below
    return UnknownScore(
        name=name,
        auroc=auroc,
        fpr95=fpr95,
        below=below,
        caught=(unknown < least).double().mean().item(),
        false_alarms=(known < least).double().mean().item(),
        edges=tuple(edges.tolist()),
        known=tuple(counts[0]),
        unknown=tuple(counts[1]),
    )


def _range(scores: Tensor) -> tuple[float, float]:
    """Without the outermost thousandths, which would leave all bars in a corner; the outer bars hold them."""
    low, high = scores.quantile(torch.tensor([0.002, 0.998], dtype=torch.float64)).tolist()
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def separation(known_N: Tensor, unknown_M: Tensor) -> tuple[Interval, Interval]:
    """Area under the ROC curve, ties counting half, and the false positives at 95 % true positives."""
    known, unknown = known_N.sort().values, unknown_M.sort().values
    if not (len(known) and len(unknown)):
        raise VitralError(
            "there are no images to compare" if len(unknown) else "there are no unknown images",
            "give a folder with images",
        )
    above, from_here = (torch.searchsorted(known, unknown, right=right) for right in (True, False))

    def figures(known_RN: Tensor, unknown_RM: Tensor) -> Tensor:
        N, M = len(known), len(unknown)
        below_RN = torch.nn.functional.pad(known_RN.cumsum(dim=1), (1, 0))
        lower = below_RN.index_select(1, above) + below_RN.index_select(1, from_here)
        auroc = (unknown_RM * (N - lower / 2)).double().sum(dim=1) / (N * M)
        # the highest known score that keeps 95 % of the known weight at or above it
        lost = torch.full((len(below_RN), 1), float(math.floor(0.05 * N + 1e-9)))
        place = (torch.searchsorted(below_RN, lost, right=True) - 1).clamp(0, N - 1)
        first = torch.searchsorted(unknown, known[place[:, 0]])
        below_RM = torch.nn.functional.pad(unknown_RM.cumsum(dim=1), (1, 0))
        fpr = 1 - below_RM.gather(1, first[:, None])[:, 0].double() / M
        return torch.stack([auroc, fpr], dim=1)

    once = figures(torch.ones(1, len(known)), torch.ones(1, len(unknown)))[0]
    found = intervals(once, bootstrap(figures, len(known), len(unknown)))
    return found[0], found[1]
