"""The geometry of preprocessing: which size an image is resized to, and which window of it the model sees.

    crop     resize to cover the input, take the central crop
    pad      resize to fit inside the input, pad with the mean colour
    stretch  resize to the input, ignoring the aspect ratio
    native   keep the aspect ratio; the patch grid follows it, with at most as many patches as the input has

Imports no torch, so that decoding workers and exported models start quickly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from vitral.data.pixels import PIXEL_SCALES, PixelType

Resize = Literal["crop", "pad", "stretch", "native"]
Size = tuple[int, int]  # height, width
NUM_BUCKETS = 9  # aspect ratios that native training images are resized to
MAX_BUCKET_RATIO = 3.0  # of the longer to the shorter side, in the outermost buckets


class Geometry(NamedTuple):
    """Resize an image to `resized`; the model input is the window of size `window` at `top`, `left` of it.

    A negative corner means that the window is larger than the resized image, which is padded.
    """

    resized: Size
    top: int
    left: int
    window: Size

    @property
    def is_padded(self) -> bool:
        return self.window[0] > self.resized[0] or self.window[1] > self.resized[1]

    @property
    def content(self) -> tuple[int, int, int, int]:
        """Top, left, bottom and right of the part of the window that shows the image, without the padding."""
        top, left = max(-self.top, 0), max(-self.left, 0)
        bottom = min(self.resized[0] - self.top, self.window[0])
        return top, left, bottom, min(self.resized[1] - self.left, self.window[1])


def input_geometry(height: int, width: int, size: Size, resize: Resize, *, crop: float, patch_size: int) -> Geometry:
    """Geometry of an image of `height` by `width` for a model input of `size`.

    `crop` is the fraction of the shorter side that a crop keeps, `patch_size` the side of a patch of a native input.
    """
    if resize == "crop":
        *resized, top, left = resize_crop_geometry(height, width, size, crop)
        return Geometry((resized[0], resized[1]), top, left, size)
    if resize == "pad":
        resized_H, resized_W = fit_inside(height, width, size)
        return Geometry((resized_H, resized_W), -((size[0] - resized_H) // 2), -((size[1] - resized_W) // 2), size)
    window = native_size(height, width, size, patch_size) if resize == "native" else size
    return Geometry(window, 0, 0, window)


def resize_crop_geometry(height: int, width: int, size: Size, crop: float) -> tuple[int, int, int, int]:
    """Height and width to resize an image to, then top and left of the crop of `size` in it.

    Rounds as timm and torchvision do: sides down, the corner of the crop to the nearest integer, halves to even.
    """
    H, W = size
    min_H, min_W = math.floor(H / crop), math.floor(W / crop)
    is_wide = min_H * width >= min_W * height  # wider than the target
    resized_H = min_H if is_wide else min_W * height // width
    resized_W = min_H * width // height if is_wide else min_W
    return resized_H, resized_W, round((resized_H - H) / 2), round((resized_W - W) / 2)


def fit_inside(height: int, width: int, size: Size) -> Size:
    """The largest size with the aspect ratio of the image that fits inside `size`; sides rounded to the nearest."""
    H, W = size
    if H * width >= W * height:  # wider than the target
        return max((2 * W * height + width) // (2 * width), 1), W
    return H, max((2 * H * width + height) // (2 * height), 1)


def native_size(height: int, width: int, size: Size, patch_size: int) -> Size:
    """The size in whole patches that is closest to the image's aspect ratio and has at most the patches of `size`."""
    budget = (size[0] // patch_size) * (size[1] // patch_size)
    rows, columns = native_grid(height, width, budget)
    return rows * patch_size, columns * patch_size


@lru_cache(maxsize=4096)
def native_grid(height: int, width: int, max_patches: int) -> Size:
    """Rows and columns of patches for an image: nearest to its aspect ratio with at most `max_patches` patches.

    "Nearest" is in the logarithm of both sides: a grid loses little area, and distorts the image by at most a patch.
    """
    if width < height:
        columns, rows = native_grid(width, height, max_patches)
        return rows, columns
    ideal_rows, ideal_columns = math.sqrt(max_patches * height / width), math.sqrt(max_patches * width / height)

    def distance(grid: Size) -> float:
        return abs(math.log(grid[0] / ideal_rows)) + abs(math.log(grid[1] / ideal_columns))

    candidates = []
    for rows in {max(math.floor(ideal_rows), 1), math.ceil(ideal_rows)}:
        if rows <= max_patches:
            candidates.append((rows, max(min(round(ideal_columns), max_patches // rows), 1)))
    return min(candidates, key=lambda grid: (distance(grid), grid))


def mean_color(mean: Sequence[float], dtype: PixelType = "uint8") -> tuple[float, ...]:
    """The colour of padding, per channel, in the units of the pixels: up to rounding 0 after normalisation."""
    if dtype == "float32":
        return tuple(mean)
    scale = PIXEL_SCALES[dtype]
    return tuple(min(max(round(value * scale), 0), scale) for value in mean)


@lru_cache(maxsize=64)
def bucket_sizes(size: Size, patch_size: int) -> tuple[Size, ...]:
    """The sizes that native training images are resized to: one per aspect ratio, log-spaced, from tall to wide."""
    steps = range(-(NUM_BUCKETS // 2), NUM_BUCKETS // 2 + 1)
    ratios = [MAX_BUCKET_RATIO ** (step / (NUM_BUCKETS // 2)) for step in steps]
    sizes = [native_size(10_000, round(10_000 * ratio), size, patch_size) for ratio in ratios]
    return tuple(dict.fromkeys(sizes))


def nearest_bucket(height: int, width: int, buckets: tuple[Size, ...]) -> Size:
    """The bucket whose aspect ratio is nearest to that of an image of `height` by `width`."""
    return min(buckets, key=lambda bucket: abs(math.log((bucket[1] * height) / (bucket[0] * width))))
