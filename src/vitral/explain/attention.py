"""Attention weights of one layer or head."""

from __future__ import annotations

from torch import Tensor

from vitral.explain.method import index_from_one, readout_weights, to_pixels, trace_with_grad
from vitral.models.vit import ViT


def attention(
    model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, layer: int | None = None, head: int | None = None
) -> Tensor:
    """Attention from the pooled token (or the mean over pooled tokens) to each patch, (B, H, W), in [0, 1].

    `layer` and `head` count from 1. The default is the last layer, averaged over its heads.
    """
    trace = trace_with_grad(model, images_BCHW)
    index = index_from_one("layer", layer, len(trace.attention))
    attn_BhTT = trace.attention[-1 if index is None else index].float()
    head_index = index_from_one("head", head, attn_BhTT.shape[1])
    attn_BTT = attn_BhTT.mean(dim=1) if head_index is None else attn_BhTT[:, head_index]
    row_BT = (readout_weights(model, trace)[:, None] @ attn_BTT)[:, 0]
    return to_pixels(row_BT[:, trace.num_prefix_tokens :], trace.grid, images_BCHW, trace.margin)
