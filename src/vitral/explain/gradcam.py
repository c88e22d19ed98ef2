"""Grad-CAM (arXiv 1610.02391) on tokens: the patches' vectors, weighted by what raises the class's logit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitral.explain.method import chosen, to_pixels
from vitral.models.vit import ViT


def gradcam(model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, layer: int | None = None) -> Tensor:
    """(Σ α_d·x_d)⁺ with α the mean gradient over the patches: B H W, from 0 up.

    x are the normed tokens that go into the attention of `layer`, counted from 1; without it the last: beyond it only
    the class token is read where there is one. Gradients run from there to the logit, through that attention.
    """
    with torch.no_grad():
        trace = model.trace(images_BCHW)
    index = chosen("layer", layer, len(trace.attention))
    start = len(trace.attention) - 1 if index is None else index
    blocks: list[Any] = list(model.encoder.blocks)[start:]
    turn = None if model.encoder.rotary_position is None else model.encoder.rotary_position(trace.grid)
    z_BTD = trace.tokens[start]
    x_BTD = blocks[0].norm1(z_BTD).detach().requires_grad_()
    z_BTD = blocks[0].residual1(z_BTD, blocks[0].attention(x_BTD, turn))
    z_BTD = blocks[0].residual2(z_BTD, blocks[0].mlp(blocks[0].norm2(z_BTD)))
    for block in blocks[1:]:
        z_BTD = block(z_BTD, turn)
    logits_BK = model.head(model.pool(model.encoder.norm(z_BTD)))
    (slope_BTD,) = torch.autograd.grad(logits_BK.gather(1, targets_B[:, None]).sum(), x_BTD)
    patches_BND, slopes_BND = x_BTD.detach()[:, trace.prefix :].float(), slope_BTD[:, trace.prefix :].float()
    heat_BN = (patches_BND * slopes_BND.mean(dim=1, keepdim=True)).sum(dim=-1).clamp_min(0)
    return to_pixels(heat_BN, trace.grid, images_BCHW, trace.margin)
