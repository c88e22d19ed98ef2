"""Predictions as values, dictionaries and table rows. Imports no torch, so that exported models can use it too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast, overload

from vitral.data.files.walk import SkippedFile
from vitral.errors import VitralError, truncate_list
from vitral.models.conformal import ConformalIntervals, ConformalSets
from vitral.utils.json_toml import dump_json

if TYPE_CHECKING:
    import pandas

TABLE_COLUMNS = (
    "file", "label", "probability", "labels", "probabilities", "ood", "error", "engine", "prediction_set", "coverage",
    "present",
)  # fmt: skip
VALUE_TABLE_COLUMNS = (
    "file", "value", "low", "high", "targets", "values", "lows", "highs", "coverage", "error", "engine"
)  # fmt: skip
VALUE_CSV_COLUMNS = ("file", "target", "value", "low", "high", "coverage", "error", "engine")
CSV_COLUMNS = (
    "file", "rank", "label", "probability", "ood", "error", "engine", "prediction_set", "coverage", "present"
)  # fmt: skip


class ShortRepr:
    """A dataclass whose `repr` leaves out the fields that have their default values."""

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(cast(Any, self)))
        shown = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Label(ShortRepr):
    """A class with its probability."""

    name: str
    probability: float
    threshold: float | None = None  # of a multi-label model: the probability from which the label is predicted

    @property
    def is_present(self) -> bool:
        """Whether a multi-label model predicts this label. Other models predict the best label only."""
        return self.threshold is not None and self.probability >= self.threshold


@dataclass(frozen=True, kw_only=True)
class PredictionSet:
    """Classes that contain the true one for a share `coverage` of all images like the training set."""

    labels: tuple[str, ...]  # class names, most probable first; at least one
    coverage: float

    def __str__(self) -> str:
        return f"one of: {truncate_list(self.labels)} ({100 * self.coverage:.4g}% coverage)"


@dataclass(frozen=True, kw_only=True)
class TargetValue:
    """Predicted value of one target of a regression, in its units, and its prediction interval if the model has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    coverage: float | None = None  # share of images like the training set whose true value is in the interval

    def __str__(self) -> str:
        """`age 31.4 (90%: 25.0 to 37.8)`, with two significant digits of the width of the interval."""
        if self.low is None or self.high is None or self.coverage is None:
            return f"{self.name} {self.value:.4g}"
        half_width = (self.high - self.low) / 2
        decimals = min(max(1 - math.floor(math.log10(half_width)), 0), 9) if half_width > 0 else 4
        value, low, high = (f"{number:,.{decimals}f}" for number in (self.value, self.low, self.high))
        return f"{self.name} {value} ({100 * self.coverage:.4g}%: {low} to {high})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction(ShortRepr):
    """Ranked labels of one image, or its values for a regression, or the reason why it could not be read."""

    source: str  # file name, or "image" for images passed in memory
    labels: tuple[Label, ...] = ()  # most probable first; of a multi-label model, the present ones first
    is_ood: bool = False  # out-of-distribution: the OOD score is below the calibrated threshold
    inverted: Label | None = None  # best label of the negative, for a greyscale image with inverted brightness
    error: str | None = None
    engine: str | None = None  # name of the engine that computed the logits
    prediction_set: PredictionSet | None = None  # if the model has prediction sets (see `vitral.calibrate`)
    values: tuple[TargetValue, ...] = ()  # one per target of a regression, which has no labels
    is_regression: bool = False

    @property
    def value(self) -> float:
        """The value of the first target of a regression."""
        if not self.values:
            reason = self.error or "the model predicts labels"
            raise VitralError(f"no value for {self.source}: {reason}", "Check .error before .value; labels: .best")
        return self.values[0].value

    @property
    def best(self) -> Label:
        """The most probable label. Raises VitralError for an unreadable image and for a regression."""
        if self.values:
            raise VitralError(f"no label for {self.source}: the model is a regression", "Use .value or .values")
        if not self.labels:
            raise VitralError(f"no prediction for {self.source}: {self.error}", "Check .error before .best")
        return self.labels[0]

    @property
    def present(self) -> tuple[Label, ...]:
        """The labels that a multi-label model predicts: those above their thresholds; may be empty."""
        return tuple(label for label in self.labels if label.is_present)


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

        They are file, label, probability, labels, probabilities, ood, error, engine, prediction_set, coverage and
        present, the labels of a multi-label model. An unreadable image has an error and no labels. Of a regression they
        are file, value, low, high (of the first target), targets, values, lows, highs, coverage, error and engine.
        """
        try:
            dataframe = import_module("pandas").DataFrame
        except ImportError as error:
            raise VitralError("a DataFrame requires pandas", "pip install 'vitral[pandas]'") from error
        rows = [table_row(prediction) for prediction in self]
        return dataframe(rows, columns=table_columns(bool(self) and self[0].is_regression))


def table_columns(is_regression: bool) -> tuple[str, ...]:
    return VALUE_TABLE_COLUMNS if is_regression else TABLE_COLUMNS


def csv_columns(is_regression: bool) -> tuple[str, ...]:
    return VALUE_CSV_COLUMNS if is_regression else CSV_COLUMNS


def table_row(prediction: Prediction) -> dict[str, Any]:
    """TABLE_COLUMNS of one image, or VALUE_TABLE_COLUMNS of a regression."""
    if prediction.is_regression:
        values = prediction.values
        first = values[0] if values else None
        return {
            "file": prediction.source,
            **{name: None if first is None else getattr(first, name) for name in ("value", "low", "high")},
            "targets": [value.name for value in values],
            "values": [value.value for value in values],
            "lows": [value.low for value in values],
            "highs": [value.high for value in values],
            "coverage": None if first is None else first.coverage,
            "error": prediction.error,
            "engine": prediction.engine,
        }
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
        "present": [label.name for label in prediction.present]
        if best is not None and best.threshold is not None
        else None,
    }


def source_name(image: object) -> str:
    """`Prediction.source` of an image: its path, or "image" if it was passed in memory."""
    return str(image) if isinstance(image, str | Path) else "image"


def rank_labels(
    classes: Sequence[str], probabilities: Sequence[float], top: int | None, thresholds: Sequence[float] = ()
) -> tuple[Label, ...]:
    """The `top` most probable labels (all if None), most probable first; ties keep the order of the classes.

    With thresholds, of a multi-label model: all labels above their thresholds, then those nearest to theirs.
    """
    if top is not None and top < 1:
        raise VitralError(f"top must be at least 1, got {top}", "None returns all labels")
    if not thresholds:
        order = sorted(zip(classes, probabilities, strict=True), key=lambda item: -item[1])
        return tuple(Label(name=name, probability=probability) for name, probability in order[:top])
    rows = zip(classes, probabilities, thresholds, strict=True)
    labels = [Label(name=name, probability=probability, threshold=threshold) for name, probability, threshold in rows]
    present = sorted((label for label in labels if label.is_present), key=lambda label: -label.probability)
    absent = [label for label in labels if not label.is_present]
    absent.sort(key=lambda label: (label.threshold or 0.0) - label.probability)
    return (*present, *absent[: None if top is None else max(top - len(present), 0)])


def label_to_dict(label: Label) -> dict[str, Any]:
    """JSON form of a label; `label_from_dict` is its inverse."""
    values: dict[str, Any] = {"name": label.name, "probability": label.probability}
    return values if label.threshold is None else values | {"threshold": label.threshold, "present": label.is_present}


def label_from_dict(values: dict[str, Any]) -> Label:
    return Label(name=values["name"], probability=values["probability"], threshold=values.get("threshold"))


def target_values(
    names: Sequence[str], values: Sequence[float], intervals: ConformalIntervals | None
) -> tuple[TargetValue, ...]:
    """The values of one image with their prediction intervals, if the model has any."""
    if intervals is None:
        return tuple(TargetValue(name=name, value=value) for name, value in zip(names, values, strict=True))
    return tuple(
        TargetValue(name=name, value=value, low=value - width, high=value + width, coverage=intervals.coverage)
        for name, value, width in zip(names, values, intervals.half_widths, strict=True)
    )


def assemble_values(
    images: Iterable[tuple[str, object]],
    rows: Iterable[Sequence[float]],
    names: Sequence[str],
    engine: str,
    intervals: ConformalIntervals | None = None,
) -> Iterator[Prediction]:
    """Combine decoded images with the values of a regression; as `assemble_predictions`."""
    remaining_rows = iter(rows)
    for source, pixels in images:
        if isinstance(pixels, str):
            yield Prediction(source=source, error=pixels, engine=engine, is_regression=True)
        else:
            values = target_values(names, next(remaining_rows), intervals)
            yield Prediction(source=source, values=values, engine=engine, is_regression=True)


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
    thresholds: Sequence[float] = (),
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
                labels=rank_labels(classes, probabilities, top, thresholds),
                is_ood=is_ood,
                engine=engine,
                prediction_set=prediction_set(sets, classes, probabilities),
            )


def prediction_to_dict(prediction: Prediction) -> dict[str, Any]:
    """JSON form; `prediction_from_dict` is its inverse."""
    engine = {"engine": prediction.engine} if prediction.engine is not None else {}
    if prediction.is_regression:
        values = [target_value_to_dict(value) for value in prediction.values]
        error = {"error": prediction.error} if prediction.error is not None else {}
        return {"file": prediction.source, "values": values} | error | engine
    result: dict[str, Any] = {
        "file": prediction.source,
        "labels": [label_to_dict(label) for label in prediction.labels],
    }
    if prediction.inverted is not None:
        result["inverted"] = label_to_dict(prediction.inverted)
    if prediction.prediction_set is not None:
        result["prediction_set"] = prediction_set_to_dict(prediction.prediction_set)
    result |= {"ood": prediction.is_ood} if prediction.error is None else {"error": prediction.error}
    return result | engine


def target_value_to_dict(value: TargetValue) -> dict[str, Any]:
    return {name: item for name, item in vars(value).items() if item is not None}


def prediction_set_to_dict(prediction_set: PredictionSet) -> dict[str, Any]:
    return {"labels": list(prediction_set.labels), "coverage": prediction_set.coverage}


def prediction_from_dict(values: dict[str, Any]) -> Prediction:
    label_set: dict[str, Any] | None = values.get("prediction_set")
    return Prediction(
        source=values["file"],
        labels=tuple(label_from_dict(label) for label in values.get("labels", ())),
        is_ood=values.get("ood", False),
        inverted=label_from_dict(values["inverted"]) if "inverted" in values else None,
        error=values.get("error"),
        engine=values.get("engine"),
        prediction_set=None
        if label_set is None
        else PredictionSet(labels=tuple(label_set["labels"]), coverage=label_set["coverage"]),
        values=tuple(TargetValue(**value) for value in values.get("values", ())),
        is_regression="values" in values,
    )


def csv_rows(prediction: Prediction) -> list[list[str]]:
    """Rows of `csv_columns`: one per label or target, or a single row with the error.

    The prediction set is a JSON list; `present` says whether a multi-label model predicts the label.
    """
    if prediction.is_regression:
        return value_csv_rows(prediction)
    engine, label_set = prediction.engine or "", prediction.prediction_set
    if prediction.error is not None:
        return [[prediction.source, "", "", "", "", prediction.error, engine, "", "", ""]]
    ood = "true" if prediction.is_ood else "false"
    names = "" if label_set is None else dump_json(list(label_set.labels), ensure_ascii=False)
    coverage = "" if label_set is None else f"{label_set.coverage:g}"

    def present(label: Label) -> str:
        return "" if label.threshold is None else str(label.is_present).lower()

    return [
        [
            prediction.source,
            str(rank),
            label.name,
            f"{label.probability:.6f}",
            ood,
            "",
            engine,
            names,
            coverage,
            present(label),
        ]
        for rank, label in enumerate(prediction.labels, start=1)
    ]


def value_csv_rows(prediction: Prediction) -> list[list[str]]:
    """Rows of VALUE_CSV_COLUMNS: one per target, or a single row with the error."""
    source, engine = prediction.source, prediction.engine or ""
    if prediction.error is not None:
        return [[source, "", "", "", "", "", prediction.error, engine]]

    def cell(number: float | None) -> str:
        return "" if number is None else f"{number:.9g}"

    return [
        [source, value.name, cell(value.value), cell(value.low), cell(value.high), cell(value.coverage), "", engine]
        for value in prediction.values
    ]
