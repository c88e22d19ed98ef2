"""Grad-CAM (arXiv 1610.02391) on tokens: patch vectors weighted by the gradient of the class's logit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitral.explain.method import index_from_one, to_pixels
from vitral.models.vit import ViT


def gradcam(model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, layer: int | None = None) -> Tensor:
    """max(0, sum over d of alpha_d * x_d), alpha being the gradient averaged over patches: (B, H, W).

    x is the normalised input of the attention in `layer`, counted from 1 (default: the last). After the last attention
    only the class token matters, so later activations of the patches would have no gradient.
    """
    with torch.no_grad():
        trace = model.trace(images_BCHW)
    index = index_from_one("layer", layer, len(trace.attention))
    start = len(trace.attention) - 1 if index is None else index
    blocks: list[Any] = list(model.encoder.blocks)[start:]
    rope = None if model.encoder.rotary_position is None else model.encoder.rotary_position(trace.grid)
    z_BTD = trace.tokens[start]
    x_BTD = blocks[0].norm1(z_BTD).detach().requires_grad_()
    z_BTD = blocks[0].residual1(z_BTD, blocks[0].attention(x_BTD, rope))
    z_BTD = blocks[0].residual2(z_BTD, blocks[0].mlp(blocks[0].norm2(z_BTD)))
    for block in blocks[1:]:
        z_BTD = block(z_BTD, rope)
    logits_BK = model.head(model.pool(model.encoder.norm(z_BTD)))
    (grad_BTD,) = torch.autograd.grad(logits_BK.gather(1, targets_B[:, None]).sum(), x_BTD)
    patches_BND, grads_BND = (
        x_BTD.detach()[:, trace.num_prefix_tokens :].float(),
        grad_BTD[:, trace.num_prefix_tokens :].float(),
    )
    heat_BN = (patches_BND * grads_BND.mean(dim=1, keepdim=True)).sum(dim=-1).clamp_min(0)
    return to_pixels(heat_BN, trace.grid, images_BCHW, trace.margin)
