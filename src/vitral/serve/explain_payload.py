"""Heatmaps and attention of one image, quantised to 8 bits so that they are small enough to send.

Shapes:  L layers   h heads   T tokens   N patches   H, W pixels
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitral import explain
from vitral.inference.predictor import Predictor
from vitral.models.vit import Trace

MAX_ATTENTION_BYTES = 8 * 2**20  # if exceeded, heads are averaged, and then the first layers are omitted
SERVED_METHODS = ("rollout", "relevance", "gradcam")  # the methods that need at most one forward and backward pass


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    target: int | None = None  # index of the class to explain; None: the most probable class
    methods: tuple[str, ...] = ("rollout",)
    attention: bool = False  # include the attention of all layers and heads
    top: int = 5  # number of labels


def explain_image(predictor: Predictor, pixels_CHW: Tensor, request: ExplainRequest) -> dict[str, Any]:
    """Probabilities (or values of a regression), heatmaps and attention of one image. Runs in a model thread.

    Explanations need gradients and attention, so they come from the reference model rather than from the engine.
    """
    calibration, model = predictor.model_config.calibration, predictor.model
    image = predictor.model_config.preprocessing.normalise(pixels_CHW[None].to(predictor.hardware.device))
    with torch.no_grad():
        trace = model.trace(image)
    logits = trace.logits.float().cpu()
    covered = crop_margin(pixels_CHW, trace.margin)
    if predictor.is_regression:
        default = 0
        payload: dict[str, Any] = {"probabilities": predictor.to_units(logits)[0].tolist()}
    else:
        default = int(logits[0].argmax())
        payload = {
            "probabilities": calibration.probabilities(logits)[0].tolist(),
            "ood": bool(calibration.is_ood(logits)[0]),
        }
    target = default if request.target is None else request.target
    payload |= {
        "target": predictor.classes[target],
        "image": {"width": covered.shape[2], "height": covered.shape[1], "png": png_base64(covered)},
        "grid": list(trace.grid),
        "heatmaps": {method: heatmap(predictor, image, target, method, trace.margin) for method in request.methods},
    }
    if request.attention:
        payload["attention"] = pack_attention(trace, has_class_token=model.config.pooling == "class")
    return payload


def crop_margin(pixels: Tensor, margin: int) -> Tensor:
    """Remove the border that no patch covers. Some hybrid models have one; for others the margin is 0."""
    H, W = pixels.shape[-2:]
    return pixels[..., margin : H - margin, margin : W - margin]


def heatmap(predictor: Predictor, image_1CHW: Tensor, target: int, method: str, margin: int) -> dict[str, Any]:
    heat = explain.METHODS[method](predictor.model, image_1CHW[0], target)
    values = (explain.rescale_for_display(crop_margin(heat, margin)) * 255).round().to(torch.uint8).cpu()
    return {"width": values.shape[1], "height": values.shape[0], "values": to_base64(values)}


def pack_attention(trace: Trace, *, has_class_token: bool) -> dict[str, Any]:
    """Attention from each token to the patches, (L, h, T, N), as described in `schema.EncodedAttention`.

    The rows are the class token, if the model has one, and the patches; registers are omitted.
    """
    N = trace.grid[0] * trace.grid[1]
    num_prefix = trace.attention[0].shape[-1] - N
    row_indices = [*([0] if has_class_token else []), *range(num_prefix, num_prefix + N)]
    layers = list(range(len(trace.attention)))
    heads = trace.attention[0].shape[1]
    average_heads = len(layers) * heads * len(row_indices) * N > MAX_ATTENTION_BYTES
    if average_heads:
        heads = 1
        layers = layers[-max(MAX_ATTENTION_BYTES // (len(row_indices) * N), 1) :]
    values, row_max, non_patch = [], [], []
    for layer in layers:
        attention_hTT = trace.attention[layer][0].float()
        if average_heads:
            attention_hTT = attention_hTT.mean(dim=0, keepdim=True)
        to_patches = attention_hTT[:, row_indices, num_prefix:]
        largest = to_patches.amax(dim=-1, keepdim=True)
        values.append((to_patches / largest.clamp_min(1e-12) * 255).round().to(torch.uint8).cpu())
        row_max.append(largest[..., 0].cpu())
        non_patch.append((1 - to_patches.sum(dim=-1)).clamp(0, 1).cpu())
    return {
        "layers": [layer + 1 for layer in layers],
        "heads": heads,
        "heads_averaged": average_heads,
        "has_class_token": has_class_token,
        "rows": len(row_indices),
        "columns": N,
        "values": to_base64(torch.stack(values)),
        "row_max": to_base64(to_uint16(torch.stack(row_max))),
        "non_patch": to_base64(to_uint16(torch.stack(non_patch))),
    }


def to_uint16(fractions: Tensor) -> Tensor:
    return (fractions * 65535).round().to(torch.uint16)


def to_base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def png_base64(pixels_CHW: Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels_CHW.permute(1, 2, 0).squeeze(-1).cpu().numpy()).save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
