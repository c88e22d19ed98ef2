"""Predictions as values, dictionaries and table rows. Imports no torch, so that exported models can use it too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from vitral.data.files.walk import SkippedFile
from vitral.errors import VitralError, truncate_list
from vitral.models.conformal import ConformalSets
from vitral.utils.json_toml import dump_json

if TYPE_CHECKING:
    import pandas

TABLE_COLUMNS = (
    "file", "label", "probability", "labels", "probabilities", "ood", "error", "engine", "prediction_set", "coverage"
)  # fmt: skip
CSV_COLUMNS = ("file", "rank", "label", "probability", "ood", "error", "engine", "prediction_set", "coverage")


@dataclass(frozen=True, kw_only=True)
class Label:
    name: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class PredictionSet:
    """Classes that contain the true one for a share `coverage` of all images like the training set."""

    labels: tuple[str, ...]  # class names, most probable first; at least one
    coverage: float

    def __str__(self) -> str:
        return f"one of: {truncate_list(self.labels)} ({100 * self.coverage:.4g}% coverage)"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Ranked labels of one image, or the reason why it could not be read."""

    source: str  # file name, or "image" for images passed in memory
    labels: tuple[Label, ...] = ()  # most probable first
    is_ood: bool = False  # out-of-distribution: the OOD score is below the calibrated threshold
    inverted: Label | None = None  # best label of the negative, for a greyscale image with inverted brightness
    error: str | None = None
    engine: str | None = None  # name of the engine that computed the logits
    prediction_set: PredictionSet | None = None  # if the model has prediction sets (see `vitral.calibrate`)

    @property
    def best(self) -> Label:
        if not self.labels:
            raise VitralError(f"no prediction for {self.source}: {self.error}", "Check .error before .best")
        return self.labels[0]


class Predictions(list[Prediction]):
    """Predictions of several images, in order. A list, with a table on request.

    `skipped` holds the path and the reason of every file in the given folders that was not predicted, such as hidden
    files, dangling links and files that are not images.
    """

    def __init__(self, predictions: Iterable[Prediction] = (), skipped: Sequence[SkippedFile] = ()) -> None:
        super().__init__(predictions)
        self.skipped = tuple(skipped)  # after the predictions: folders are listed as they are reached

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice, /) -> Predictions: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Prediction | Predictions:
        return Predictions(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def to_dataframe(self) -> pandas.DataFrame:
        """A pandas DataFrame with one row per image and the columns of `vitral predict --out FILE.parquet`.

        They are file, label, probability, labels, probabilities, ood, error, engine, prediction_set and coverage. An
        unreadable image has an error and no labels.
        """
        try:
            dataframe = import_module("pandas").DataFrame
        except ImportError as error:
            raise VitralError("a DataFrame requires pandas", "pip install 'vitral[pandas]'") from error
        rows = [table_row(prediction) for prediction in self]
        return dataframe(rows, columns=TABLE_COLUMNS)


def table_row(prediction: Prediction) -> dict[str, Any]:
    """TABLE_COLUMNS of one image."""
    best = prediction.labels[0] if prediction.labels else None
    return {
        "file": prediction.source,
        "label": None if best is None else best.name,
        "probability": None if best is None else best.probability,
        "labels": [label.name for label in prediction.labels],
        "probabilities": [label.probability for label in prediction.labels],
        "ood": None if prediction.error is not None else prediction.is_ood,
        "error": prediction.error,
        "engine": prediction.engine,
        "prediction_set": None if prediction.prediction_set is None else list(prediction.prediction_set.labels),
        "coverage": None if prediction.prediction_set is None else prediction.prediction_set.coverage,
    }


def source_name(image: object) -> str:
    """`Prediction.source` of an image: its path, or "image" if it was passed in memory."""
    return str(image) if isinstance(image, str | Path) else "image"


def rank_labels(classes: Sequence[str], probabilities: Sequence[float], top: int | None) -> tuple[Label, ...]:
    """The `top` most probable labels (all if None), most probable first; ties keep the order of the classes."""
    order = sorted(zip(classes, probabilities, strict=True), key=lambda item: -item[1])
    return tuple(Label(name=name, probability=probability) for name, probability in order[:top])


def prediction_set(
    sets: ConformalSets | None, classes: Sequence[str], probabilities: Sequence[float]
) -> PredictionSet | None:
    """The prediction set of an image, if the model has prediction sets."""
    if sets is None:
        return None
    labels = tuple(classes[index] for index in sets.members(probabilities))
    return PredictionSet(labels=labels, coverage=sets.coverage)


def assemble_predictions(
    images: Iterable[tuple[str, object]],
    rows: Iterable[tuple[Sequence[float], bool]],
    classes: Sequence[str],
    top: int | None,
    engine: str,
    sets: ConformalSets | None = None,
) -> Iterator[Prediction]:
    """Combine decoded images with their probabilities.

    images: (source, pixels) pairs, with an error message in place of the pixels of an unreadable image.
    rows: (probabilities, is_ood) of the readable images, in the same order.
    """
    remaining_rows = iter(rows)
    for source, pixels in images:
        if isinstance(pixels, str):
            yield Prediction(source=source, error=pixels, engine=engine)
        else:
            probabilities, is_ood = next(remaining_rows)
            yield Prediction(
                source=source,
                labels=rank_labels(classes, probabilities, top),
                is_ood=is_ood,
                engine=engine,
                prediction_set=prediction_set(sets, classes, probabilities),
            )


def prediction_to_dict(prediction: Prediction) -> dict[str, Any]:
    """JSON form; `prediction_from_dict` is its inverse."""
    result: dict[str, Any] = {"file": prediction.source, "labels": [vars(label) for label in prediction.labels]}
    if prediction.inverted is not None:
        result["inverted"] = vars(prediction.inverted)
    if prediction.prediction_set is not None:
        result["prediction_set"] = prediction_set_to_dict(prediction.prediction_set)
    result |= {"ood": prediction.is_ood} if prediction.error is None else {"error": prediction.error}
    return result | ({"engine": prediction.engine} if prediction.engine is not None else {})


def prediction_set_to_dict(prediction_set: PredictionSet) -> dict[str, Any]:
    return {"labels": list(prediction_set.labels), "coverage": prediction_set.coverage}


def prediction_from_dict(values: dict[str, Any]) -> Prediction:
    label_set: dict[str, Any] | None = values.get("prediction_set")
    return Prediction(
        source=values["file"],
        labels=tuple(Label(**label) for label in values["labels"]),
        is_ood=values.get("ood", False),
        inverted=Label(**values["inverted"]) if "inverted" in values else None,
        error=values.get("error"),
        engine=values.get("engine"),
        prediction_set=None
        if label_set is None
        else PredictionSet(labels=tuple(label_set["labels"]), coverage=label_set["coverage"]),
    )


def csv_rows(prediction: Prediction) -> list[list[str]]:
    """Rows of CSV_COLUMNS: one per label, or a single row with the error. The prediction set is a JSON list."""
    engine, label_set = prediction.engine or "", prediction.prediction_set
    if prediction.error is not None:
        return [[prediction.source, "", "", "", "", prediction.error, engine, "", ""]]
    ood = "true" if prediction.is_ood else "false"
    names = "" if label_set is None else dump_json(list(label_set.labels), ensure_ascii=False)
    coverage = "" if label_set is None else f"{label_set.coverage:g}"
    return [
        [prediction.source, str(rank), label.name, f"{label.probability:.6f}", ood, "", engine, names, coverage]
        for rank, label in enumerate(prediction.labels, start=1)
    ]
