"""Random resized crops of whole batches as two matrix multiplications, with antialiasing and Gaussian blur.

A crop resized with a separable filter is R · image · Cᵀ: every row of R holds the filter weights of one output row. The
triangle filter widens when an image shrinks, as in Pillow and torchvision (`antialias=True`). A horizontal flip
reverses the columns, and a Gaussian blur multiplies both matrices from the left, so that neither needs another pass
over the pixels.

Shapes:  B images   V views per image   C channels   H, W pixels of an image   h, w pixels of a view
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Size = tuple[int, int]  # height, width


class Boxes(NamedTuple):
    """Rectangles in pixels of the image, which need not be whole: (B, V) each, or (B, 1)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def crop_boxes(
    draw_4BV: Tensor, content: Boxes, min_area: float, max_area: float, max_ratio: float, size: Size
) -> Boxes:
    """Random boxes inside `content`, from four uniform draws each: area, aspect ratio, top and left.

    The area is uniform between `min_area` and `max_area` of the content. The logarithm of the aspect ratio is uniform
    between 1 / `max_ratio` and `max_ratio` times that of `size`, as far as a box of this area fits the content.
    torchvision rejects boxes that do not fit, which makes large areas rarer.
    """
    area = min_area + draw_4BV[0] * (max_area - min_area)
    widest = -area.log()  # of the width over the height, relative to the content
    target = ((size[1] * content.height) / (size[0] * content.width)).log()
    low = torch.minimum(torch.maximum(target - math.log(max_ratio), -widest), widest)
    high = torch.minimum(torch.maximum(target + math.log(max_ratio), -widest), widest)
    log_ratio = low + draw_4BV[1] * (high - low)
    height = content.height * (area.sqrt() * (-log_ratio / 2).exp()).clamp(max=1)
    width = content.width * (area.sqrt() * (log_ratio / 2).exp()).clamp(max=1)
    top = content.top + draw_4BV[2] * (content.height - height)
    left = content.left + draw_4BV[3] * (content.width - width)
    return Boxes(top, left, height, width)


def resample_matrices(
    boxes: Boxes, is_flipped_BV: Tensor, images: Size, views: Size, content: Boxes | None = None
) -> tuple[Tensor, Tensor]:
    """Weights of the image rows (B, V, h, H) and columns (B, V, w, W) in each row and column of the resized boxes.

    Pixels next to a box belong to the filter, as in Pillow's `resize(box=...)`, unless they are outside of `content`.
    """
    rows = _resample_matrix(boxes.top, boxes.height / views[0], images[0], views[0])
    start = torch.where(is_flipped_BV, boxes.left + boxes.width, boxes.left)
    step = torch.where(is_flipped_BV, -boxes.width, boxes.width) / views[1]
    columns = _resample_matrix(start, step, images[1], views[1])
    if content is not None:
        rows = _restrict_inputs(rows, content.top, content.height)
        columns = _restrict_inputs(columns, content.left, content.width)
    return rows, columns


def _resample_matrix(start_BV: Tensor, step_BV: Tensor, num_inputs: int, num_outputs: int) -> Tensor:
    """(B, V, outputs, inputs): triangle filter, whose rows sum to 1."""
    outputs, inputs = (torch.arange(n, device=start_BV.device) + 0.5 for n in (num_outputs, num_inputs))
    centers = start_BV[..., None] + outputs * step_BV[..., None]
    support = step_BV.abs().clamp(min=1)[..., None, None]  # wider than one pixel where the box shrinks
    distance = (inputs - centers[..., None]).abs_().div_(support)
    weights = (1 - distance).clamp_(min=0)
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def _restrict_inputs(matrix_BVnN: Tensor, start_B1: Tensor, length_B1: Tensor) -> Tensor:
    """Without the weights of inputs outside of an interval."""
    inputs = torch.arange(matrix_BVnN.shape[-1], device=matrix_BVnN.device) + 0.5 - start_B1[..., None, None]
    weights = torch.where((inputs > 0) & (inputs < length_B1[..., None, None]), matrix_BVnN, 0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


def blur_radius(size: Size) -> int:
    """Pixels on each side of the blur's centre. A kernel spans a tenth of the shorter side: 23 of 224 as in BYOL."""
    return max(1, min(size) // 10 // 2)


def blur_matrix(sigma_BV: Tensor, is_blurred_BV: Tensor, taps_Knn: Tensor) -> Tensor:
    """(B, V, n, n): Gaussian blur along an axis of n pixels with reflected borders; the identity where not blurred."""
    offsets = torch.arange(len(taps_Knn), device=sigma_BV.device)
    kernel = torch.exp(-0.5 * (offsets / sigma_BV[..., None]) ** 2)
    kernel = kernel / (2 * kernel.sum(dim=-1, keepdim=True) - 1)  # the centre has weight 1 and occurs once
    kernel = torch.where(is_blurred_BV[..., None], kernel, (offsets == 0).float())
    return (kernel @ taps_Knn.flatten(1)).unflatten(-1, taps_Knn.shape[1:])


@cache
def blur_taps(length: int, radius: int, device: torch.device) -> Tensor:
    """(radius + 1, n, n): how often the output at i reads the input at j, at distance k and with reflected borders.

    Cached and kept alive: a captured CUDA graph reads its memory.
    """
    i = torch.arange(length, device=device)
    period = 2 * (length - 1)
    taps = torch.zeros(radius + 1, length, length, device=device)
    for offset in range(-radius, radius + 1):
        read = (i + offset) % period if length > 1 else i
        read = torch.minimum(read, period - read) if length > 1 else i
        taps[abs(offset)] += read[:, None] == i
    return taps


def resample(images_BCHW: Tensor, rows_BVhH: Tensor, columns_BVwW: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, V, C, h, w) views of `dtype`: all views of an image share one matrix multiplication over its rows."""
    B, C, H, W = images_BCHW.shape
    V, h, w = rows_BVhH.shape[1], rows_BVhH.shape[2], columns_BVwW.shape[2]
    pixels = images_BCHW.transpose(1, 2).contiguous().to(dtype).view(B, H, C * W)
    resized_rows = rows_BVhH.to(dtype).view(B, V * h, H) @ pixels
    columns = columns_BVwW.to(dtype).view(B * V, w, W).transpose(1, 2)
    views = resized_rows.view(B * V, h * C, W) @ columns
    return views.view(B, V, h, C, w).transpose(2, 3).contiguous()
