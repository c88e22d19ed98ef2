"""Occlusion (arXiv 1311.2901): cover a region and measure how the prediction changes."""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.explain.method import Model, patch_grid, to_pixels

MAX_BATCH_SIZE = 128  # occluded copies per forward pass


def occlusion(model: Model, images_BCHW: Tensor, targets_B: Tensor, *, window: int | None = None) -> Tensor:
    """Drop of the class's log-odds when a region is covered with the mean colour, (B, H, W); negative where they rise.

    Regions are `window` x `window` patches with a stride of one patch, averaged where they overlap. The default window
    is about a seventh of the image, because a single patch of a fine grid is too small to matter.
    """
    grid = patch_grid(model, images_BCHW)
    side = window or max(round(min(grid) / 7), 1)
    if not 1 <= side <= min(grid):
        raise VitralError(
            f"window must be between 1 and {min(grid)} patches, got {window}", "Omit it for a seventh of the image"
        )
    masks_SN = window_masks(grid, side)
    masks_SHW = patch_masks_to_pixels(masks_SN, grid, images_BCHW)
    baseline_B = log_odds(model(images_BCHW), targets_B)
    drop_BS = torch.empty(len(images_BCHW), len(masks_SN), device=images_BCHW.device)
    for index, image_CHW in enumerate(images_BCHW):
        copies = (image_CHW * ~cover[:, None] for cover in masks_SHW.split(MAX_BATCH_SIZE))  # zero is the mean colour
        occluded_S = torch.cat([log_odds(model(batch), targets_B[index].expand(len(batch))) for batch in copies])
        drop_BS[index] = baseline_B[index] - occluded_S
    weights_SN = masks_SN / masks_SN.sum(dim=0)
    return to_pixels(drop_BS @ weights_SN, grid, images_BCHW)


def log_odds(logits_BK: Tensor, targets_B: Tensor) -> Tensor:
    """log(p / (1 - p)) of the target class. A single logit can rise because all logits do."""
    is_target = torch.zeros_like(logits_BK, dtype=torch.bool).scatter_(1, targets_B[:, None], True)
    others_B = logits_BK.float().masked_fill(is_target, -torch.inf).logsumexp(dim=1)
    return logits_BK.float()[is_target] - (others_B if logits_BK.shape[1] > 1 else 0)


def window_masks(grid: tuple[int, int], side: int) -> Tensor:
    """Patches covered by each window position, (S, N)."""
    rows, columns = (torch.arange(n).unfold(0, side, 1) for n in grid)  # (positions, side)
    masks = torch.zeros(len(rows), len(columns), *grid)
    for i, ys in enumerate(rows):
        for j, xs in enumerate(columns):
            masks[i, j, ys[:, None], xs] = 1
    return masks.flatten(2).flatten(0, 1)


def patch_masks_to_pixels(masks_SN: Tensor, grid: tuple[int, int], images_BCHW: Tensor) -> Tensor:
    """Expand patch masks (S, N) to pixel masks (S, H, W)."""
    masks = masks_SN.unflatten(1, grid)[:, None].to(images_BCHW.device)
    return torch.nn.functional.interpolate(masks, size=images_BCHW.shape[2:], mode="nearest")[:, 0] > 0
