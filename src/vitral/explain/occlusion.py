"""Occlusion (arXiv 1311.2901): cover a part of the picture and see what the class loses."""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.explain.method import Model, grid_of, to_pixels

AT_ONCE = 128  # covered copies in one forward pass


def occlusion(model: Model, images_BCHW: Tensor, targets_B: Tensor, *, window: int | None = None) -> Tensor:
    """What the class's log-odds lose with this place covered by the mean colour: B H W; below zero: they rose.

    Squares of `window`×`window` patches, one patch apart; where they overlap, the mean. Default: about a seventh of
    the picture, for a patch of a fine grid is too small to matter.
    """
    grid = grid_of(model, images_BCHW)
    side = window or max(round(min(grid) / 7), 1)
    if not 1 <= side <= min(grid):
        raise VitralError(
            f"window must be from 1 to {min(grid)} patches, not {window}", "leave it out for a seventh of the image"
        )
    covers_SN = squares(grid, side)
    at_pixels_SHW = nearest_pixels(covers_SN, grid, images_BCHW)
    before_B = log_odds(model(images_BCHW), targets_B)
    lost_BS = torch.empty(len(images_BCHW), len(covers_SN), device=images_BCHW.device)
    for index, image_CHW in enumerate(images_BCHW):
        copies = (image_CHW * ~cover[:, None] for cover in at_pixels_SHW.split(AT_ONCE))  # zero is the mean colour
        after_S = torch.cat([log_odds(model(batch), targets_B[index].expand(len(batch))) for batch in copies])
        lost_BS[index] = before_B[index] - after_S
    share_SN = covers_SN / covers_SN.sum(dim=0)
    return to_pixels(lost_BS @ share_SN, grid, images_BCHW)


def log_odds(logits_BK: Tensor, targets_B: Tensor) -> Tensor:
    """log p/(1 - p): the class against all others. A logit alone can rise because all of them do."""
    own = torch.zeros_like(logits_BK, dtype=torch.bool).scatter_(1, targets_B[:, None], True)
    others_B = logits_BK.float().masked_fill(own, -torch.inf).logsumexp(dim=1)
    return logits_BK.float()[own] - (others_B if logits_BK.shape[1] > 1 else 0)


def squares(grid: tuple[int, int], side: int) -> Tensor:
    """S N: ones where the square covers the patch."""
    rows, columns = (torch.arange(n).unfold(0, side, 1) for n in grid)  # places, side
    covers = torch.zeros(len(rows), len(columns), *grid)
    for i, ys in enumerate(rows):
        for j, xs in enumerate(columns):
            covers[i, j, ys[:, None], xs] = 1
    return covers.flatten(2).flatten(0, 1)


def nearest_pixels(masks_SN: Tensor, grid: tuple[int, int], images_BCHW: Tensor) -> Tensor:
    """S H W booleans: the pixels of the patches."""
    picture = masks_SN.unflatten(1, grid)[:, None].to(images_BCHW.device)
    return torch.nn.functional.interpolate(picture, size=images_BCHW.shape[2:], mode="nearest")[:, 0] > 0
