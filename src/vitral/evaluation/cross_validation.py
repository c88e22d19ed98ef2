"""Results of a cross-validation: the accuracy of each fold, intervals, and the predictions of all images.

Every image is predicted once, by the model that was trained without its fold ("out-of-fold").

Shapes:  N images   K classes   F folds
"""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.report import EvaluationReport, build_report
from vitral.models.calibration import Calibration
from vitral.utils.atomic import atomic_write
from vitral.utils.intervals import Interval, student_quantile
from vitral.utils.serialization import to_dict

FoldModel = Literal["refit", "ensemble"]
PREDICTIONS_FILE = "out_of_fold.npz"
INTERVAL_NOTE = (
    "Student's t includes the differences between the trained models, but is based on few values. Wilson's interval "
    "includes only the choice of images."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldPredictions:
    """The predictions of a model for the fold that it was trained without."""

    images: np.ndarray[Any, Any]  # (N,) paths, or positions in the dataset
    labels: Tensor  # (N,)
    logits: Tensor  # (N, K)
    temperature: float
    num_images: int  # of all folds

    def save(self, path: Path) -> None:
        arrays = {"images": self.images, "labels": self.labels.numpy(), "logits": self.logits.numpy()}
        with io.BytesIO() as file:
            np.savez(file, **arrays, temperature=self.temperature, num_images=self.num_images)  # type: ignore[arg-type]
            atomic_write(path, file.getvalue())


def fold_predictions(target: EvalTarget, logits_NK: Tensor) -> FoldPredictions:
    """The predictions of an evaluation on the fold of its run."""
    dataset, split = target.dataset, target.split
    rows = target.source_splits[0].rows if target.source_splits else None
    if split.locations is not None:
        names = [str(location) for location in split.locations]
    else:
        names = [str(row) for row in (range(len(split)) if rows is None else rows.tolist())]
    return FoldPredictions(
        images=np.array(names),
        labels=split.labels.cpu(),
        logits=logits_NK.float().cpu(),
        temperature=target.predictor.model_config.calibration.temperature,
        num_images=len(dataset.train) + len(dataset.validation) + len(dataset.test),
    )


def load_fold_predictions(path: Path) -> FoldPredictions | None:
    """None if the file does not exist or is damaged: the fold is then evaluated again."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return FoldPredictions(
                images=arrays["images"],
                labels=torch.from_numpy(arrays["labels"]),
                logits=torch.from_numpy(arrays["logits"]),
                temperature=float(arrays["temperature"]),
                num_images=int(arrays["num_images"]),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


@dataclass(frozen=True, kw_only=True)
class FoldResult:
    number: int
    folder: str
    images: int
    accuracy: float
    best_epoch: int  # selected on validation images from the other folds
    epochs: int
    seconds: float  # of the training


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """Result of a cross-validation; written to cross_validation.json."""

    data: str
    recipe: str
    folds: tuple[FoldResult, ...]
    accuracy: Interval  # mean over the folds, with Student's t interval
    pooled: EvaluationReport  # of all out-of-fold predictions, calibrated per fold
    fold_model: FoldModel
    model_folder: str  # the folder of the cross-validation, which contains the model
    refit_epochs: int  # mean best epoch, for which the refit is trained
    test: EvaluationReport | None = None  # of the model, on test images that are in no fold
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        reports = {"pooled": self.pooled.as_dict(), "test": None if self.test is None else self.test.as_dict()}
        return {**to_dict(self), **reports}


def student_interval(values: Sequence[float]) -> Interval:
    """Mean and 95% interval of Student's t distribution, within [0, 1]."""
    mean, count = float(np.mean(values)), len(values)
    half = student_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(value=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0))


def pool_predictions(folds: Sequence[FoldPredictions]) -> tuple[Tensor, Tensor]:
    """Calibrated logits (N, K) and labels (N,) of all folds."""
    logits = torch.cat([fold.logits.double() / fold.temperature for fold in folds])
    return logits, torch.cat([fold.labels for fold in folds])


def pooled_report(folds: Sequence[FoldPredictions], classes: tuple[str, ...]) -> EvaluationReport:
    return build_report(*pool_predictions(folds), classes, Calibration(), split="out-of-fold")


def check_same_images(folds: Sequence[FoldPredictions], data: str) -> None:
    """Refuse folds of different states of the dataset: an image could be in two of them."""
    names = np.concatenate([fold.images for fold in folds])
    if len({fold.num_images for fold in folds}) > 1 or len(np.unique(names)) < len(names):
        raise VitralError(
            f"{data} has changed since the first fold was trained", "Restore the images, or choose another --out"
        )


def predictions_csv(folds: Sequence[FoldPredictions], classes: tuple[str, ...]) -> str:
    """One row per image, those whose label is least probable first: wrong labels are likely among them."""
    logits, labels = pool_predictions(folds)
    probabilities = logits.softmax(dim=1)
    confidence, predicted = probabilities.max(dim=1)
    own = probabilities.gather(1, labels[:, None])[:, 0]
    names = np.concatenate([fold.images for fold in folds])
    numbers = [number for number, fold in enumerate(folds, start=1) for _ in range(len(fold.labels))]
    with io.StringIO() as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", "fold", "label", "label_probability", "predicted", "confidence", "correct"])
        for row in own.argsort(stable=True).tolist():
            label, prediction = classes[int(labels[row])], classes[int(predicted[row])]
            values = (f"{own[row]:.4f}", prediction, f"{confidence[row]:.4f}", int(label == prediction))
            writer.writerow([names[row], numbers[row], label, *values])
        return file.getvalue()
