"""Class relevance of Chefer, Gur and Wolf (arXiv 2103.15679): attention counts where it raises the class's logit."""

from __future__ import annotations

from torch import Tensor

from vitral.explain.method import gradients, readout, to_pixels, traced
from vitral.models.vit import ViT


def relevance(model: ViT, images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
    """How much each patch brought to the class: B H W, from 0 up, sums not fixed.

    R ← R + Ā·R in each layer, Ā the mean over heads of (∇A ⊙ A)⁺ (equations 5 and 6), begun as the identity. Only the
    rows that are read matter, so they alone go back, as in rollout. What a token brings by being read itself, the
    identity's part, says nothing about the picture and is taken off. Attention pooling is one more attention, from its
    question to the patches (equation 10).
    """
    trace = traced(model, images_BCHW)
    looked = [*trace.attention, *trace.pooling]
    helped_BQT = [
        (A.float() * dA.float()).clamp_min(0).mean(dim=1)
        for A, dA in zip(looked, gradients(trace, targets_B, looked), strict=True)
    ]
    own_BT = readout(model, trace)
    if trace.pooling:
        own_BT = own_BT.zero_()
        own_BT[:, trace.prefix :] = helped_BQT.pop()[:, 0]
    row_BT = own_BT
    for helped_BTT in reversed(helped_BQT):
        row_BT = row_BT + (row_BT[:, None] @ helped_BTT)[:, 0]
    if not trace.pooling:
        row_BT = row_BT - own_BT
    return to_pixels(row_BT[:, trace.prefix :], trace.grid, images_BCHW, trace.margin)
