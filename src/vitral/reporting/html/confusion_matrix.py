"""Report section with the confusion matrix, the images of its cells, and metrics per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral.evaluation.metrics import Metrics
from vitral.reporting.figures.images import to_rgb
from vitral.reporting.figures.style import Array
from vitral.reporting.html.gallery import image_data_uri, is_pixelated
from vitral.reporting.html.markup import percent, text
from vitral.reporting.html.report_data import ReportData

MAX_CLASSES = 40  # of more classes, those with the most errors are shown
IMAGES_PER_CELL = 12  # half as many for correct predictions
MAX_IMAGE_BYTES = 2_500_000  # of all example images together, encoded
ORDERS = (
    ("original", "original"),
    ("name", "by name"),
    ("errors", "most errors first"),
    ("similar", "confused classes adjacent"),
)


@dataclass(frozen=True, kw_only=True)
class ConfusionExamples:
    """The classes shown, and example images of each cell."""

    classes: list[int]
    images: list[str]  # data URIs
    cells: dict[str, list[tuple[int, float]]]  # "true,predicted" to (index in images, confidence)
    pixelated: bool

    @classmethod
    def select(cls, data: ReportData) -> ConfusionExamples:
        classes = shown_classes(np.array(data.evaluation.confusion))
        p_NK = data.predictor.model_config.calibration.probabilities(data.logits)
        confidence, predicted = p_NK.max(dim=1)
        labels, images = data.split.labels, data.split.images
        errors = (predicted != labels).nonzero().flatten().tolist()
        correct = (predicted == labels).nonzero().flatten().tolist()
        # Most informative first: the most confident errors, then the least confident correct predictions.
        order = sorted(errors, key=lambda i: -confidence[i].item()) + sorted(
            correct, key=lambda i: confidence[i].item()
        )
        selected: list[str] = []
        bytes_left, class_set = MAX_IMAGE_BYTES, set(classes)
        cells: dict[str, list[tuple[int, float]]] = {}
        for index in order:
            true, prediction = int(labels[index]), int(predicted[index])
            examples = cells.setdefault(f"{true},{prediction}", [])
            limit = IMAGES_PER_CELL if true != prediction else IMAGES_PER_CELL // 2
            if len(examples) >= limit or not {true, prediction} <= class_set:
                continue
            uri = image_data_uri(to_rgb(images[index]))
            if (bytes_left := bytes_left - len(uri)) < 0:
                break
            examples.append((len(selected), round(confidence[index].item(), 4)))
            selected.append(uri)
        cells = {name: examples for name, examples in cells.items() if examples}
        return cls(classes=classes, images=selected, cells=cells, pixelated=is_pixelated(images))

    def to_dict(self, evaluation: Metrics) -> dict[str, Any]:
        """The data that report.js needs."""
        counts_KK = np.array(evaluation.confusion)
        names = [class_metrics.name for class_metrics in evaluation.per_class]
        errors_K = error_counts(counts_KK)
        similar = spectral_order(counts_KK[np.ix_(self.classes, self.classes)])
        return {
            "classes": names,
            "counts": counts_KK.sum(axis=1).tolist(),
            "cells": self.cells,
            "images": self.images,
            "pixelated": self.pixelated,
            "orders": {
                "original": self.classes,
                "name": sorted(self.classes, key=lambda index: names[index].casefold()),
                "errors": sorted(self.classes, key=lambda index: -int(errors_K[index])),
                "similar": [self.classes[position] for position in similar],
            },
        }


def error_counts(counts_KK: Array) -> Array:
    """Errors that involve each class, as true or as predicted class."""
    errors_K: Array = counts_KK.sum(axis=0) + counts_KK.sum(axis=1) - 2 * counts_KK.diagonal()
    return errors_K


def shown_classes(counts_KK: Array) -> list[int]:
    if len(counts_KK) <= MAX_CLASSES:
        return list(range(len(counts_KK)))
    return sorted(np.argsort(-error_counts(counts_KK), kind="stable")[:MAX_CLASSES].tolist())


def spectral_order(counts_KK: Array) -> list[int]:
    """An order that puts confused classes next to each other.

    Sorts by the Fiedler vector: the eigenvector of the second smallest eigenvalue of the graph Laplacian.
    """
    weights = (counts_KK + counts_KK.T).astype(float)
    np.fill_diagonal(weights, 0)
    weights += 1e-3  # connects classes that are never confused
    laplacian = np.diag(weights.sum(axis=1)) - weights
    _, vectors = np.linalg.eigh(laplacian)
    return np.argsort(vectors[:, min(1, len(vectors) - 1)], kind="stable").tolist()


def confusion_section(evaluation: Metrics, examples: ConfusionExamples) -> str:
    options = "".join(f'<option value="{value}">{name}</option>' for value, name in ORDERS)
    hint = "Select a number to see its images." if examples.images else ""
    panel = "Images of the selected cell." if examples.images else ""
    return (
        '<p class="screen"><label>Order of the classes <select id="order" autocomplete="off">'
        f"{options}</select></label> <span class=soft>{hint}</span></p>"
        f'<div class="columns matrix-columns"><div class="wide">{matrix_table(evaluation, examples.classes)}</div>'
        f'<div id="cell" class="screen" aria-live="polite"><p class="soft">{panel}</p></div></div>'
        + class_metrics_table(evaluation)
    )


def matrix_table(evaluation: Metrics, classes: list[int]) -> str:
    counts_KK = np.array(evaluation.confusion)
    names = [class_metrics.name for class_metrics in evaluation.per_class]
    largest_error = max(int(counts_KK[~np.eye(len(counts_KK), dtype=bool)].max(initial=0)), 1)
    style = ' class="vertical"' if max((len(names[index]) for index in classes), default=0) > 4 else ""
    header = "".join(
        f'<th scope="col" data-predicted="{index}"{style} title="{text(names[index])}">{text(names[index])}</th>'
        for index in classes
    )
    rows = []
    for true in classes:
        cells = "".join(matrix_cell(int(counts_KK[true, p]), true, p, largest_error, names) for p in classes)
        heading = f'<th scope="row" title="{text(names[true])}">{text(names[true])}</th>'
        rows.append(f'<tr data-true="{true}">{heading}{cells}</tr>')
    shown = "" if len(classes) == len(names) else f" The {len(classes)} classes with the most errors."
    return (
        f'<table class="matrix" id="matrix"><caption>Rows: true class. Columns: predicted class.{shown}</caption>'
        f"<thead><tr><th></th>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def matrix_cell(count: int, true: int, predicted: int, largest_error: int, names: Sequence[str]) -> str:
    if not count:
        return f'<td data-predicted="{predicted}"></td>'
    label = f"{names[true]}, correct" if true == predicted else f"{names[true]} predicted as {names[predicted]}"
    style = "correct" if true == predicted else f"m{min(1 + int(4.999 * (count / largest_error) ** 0.5), 5)}"
    return (
        f'<td data-predicted="{predicted}" class="{style}"><button type="button" data-cell="{true},{predicted}" '
        f'aria-pressed="false" aria-label="{text(label)}: {count}">{count}</button></td>'
    )


def class_metrics_table(evaluation: Metrics) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(c.name)}</th>'
        + "".join(f'<td data-value="{value:.6f}">{percent(value)}</td>' for value in (c.precision, c.recall, c.f1))
        + f'<td data-value="{c.support}">{c.support:,}</td></tr>'
        for c in evaluation.per_class
    )
    header = "".join(
        f'<th scope="col"><button type="button">{name}</button></th>'
        for name in ("class", "precision", "recall", "F1", "images")
    )
    is_open = " open" if len(evaluation.per_class) <= MAX_CLASSES else ""
    return (
        f'<details{is_open}><summary>Metrics per class</summary><div class="wide">'
        f'<table class="sortable"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )
