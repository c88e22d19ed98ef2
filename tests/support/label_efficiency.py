"""Results of a comparison of initial weights, made of numbers of correct predictions."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitral.evaluation.label_efficiency import LabelEfficiency, LabelEfficiencyRow, Method, make_row, summarise

LABELLED_IMAGES = 50_000


def correct(*counts: int, images: int = 1000) -> np.ndarray[Any, Any]:
    """One row per seed, of which the first `count` images are correct."""
    return np.arange(images) < np.array(counts)[:, None]


def make_test_row(
    fraction: float, before: tuple[int, ...], after: tuple[int, ...], method: Method = "fine-tuning", **settings: Any
) -> LabelEfficiencyRow:
    images = int(LABELLED_IMAGES * fraction)
    return make_row(method, fraction, images, correct(*before), correct(*after), **settings)


HELPED = make_test_row(0.01, (400, 410, 420), (620, 630, 640))
UNCLEAR = make_test_row(0.1, (700, 710, 720), (720, 705, 715))
WORSE = make_test_row(1.0, (950, 951, 952), (900, 902, 901))
NEIGHBOURS = make_test_row(1.0, (600,), (700,), "nearest neighbours", setting="k = 20", varies=False)
ONE_SEED = make_test_row(0.01, (400,), (800,))


def make_result(*rows: LabelEfficiencyRow, **fields: Any) -> LabelEfficiency:
    values: dict[str, Any] = {
        "summary": summarise(rows, "Pretraining on your 20,000 images", LABELLED_IMAGES),
        "rows": rows,
        "data": "photos",
        "before_name": "random weights",
        "after_name": "runs/[pretrained]",
        "classes": ("a", "b"),
        "labelled_images": LABELLED_IMAGES,
        "test_images": 1000,
        "evaluated_on": "test",
        "seeds": 3,
    }
    return LabelEfficiency(**values | fields)
