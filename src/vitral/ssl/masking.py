"""Random masks over the patches of an image, for masked prediction and masked autoencoding.

The number of masked patches does not depend on the draw, so that all shapes are fixed and a CUDA graph can contain the
step. All random numbers come from the generator passed in.

Shapes:  B images   N patches = R rows × S columns   K blocks   M masked patches
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

MIN_BLOCK_PATCHES = 4  # as in DINOv2; BEiT has 16 of 196
MAX_BLOCK_RATIO = 1 / 0.3  # of BEiT's blocks
NUM_BLOCKS = 16  # drawn per image; few are needed to reach a mask of half of the image


class PatchSplit(NamedTuple):
    """Visible and masked patches of masked autoencoding (MAE, arXiv 2111.06377, section 3)."""

    visible_indices: Tensor  # (B, N - M): patches that the encoder sees, in random order
    restore_indices: Tensor  # (B, N): position of each patch in (visible, masked), to undo the shuffling
    mask: Tensor  # (B, N): true for masked patches


def num_masked_patches(num_patches: int, ratio: float) -> int:
    """The number of patches nearest to `ratio` of them, of which at least one is masked and one is visible."""
    return min(max(round(ratio * num_patches), 1), num_patches - 1)


def split_patches(
    num_images: int, num_patches: int, num_masked: int, generator: Generator, device: torch.device
) -> PatchSplit:
    """Draw which patches each image keeps: a random permutation whose last `num_masked` patches are masked."""
    order = torch.rand(num_images, num_patches, generator=generator, device=device).argsort(dim=1)
    restore_indices = order.argsort(dim=1)
    num_visible = num_patches - num_masked
    return PatchSplit(order[:, :num_visible], restore_indices, restore_indices >= num_visible)


def block_masks(
    num_images: int, grid: tuple[int, int], num_masked: int, generator: Generator, device: torch.device
) -> Tensor:
    """(B, N) bool: masks of rectangular blocks with exactly `num_masked` true values per image.

    BEiT (arXiv 2106.08254, algorithm 1), as used by iBOT (arXiv 2111.07832) and DINOv2, adds random blocks until enough
    patches are masked, each at most as large as the number that is missing. Here all blocks are drawn at once, and the
    number that is missing is estimated as if they did not overlap. They are masked one after the other, and the one
    that exceeds the number is cut on two sides. If all blocks together are too small, random patches are added.
    """
    R, S = grid
    draw = torch.rand(6, num_images, NUM_BLOCKS, 1, generator=generator, device=device)
    noise = torch.rand(num_images, R, S, generator=generator, device=device)
    missing = (1 - draw[0]).cumprod(dim=1) / (1 - draw[0])  # fraction that the blocks before leave
    area = MIN_BLOCK_PATCHES + draw[0] * (missing * num_masked - MIN_BLOCK_PATCHES).clamp(min=0)
    ratio = torch.exp((2 * draw[1] - 1) * math.log(MAX_BLOCK_RATIO))
    height, width = (area * ratio).sqrt().round().clamp(1, R), (area / ratio).sqrt().round().clamp(1, S)
    row_depth = _depth_in_block(height, draw[2], draw[3], R)[..., :, None]
    column_depth = _depth_in_block(width, draw[4], draw[5], S)[..., None, :]
    depth = torch.maximum(row_depth, column_depth)  # (B, K, R, S): below 1 inside the block
    block = torch.arange(NUM_BLOCKS, device=device)[:, None, None]
    priority = torch.where(depth < 1, block + 0.9 * depth, NUM_BLOCKS).amin(dim=1)
    rank = (priority + 0.01 * noise).flatten(1).argsort(dim=1).argsort(dim=1)
    return rank < num_masked


def _depth_in_block(length: Tensor, position: Tensor, side: Tensor, num_patches: int) -> Tensor:
    """(B, K, n): distance of each row or column from one side of its block, from 0 to below 1; 1 outside."""
    first = (position * (num_patches - length + 1)).floor()
    offset = torch.arange(num_patches, device=position.device) - first
    depth = torch.where(side < 0.5, offset, length - 1 - offset) / length
    return torch.where((offset >= 0) & (offset < length), depth, 1.0)
