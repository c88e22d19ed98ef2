"""What happened inside the model on the way to an answer, small enough to send: attention and heatmaps in 8 bits.

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

MOST_ATTENTION = 8 * 2**20  # bytes; beyond, heads are averaged, then the first layers are left out
METHODS = ("rollout", "relevance", "gradcam")  # of vitral.explain's those that need no more than a pass or two


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What of it is asked for."""

    target: int | None = None  # the class that methods explain; None: the most probable
    methods: tuple[str, ...] = ("rollout",)
    attention: bool = False
    top: int = 5


def look_inside(predictor: Predictor, pixels_CHW: Tensor, wish: Wish) -> dict[str, Any]:
    """In a model thread."""
    calibration, model = predictor.card.calibration, predictor.model
    image = predictor.card.preprocessing.normalise(pixels_CHW[None].to(predictor.hardware.device))
    with torch.no_grad():
        trace = model.trace(image)
    logits = trace.logits.float().cpu()
    covered = inner(pixels_CHW, trace.margin)
    target = int(logits[0].argmax()) if wish.target is None else wish.target
    found: dict[str, Any] = {
        "probabilities": calibration.probabilities(logits)[0].tolist(),
        "unknown": bool(calibration.unknown(logits)[0]),
        "target": predictor.classes[target],
        "image": {"width": covered.shape[2], "height": covered.shape[1], "png": png(covered)},
        "grid": list(trace.grid),
        "heatmaps": {method: heatmap(predictor, image, target, method, trace.margin) for method in wish.methods},
    }
    return found | ({"attention": packed(trace, model.config.pooling == "class")} if wish.attention else {})


def inner(pixels: Tensor, margin: int) -> Tensor:
    """Without what lies beyond the outermost patches: of some hybrids a few pixels all around."""
    H, W = pixels.shape[-2:]
    return pixels[..., margin : H - margin, margin : W - margin]


def heatmap(predictor: Predictor, image_1CHW: Tensor, target: int, method: str, margin: int) -> dict[str, Any]:
    heat = explain.scaled(inner(explain.METHODS[method](predictor.model, image_1CHW[0], target), margin))
    levels = (heat * 255).round().to(torch.uint8).cpu()
    return {"width": levels.shape[1], "height": levels.shape[0], "levels": text(levels)}


def packed(trace: Trace, has_class: bool) -> dict[str, Any]:
    """Where each token looked among the patches, L h T N. Each row is scaled to its largest value, which `peaks` holds.

    Rows are the class token, where there is one, and the patches; registers are left out. What a row looks at in other
    tokens than patches is in `elsewhere`. Both are shares of one in 16 bits, little-endian.
    """
    N = trace.grid[0] * trace.grid[1]
    front = trace.attention[0].shape[-1] - N
    chosen = [*([0] if has_class else []), *range(front, front + N)]
    layers = list(range(len(trace.attention)))
    heads = trace.attention[0].shape[1]
    averaged = len(layers) * heads * len(chosen) * N > MOST_ATTENTION
    if averaged:
        heads = 1
        layers = layers[-max(MOST_ATTENTION // (len(chosen) * N), 1) :]
    rows, peaks, elsewhere = [], [], []
    for layer in layers:
        attention_hTT = trace.attention[layer][0].float()
        if averaged:
            attention_hTT = attention_hTT.mean(dim=0, keepdim=True)
        to_patches = attention_hTT[:, chosen, front:]
        peak = to_patches.amax(dim=-1, keepdim=True)
        rows.append((to_patches / peak.clamp_min(1e-12) * 255).round().to(torch.uint8).cpu())
        peaks.append(peak[..., 0].cpu())
        elsewhere.append((1 - to_patches.sum(dim=-1)).clamp(0, 1).cpu())
    return {
        "layers": [layer + 1 for layer in layers],
        "heads": heads,
        "averaged": averaged,
        "class_token": has_class,
        "rows": len(chosen),
        "columns": N,
        "levels": text(torch.stack(rows)),
        "peaks": text(sixteen_bits(torch.stack(peaks))),
        "elsewhere": text(sixteen_bits(torch.stack(elsewhere))),
    }


def sixteen_bits(shares: Tensor) -> Tensor:
    return (shares * 65535).round().to(torch.uint16)


def text(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def png(pixels_CHW: Tensor) -> str:
    """The picture as the model gets it: scaled and cropped."""
    file = io.BytesIO()
    Image.fromarray(pixels_CHW.permute(1, 2, 0).squeeze(-1).cpu().numpy()).save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
