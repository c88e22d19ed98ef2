"""Attention rollout (arXiv 2005.00928): the product of all attention matrices, with residuals as identity."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from vitral.explain.method import readout_weights, to_pixels, trace_with_grad
from vitral.models.vit import ViT

Fusion = Literal["mean", "max", "min"]


def rollout(
    model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, residual: bool = True, fusion: Fusion = "mean"
) -> Tensor:
    """Share of each patch in the pooled feature, (B, H, W), in [0, 1].

    Only the row of the pooled token is propagated through the layers, so the (T, T) product is never formed.
    """
    trace = trace_with_grad(model, images_BCHW)
    row_BT = readout_weights(model, trace)
    for attn_BhTT in reversed(trace.attention):
        fused_BTT = fuse_heads(attn_BhTT.float(), fusion)
        attended_BT = (row_BT[:, None] @ fused_BTT)[:, 0]
        row_BT = (row_BT + attended_BT) / 2 if residual else attended_BT
    return to_pixels(row_BT[:, trace.num_prefix_tokens :], trace.grid, images_BCHW, trace.margin)


def fuse_heads(attn_BhTT: Tensor, fusion: Fusion) -> Tensor:
    """Combine the heads into one matrix (B, T, T) whose rows sum to one."""
    if fusion == "mean":
        return attn_BhTT.mean(dim=1)
    fused = attn_BhTT.amax(dim=1) if fusion == "max" else attn_BhTT.amin(dim=1)
    return fused / fused.sum(dim=-1, keepdim=True).clamp_min(1e-12)
