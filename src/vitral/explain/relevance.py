"""Class relevance (Chefer, Gur and Wolf, arXiv 2103.15679): attention weighted by its effect on the class's logit."""

from __future__ import annotations

from torch import Tensor

from vitral.explain.method import logit_gradients, readout_weights, to_pixels, trace_with_grad
from vitral.models.vit import ViT


def relevance(model: ViT, images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
    """Contribution of each patch to the class's logit, (B, H, W), non-negative and not normalised.

    R <- R + mean over heads of (grad A * A)+ @ R in each layer, starting from the identity (equations 5 and 6). As in
    rollout, only the rows of the pooled tokens are propagated. The contribution of the identity carries no information
    about the image and is subtracted. Attention pooling is one more attention, from its query to the patches (equation
    10).
    """
    trace = trace_with_grad(model, images_BCHW)
    attentions = [*trace.attention, *trace.pooling]
    relevances_BQT = [
        (A.float() * dA.float()).clamp_min(0).mean(dim=1)
        for A, dA in zip(attentions, logit_gradients(trace, targets_B, attentions), strict=True)
    ]
    readout_BT = readout_weights(model, trace)
    if trace.pooling:
        readout_BT = readout_BT.zero_()
        readout_BT[:, trace.num_prefix_tokens :] = relevances_BQT.pop()[:, 0]
    row_BT = readout_BT
    for relevance_BTT in reversed(relevances_BQT):
        row_BT = row_BT + (row_BT[:, None] @ relevance_BTT)[:, 0]
    if not trace.pooling:
        row_BT = row_BT - readout_BT
    return to_pixels(row_BT[:, trace.num_prefix_tokens :], trace.grid, images_BCHW, trace.margin)
