"""A model for two pictures side by side: the same weights, with either half at the positions it was trained with.

To paste two pictures into one of the trained size would move and shrink them, and a small model no longer knows them.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from vitral.models.vit import Grid, ViT


def beside(model: ViT) -> ViT:
    """The model, copied, for images of twice the width."""
    grid, (H, W) = model.config.grid, model.config.image_size
    wide = copy.deepcopy(model)
    wide.config = replace(model.config, image_size=(H, 2 * W))
    with torch.no_grad():
        if (positions := wide.position_embedding) is not None:
            table = twice(positions.table.detach(), positions.front, grid, wide.config.grid[1])
            positions.table = table if positions.fixed else torch.nn.Parameter(table)
            positions.grid = wide.config.grid
        if (rotary := wide.encoder.rotary_position) is not None:
            rotary.turn = twice(rotary.turn, rotary.prefix, grid, wide.config.grid[1])
            rotary.grid = wide.config.grid
    return wide.eval()


def twice(rows_1TD: Tensor, front: int, grid: Grid, columns: int) -> Tensor:
    """The patches' rows for a grid of twice the width, left half and right half alike. Where patches leave a margin in
    each picture, a column of them stands on the seam: it is placed as the right half's first."""
    patches = rows_1TD[:, front:].unflatten(1, grid)
    seam = patches[:, :, : columns - 2 * grid[1]]
    return torch.cat([rows_1TD[:, :front], torch.cat([patches, seam, patches], dim=2).flatten(1, 2)], dim=1)
