"""Out-of-distribution (OOD) detection: scores, and how well they separate another dataset.

Shapes:  N in-distribution (ID) images   M OOD images   D features   K classes   R resamples
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.bootstrap import Interval, bootstrap, intervals
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, fit_ood_threshold

ScoreName = Literal["max-logit", "energy", "mahalanobis"]
NUM_HISTOGRAM_BINS = 40


@dataclass(frozen=True, kw_only=True)
class OODScore:
    """Quality of one score, which is high for in-distribution images.

    The threshold is fitted on the validation images, or is the model's own if there are none.
    """

    name: ScoreName
    auroc: Interval  # probability that an ID image scores above an OOD image
    fpr95: Interval  # share of OOD images accepted at the threshold that accepts 95% of the ID images
    threshold: float | None  # None: too few validation images
    detection_rate: float  # share of OOD images below the threshold
    false_positive_rate: float  # share of ID images below the threshold
    bin_edges: tuple[float, ...]
    id_histogram: tuple[int, ...]
    ood_histogram: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OODResult:
    dataset: str
    ood_images: int
    id_images: int
    scores: tuple[OODScore, ...]

    @property
    def best(self) -> OODScore:
        return max(self.scores, key=lambda score: score.auroc.value)


class Mahalanobis:
    """Minus the squared Mahalanobis distance to the nearest class mean in feature space (arXiv 1807.03888).

    Class means and one shared covariance, from training images. A thousandth of the mean variance is added to its
    diagonal, so that features without variance do not dominate.
    """

    def __init__(self, features_ND: Tensor, labels_N: Tensor) -> None:
        x = features_ND.double()
        if not len(x):
            raise VitralError("the Mahalanobis score needs training images", "Pass features of training images")
        classes, class_N = labels_N.unique(return_inverse=True)
        sums = torch.zeros(len(classes), x.shape[1], dtype=torch.float64).index_add_(0, class_N, x)
        self.means_KD = sums / class_N.bincount()[:, None]
        residuals = x - self.means_KD[class_N]
        covariance = residuals.T @ residuals / len(x)
        ridge = max(1e-3 * covariance.trace().item() / len(covariance), 1e-12)
        self.cholesky = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))

    def score(self, features_ND: Tensor) -> Tensor:
        x, means = (self._whiten(rows) for rows in (features_ND.double(), self.means_KD))
        return -torch.cdist(x, means).amin(dim=1).square()

    def _whiten(self, rows_ND: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.cholesky, rows_ND.T, upper=False).T


def evaluate_score(
    name: ScoreName,
    scores: tuple[Tensor, Tensor, Tensor],
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    threshold: float | None = None,
) -> OODScore:
    """Evaluate the scores of validation, ID and OOD images. `threshold` is used if there are no validation images."""
    validation, id_scores, ood_scores = (values.double().cpu() for values in scores)
    threshold = fit_ood_threshold(validation, false_positive_rate) if len(validation) else threshold
    auroc, fpr95 = auroc_and_fpr95(id_scores, ood_scores)
    low, high = _histogram_range(torch.cat([id_scores, ood_scores]))
    edges = torch.linspace(low, high, NUM_HISTOGRAM_BINS + 1, dtype=torch.float64)
    bins = (torch.bucketize(values, edges[1:-1], right=True) for values in (id_scores, ood_scores))
    histograms = [indices.bincount(minlength=NUM_HISTOGRAM_BINS).tolist() for indices in bins]
    cutoff = -math.inf if threshold is None else threshold
    return OODScore(
        name=name,
        auroc=auroc,
        fpr95=fpr95,
        threshold=threshold,
        detection_rate=(ood_scores < cutoff).double().mean().item(),
        false_positive_rate=(id_scores < cutoff).double().mean().item(),
        bin_edges=tuple(edges.tolist()),
        id_histogram=tuple(histograms[0]),
        ood_histogram=tuple(histograms[1]),
    )


def _histogram_range(scores: Tensor) -> tuple[float, float]:
    """Range without the outermost 0.2%, which are counted in the outer bins: outliers would compress the rest."""
    low, high = scores.quantile(torch.tensor([0.002, 0.998], dtype=torch.float64)).tolist()
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def auroc_and_fpr95(id_N: Tensor, ood_M: Tensor) -> tuple[Interval, Interval]:
    """Area under the ROC curve, with ties counting half, and the false-positive rate at 95% true positives."""
    id_scores, ood_scores = id_N.sort().values, ood_M.sort().values
    if not (len(id_scores) and len(ood_scores)):
        raise VitralError(
            "no in-distribution images" if len(ood_scores) else "no out-of-distribution images",
            "Choose a folder that contains images",
        )
    num_not_above, num_below = (torch.searchsorted(id_scores, ood_scores, right=right) for right in (True, False))

    def statistics(id_RN: Tensor, ood_RM: Tensor) -> Tensor:
        N, M = len(id_scores), len(ood_scores)
        cumulative_RN = F.pad(id_RN.cumsum(dim=1), (1, 0))
        lower = cumulative_RN.index_select(1, num_not_above) + cumulative_RN.index_select(1, num_below)
        auroc = (ood_RM * (N - lower / 2)).double().sum(dim=1) / (N * M)
        # The largest ID score with at least 95% of the ID weight at or above it.
        rejected = torch.full((len(cumulative_RN), 1), float(math.floor(0.05 * N + 1e-9)))
        index = (torch.searchsorted(cumulative_RN, rejected, right=True) - 1).clamp(0, N - 1)
        first = torch.searchsorted(ood_scores, id_scores[index[:, 0]])
        cumulative_RM = F.pad(ood_RM.cumsum(dim=1), (1, 0))
        fpr = 1 - cumulative_RM.gather(1, first[:, None])[:, 0].double() / M
        return torch.stack([auroc, fpr], dim=1)

    values = statistics(torch.ones(1, len(id_scores)), torch.ones(1, len(ood_scores)))[0]
    auroc, fpr95 = intervals(values, bootstrap(statistics, len(id_scores), len(ood_scores)))
    return auroc, fpr95
