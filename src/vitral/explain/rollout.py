"""Attention rollout (arXiv 2005.00928): attention of all blocks multiplied, residuals counted as looking at oneself."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from vitral.explain.method import readout, to_pixels, traced
from vitral.models.vit import ViT

Fusion = Literal["mean", "max", "min"]


def rollout(
    model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, residual: bool = True, fusion: Fusion = "mean"
) -> Tensor:
    """How much of each patch reached the answer: B H W, shares of 1.

    The product of all layers is T×T; only the row that is read matters, so it alone goes back, layer by layer.
    """
    trace = traced(model, images_BCHW)
    row_BT = readout(model, trace)
    for looked_BhTT in reversed(trace.attention):
        fused_BTT = fuse(looked_BhTT.float(), fusion)
        passed_BT = (row_BT[:, None] @ fused_BTT)[:, 0]
        row_BT = (row_BT + passed_BT) / 2 if residual else passed_BT
    return to_pixels(row_BT[:, trace.prefix :], trace.grid, images_BCHW, trace.margin)


def fuse(looked_BhTT: Tensor, fusion: Fusion) -> Tensor:
    """One matrix for all heads, B T T, rows summing to one."""
    if fusion == "mean":
        return looked_BhTT.mean(dim=1)
    fused = looked_BhTT.amax(dim=1) if fusion == "max" else looked_BhTT.amin(dim=1)
    return fused / fused.sum(dim=-1, keepdim=True).clamp_min(1e-12)
