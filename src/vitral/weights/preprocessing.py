"""Preprocessing as other libraries write it down, or leave it out."""

from __future__ import annotations

import math
from typing import get_args

from vitral.data.preprocess import Interpolation, Preprocessing

Colours = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel

IMAGENET: Colours = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Colours = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def preprocessing(
    image_size: tuple[int, int], channels: int, colours: Colours, crop: float, interpolation: str, notes: list[str]
) -> Preprocessing:
    mean, std = colours
    if len(mean) != channels:  # one grey of three colours, or as many of it as there are channels
        mean, std = (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
    if interpolation not in get_args(Interpolation):
        notes.append(f"interpolation {interpolation} is not one of vitral's: bicubic is used")
    return Preprocessing(
        image_size=image_size,
        channels=channels,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
        crop=crop,
        interpolation="bilinear" if interpolation == "bilinear" else "bicubic",
    )


def seen(preprocessing: Preprocessing) -> str:
    """The preprocessing in one line."""
    height, width = preprocessing.image_size
    mean, std = (", ".join(f"{x:g}" for x in numbers) for numbers in (preprocessing.mean, preprocessing.std))
    return (
        f"{height}×{width}, {preprocessing.interpolation}, crop {preprocessing.crop:g} of the shorter side, "
        f"mean {mean}, std {std}"
    )


def crop_share(side: int, edge: int) -> float:
    """The share that a crop is of a picture scaled to `edge`: a round number, where it scales to the same."""
    if side >= edge:
        return 1.0
    exact = side / edge
    rounded = [round(exact, digits) for digits in (1, 2, 3, 4)]
    fitting = (share for share in (*rounded, exact) if 0 < share <= 1 and math.floor(side / share) == edge)
    return next(fitting, math.nextafter(exact, 0))
