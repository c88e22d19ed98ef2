"""Out-of-distribution (OOD) detection: scores, and how well they separate another dataset.

Shapes:  N in-distribution (ID) images   M OOD images   D features   K classes   R resamples
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.datasets import load_builtin_dataset
from vitral.data.files.walk import SkippedFiles, find_images
from vitral.data.lazy_images import Images
from vitral.data.names import is_file_dataset
from vitral.data.preprocess import to_model_input
from vitral.data.variable_images import stack_images
from vitral.errors import VitralError
from vitral.evaluation.bootstrap import bootstrap, intervals
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, fit_ood_threshold
from vitral.evaluation.data import EvalTarget, evenly_spaced_indices, load_dataset_for, load_split, unreadable_note
from vitral.inference.predictor import Predictor
from vitral.models.calibration import LogitScore, id_score
from vitral.utils.intervals import Interval
from vitral.utils.progress import LogFn

ScoreName = Literal["max-logit", "energy", "mahalanobis"]
NUM_HISTOGRAM_BINS = 40
MAX_IMAGES = 10_000  # OOD images, and training images for the Mahalanobis distance


@dataclass(frozen=True, kw_only=True)
class OODScore:
    """Quality of one score, which is high for in-distribution images.

    The threshold is fitted on the validation images, or is the model's own if there are too few.
    """

    name: ScoreName
    auroc: Interval  # probability that an ID image scores above an OOD image
    fpr95: Interval  # share of OOD images accepted at the threshold that accepts 95% of the ID images
    threshold: float | None  # None: too few validation images, and the model has none
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


def evaluate_score(name: ScoreName, scores: tuple[Tensor, Tensor, Tensor], threshold: float | None = None) -> OODScore:
    """Evaluate the scores of validation, ID and OOD images. `threshold` is used if validation images are too few."""
    validation, id_scores, ood_scores = (values.double().cpu() for values in scores)
    fitted_threshold = fit_ood_threshold(validation, FALSE_POSITIVE_RATE)
    threshold = threshold if fitted_threshold is None else fitted_threshold
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


def evaluate_ood(target: EvalTarget, logits: Tensor, ood_data: str, log: LogFn, notes: list[str]) -> OODResult:
    """Compare three OOD scores on the target's images and on images of another dataset or folder.

    Sentences about skipped and unreadable files are added to `notes`.
    """
    log(f"Evaluating OOD detection on {ood_data}")
    predictor, validation = target.predictor, target.validation_split
    trained_on = predictor.model_config.trained_on
    if ood_data == trained_on:
        raise VitralError(f"the model was trained on {ood_data}", "Pass --ood images that it was not trained on")
    ood_images = load_ood_images(ood_data, predictor, notes)
    dataset = load_dataset_for(trained_on, predictor, target.recipe)
    train = load_split(dataset.train, predictor, indices=evenly_spaced_indices(len(dataset.train), MAX_IMAGES))
    mahalanobis = Mahalanobis(predictor.features(train.images), train.labels)
    ood_logits = predictor.logits(ood_images)
    calibration = predictor.model_config.calibration
    names: tuple[LogitScore, ...] = ("max-logit", "energy")
    scores = [
        evaluate_score(
            name,
            (id_score(target.validation_logits, name), id_score(logits, name), id_score(ood_logits, name)),
            threshold=calibration.ood_threshold if name == calibration.ood_score else None,
        )
        for name in names
    ]
    validation_score = mahalanobis.score(predictor.features(validation.images)) if len(validation) else torch.empty(0)
    id_scores, ood_scores = (
        mahalanobis.score(predictor.features(images)) for images in (target.split.images, ood_images)
    )
    scores.append(evaluate_score("mahalanobis", (validation_score, id_scores, ood_scores)))
    return OODResult(dataset=ood_data, ood_images=len(ood_images), id_images=len(logits), scores=tuple(scores))


def load_ood_images(name: str, predictor: Predictor, notes: list[str] | None = None) -> Images:
    """Evenly spaced images of a built-in test set, or of a folder in any layout, at the model's input size."""
    if not is_file_dataset(name):
        test = load_builtin_dataset(name).test
        indices = evenly_spaced_indices(len(test), MAX_IMAGES)
        return to_model_input(test.images[indices], predictor.model_config.preprocessing)
    if not Path(name).exists():
        raise VitralError(f"no such folder: {name}", "Pass --ood a folder of images or a built-in dataset")
    skipped = SkippedFiles()
    files = find_images([Path(name)], skipped.add)
    selected = (files[index] for index in evenly_spaced_indices(len(files), MAX_IMAGES).tolist())
    decoded = [pixels for batch in predictor.decode_batches(selected) for _, pixels in batch]
    images = [pixels for pixels in decoded if isinstance(pixels, Tensor)]
    errors = [message for message in decoded if isinstance(message, str)]
    if not images:
        raise VitralError(f"no readable images in {name}", "Pass --ood a folder of images or a built-in dataset")
    if notes is not None:
        notes += [note for note in (skipped.summary(), unreadable_note(errors) if errors else None) if note]
    return stack_images(images)
