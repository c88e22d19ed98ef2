"""Where one layer, or one head of it, looked."""

from __future__ import annotations

from torch import Tensor

from vitral.explain.method import chosen, readout, to_pixels, traced
from vitral.models.vit import ViT


def attention(
    model: ViT, images_BCHW: Tensor, targets_B: Tensor, *, layer: int | None = None, head: int | None = None
) -> Tensor:
    """The attention of the token that is read (or the mean of several) to each patch: B H W, shares of 1.

    `layer` and `head` count from 1; without them it is the last layer and the mean of its heads.
    """
    trace = traced(model, images_BCHW)
    index = chosen("layer", layer, len(trace.attention))
    looked_BhTT = trace.attention[-1 if index is None else index].float()
    which = chosen("head", head, looked_BhTT.shape[1])
    looked_BTT = looked_BhTT.mean(dim=1) if which is None else looked_BhTT[:, which]
    row_BT = (readout(model, trace)[:, None] @ looked_BTT)[:, 0]
    return to_pixels(row_BT[:, trace.prefix :], trace.grid, images_BCHW, trace.margin)
