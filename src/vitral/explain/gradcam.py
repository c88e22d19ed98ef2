"""Grad-CAM (arXiv 1610.02391) on tokens: the patches' vectors, weighted by what raises the class's logit."""

from __future__ import annotations

from torch import Tensor

from vitral.explain.method import chosen, gradients, to_pixels, traced
from vitral.vit import ViT


def gradcam(model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, layer: int | None = None) -> Tensor:
    """(Σ α_d·z_d)⁺ with α the mean gradient over the patches: B H W, from 0 up.

    z are the tokens that go into `layer`, counted from 1; without it the last: what comes out of the last one is not
    read where the class token alone is.
    """
    trace = traced(model, images_BCHW)
    index = chosen("layer", layer, len(trace.attention))
    tokens_BTD = trace.tokens[len(trace.attention) - 1 if index is None else index]
    (slope_BTD,) = gradients(trace, targets_B, [tokens_BTD])
    patches_BND, slopes_BND = tokens_BTD[:, trace.prefix :].float(), slope_BTD[:, trace.prefix :].float()
    heat_BN = (patches_BND * slopes_BND.mean(dim=1, keepdim=True)).sum(dim=-1).clamp_min(0)
    return to_pixels(heat_BN, trace.grid, images_BCHW)
