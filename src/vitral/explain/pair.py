"""A model for two images side by side: the same weights, with each half at the positions of the original image.

Pasting two images into one of the trained size would shrink and move them, and small models no longer recognise them.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from vitral.models.vit import Grid, ViT


def widen_for_pair(model: ViT) -> ViT:
    """A copy of the model for images of twice the width."""
    grid, (H, W) = model.config.grid, model.config.image_size
    wide = copy.deepcopy(model)
    wide.config = replace(model.config, image_size=(H, 2 * W))
    with torch.no_grad():
        if (positions := wide.position_embedding) is not None:
            table = repeat_horizontally(positions.table.detach(), positions.num_prefix_rows, grid, wide.config.grid[1])
            positions.table = table if positions.fixed else torch.nn.Parameter(table)
            positions.grid = wide.config.grid
        if (rotary := wide.encoder.rotary_position) is not None:
            rotary.rope = repeat_horizontally(rotary.rope, rotary.num_prefix_tokens, grid, wide.config.grid[1])
            rotary.grid = wide.config.grid
    return wide.eval()


def repeat_horizontally(table_1TD: Tensor, num_prefix_tokens: int, grid: Grid, columns: int) -> Tensor:
    """Repeat the patch rows of a position table for a grid of twice the width.

    If patches leave a margin in each image, one extra column covers the seam; it gets the positions of the first
    column of the right half.
    """
    patches = table_1TD[:, num_prefix_tokens:].unflatten(1, grid)
    seam = patches[:, :, : columns - 2 * grid[1]]
    return torch.cat(
        [table_1TD[:, :num_prefix_tokens], torch.cat([patches, seam, patches], dim=2).flatten(1, 2)], dim=1
    )
