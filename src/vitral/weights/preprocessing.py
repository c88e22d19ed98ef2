"""Preprocessing settings of other libraries, and their defaults where a file does not contain them."""

from __future__ import annotations

import math
from typing import get_args

from vitral.data.preprocess import Interpolation, Preprocessing

MeanStd = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel, pixels in [0, 1]

IMAGENET: MeanStd = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: MeanStd = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def build_preprocessing(
    image_size: tuple[int, int], channels: int, mean_std: MeanStd, crop: float, interpolation: str, notes: list[str]
) -> Preprocessing:
    mean, std = mean_std
    if len(mean) != channels:  # use the average over the channels for each one
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    if interpolation not in get_args(Interpolation):
        notes.append(f"interpolation {interpolation} is not supported; bicubic is used")
    return Preprocessing(
        image_size=image_size,
        channels=channels,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        crop=crop,
        interpolation="bilinear" if interpolation == "bilinear" else "bicubic",
    )


def describe_preprocessing(preprocessing: Preprocessing) -> str:
    """The preprocessing in one line."""
    height, width = preprocessing.image_size
    mean, std = (", ".join(f"{x:g}" for x in values) for values in (preprocessing.mean, preprocessing.std))
    return (
        f"{height}×{width}, {preprocessing.interpolation}, crop {preprocessing.crop:g} of the shorter side, "
        f"mean {mean}, std {std}"
    )


def crop_fraction(crop_size: int, resize_size: int) -> float:
    """The fraction that a crop is of the resized image: the roundest one that gives the same resize size."""
    if crop_size >= resize_size:
        return 1.0
    exact = crop_size / resize_size
    candidates = (*(round(exact, digits) for digits in (1, 2, 3, 4)), exact)
    matches = (c for c in candidates if 0 < c <= 1 and math.floor(crop_size / c) == resize_size)
    return next(matches, math.nextafter(exact, 0))
