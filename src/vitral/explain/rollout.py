"""Attention rollout (arXiv 2005.00928): attention of all blocks multiplied, residuals counted as looking at oneself.

Shapes:  B images   h heads   T tokens   H, W pixels
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.vit import ViT


@torch.no_grad()
def rollout(model: ViT, images_BCHW: Tensor) -> Tensor:
    """How much of each patch reached the answer: B H W, each image scaled to 0…1.

    With a class token: the patches it gathered from. Without: the mean of what all patches gathered.
    """
    trace = model.trace(images_BCHW)
    first = trace.attention[0].mean(dim=1)
    looked_BTT = torch.eye(first.shape[-1], device=first.device).expand_as(first)
    for attention in trace.attention:
        looked_BTT = (attention.mean(dim=1) + torch.eye(first.shape[-1], device=first.device)) / 2 @ looked_BTT
    rows = looked_BTT[:, :1] if model.config.pooling == "class" else looked_BTT[:, trace.prefix :]
    heat = rows.mean(dim=1)[:, trace.prefix :].unflatten(-1, trace.grid)
    heat = F.interpolate(heat[:, None], size=images_BCHW.shape[2:], mode="bilinear", align_corners=False)[:, 0]
    low, high = heat.amin(dim=(1, 2), keepdim=True), heat.amax(dim=(1, 2), keepdim=True)
    return (heat - low) / (high - low).clamp_min(1e-12)
