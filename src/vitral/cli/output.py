"""Predictions as lines for people, JSON lines or CSV."""

from __future__ import annotations

import csv
import sys
import unicodedata
from collections.abc import Sequence
from typing import Literal

from vitral.inference.prediction import Label, Prediction, csv_columns, csv_rows, prediction_to_dict
from vitral.utils.json_toml import dump_json

OutputFormat = Literal["text", "json", "csv"]


def print_predictions(predictions: Sequence[Prediction], output_format: OutputFormat) -> int:
    """Print predictions to stdout and unreadable files to stderr. Returns the exit status."""
    if output_format == "json":
        for prediction in predictions:
            print(dump_json(prediction_to_dict(prediction)))
    elif output_format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(csv_columns(any(prediction.is_regression for prediction in predictions)))
        for prediction in predictions:
            writer.writerows(csv_rows(prediction))
    else:
        print_lines(predictions)
    failed = [prediction for prediction in predictions if prediction.error]
    for prediction in failed:
        print(f"error: {prediction.error}", file=sys.stderr)
    return exit_status(len(failed), len(predictions))


def print_lines(predictions: Sequence[Prediction]) -> None:
    """`bottle.jpg   glass 94%, plastic 4%, metal 1%`, file names padded to one width.

    A prediction set follows if it has more than one class: `; one of: glass, plastic (90% coverage)`. The values of a
    regression have their intervals: `age 31.4 (90%: 25.0 to 37.8)`.
    """
    width = max((display_width(prediction.source) for prediction in predictions), default=0)
    for prediction in predictions:
        if prediction.values:
            print(f"{pad(prediction.source, width)}   {', '.join(map(str, prediction.values))}")
        elif not prediction.error:
            text = prediction_text(prediction.labels, prediction.is_ood)
            if prediction.prediction_set is not None and len(prediction.prediction_set.labels) > 1:
                text += "" if prediction.is_ood else f"; {prediction.prediction_set}"
            if prediction.inverted is not None:
                text += f"; with inverted brightness: {label_text(prediction.inverted)}"
            print(f"{pad(prediction.source, width)}   {text}")


def prediction_text(labels: Sequence[Label], is_ood: bool) -> str:
    """`glass 94%, plastic 4%`, or that the image is unlike the training set.

    Of a multi-label model, the labels above their thresholds, or which label is nearest to its own.
    """
    if labels and labels[0].threshold is not None:
        present = [label for label in labels if label.is_present]
        threshold = f"threshold {labels[0].threshold:.0%}"
        return ", ".join(map(label_text, present)) or f"no label (nearest: {label_text(labels[0])}, {threshold})"
    if is_ood:
        return f"unknown (unlike anything in the training set; closest class: {label_text(labels[0])})"
    return ", ".join(map(label_text, labels))


def label_text(label: Label) -> str:
    """`glass 94%`. Probabilities that would round to 0% or 100% are bounds: `<1%`, `>99%`."""
    percentage = f"{label.probability:.0%}"
    if percentage == "0%":
        percentage = "<1%"
    elif percentage == "100%" and label.probability < 0.9995:
        percentage = ">99%"
    return f"{label.name} {percentage}"


def exit_status(failed: int, total: int) -> int:
    """Report how many of the files could not be read; 1 if there are any, otherwise 0."""
    if failed:
        print(f"       {failed} of {total} files could not be read", file=sys.stderr)
    return 1 if failed else 0


def pad(text: str, width: int) -> str:
    return text + " " * (width - display_width(text))


def display_width(text: str) -> int:
    """Number of terminal columns. Korean, Chinese and Japanese characters take two."""
    characters = unicodedata.normalize("NFC", text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in characters
    )
