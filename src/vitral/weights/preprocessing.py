"""Preprocessing of other libraries: usual statistics, and a description in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vitral.data.preprocess import Preprocessing

MeanStd = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel, pixels in [0, 1]

IMAGENET: MeanStd = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: MeanStd = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF: MeanStd = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def describe_preprocessing(preprocessing: Preprocessing) -> str:
    """The preprocessing in one line."""
    height, width = preprocessing.image_size
    crop = f"crop {preprocessing.crop:g} of the shorter side"
    resize = crop if preprocessing.resize == "crop" else preprocessing.resize
    return (
        f"{height}×{width}, {preprocessing.interpolation}, {resize}, "
        f"mean {format_values(preprocessing.mean)}, std {format_values(preprocessing.std)}"
    )


def format_values(values: Sequence[float]) -> str:
    """Values per channel; one value if all are equal."""
    return " ".join(f"{value:g}" for value in (values[:1] if len(set(values)) == 1 else values))


def crop_fraction(crop_size: int, resize_size: int) -> float:
    """The fraction that a crop is of the resized image: the roundest one that gives the same resize size."""
    if crop_size >= resize_size:
        return 1.0
    exact = crop_size / resize_size
    candidates = (*(round(exact, digits) for digits in (1, 2, 3, 4)), exact)
    matches = (c for c in candidates if 0 < c <= 1 and math.floor(crop_size / c) == resize_size)
    return next(matches, math.nextafter(exact, 0))
