"""Matrices of numbers as coloured images."""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib import colormaps

from vitral.reporting.figures.style import Array

ColourScale = Literal["signed", "weights", "range"]
TARGET_SIDE = 300  # pixels to which images of values are enlarged, approximately
MIN_HEIGHT = 16  # pixels, so that a single row stays visible


def to_colours(values: Array, scale: ColourScale = "signed") -> Array:
    """(h, w) numbers to (h, w, 3) uint8.

    signed:  orange below 0, white at 0, purple above; clipped at the 99th percentile of the absolute values.
    weights: dark to light by the square root, because most attention weights are small.
    range:   dark to light from the smallest to the largest value.
    """
    if scale == "signed":
        limit = max(float(np.quantile(np.abs(values), 0.99)), 1e-12)
        colours = colormaps["PuOr"]((values / limit).clip(-1, 1) / 2 + 0.5)
    elif scale == "weights":
        colours = colormaps["cividis"](np.sqrt((values / max(float(values.max()), 1e-12)).clip(0, 1)))
    else:
        colours = colormaps["cividis"]((values - values.min()) / max(float(np.ptp(values)), 1e-12))
    pixels: Array = (colours[..., :3] * 255).round().astype(np.uint8)
    return pixels


def enlarge(pixels_hw3: Array) -> Array:
    """Repeat pixels so that each number is visible as a square, or as a bar in a very flat image."""
    h, w, _ = pixels_hw3.shape
    factor = max(TARGET_SIDE // max(h, w), 1)
    vertical_factor = factor if h * factor >= MIN_HEIGHT else -(-MIN_HEIGHT // h)
    enlarged: Array = pixels_hw3.repeat(vertical_factor, axis=0).repeat(factor, axis=1)
    return enlarged


def tile_images(images: list[Array], columns: int) -> Array:
    """Images of equal size in a grid with white gaps."""
    h, w, _ = images[0].shape
    gap = max(w // 8, 1)
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    grid: Array = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        y, x = index // columns * (h + gap), index % columns * (w + gap)
        grid[y : y + h, x : x + w] = image
    return grid
