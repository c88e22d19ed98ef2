"""Weights as text for a browser: all tensors in one buffer, deflated, in base64.

Values that bf16 represents exactly, such as those of the bundled models, are stored in bf16. The bytes of a tensor are
reordered, all first bytes before all second bytes, because exponents are similar and compress well.
engine/weights.js decodes this.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitral.models.vit import QKVLinear, ViT

Precision = Literal["auto", "fp32", "bf16", "int8"]
MAX_FP32_PARAMETERS = 1_000_000  # larger models are stored in bf16
MAX_BF16_PARAMETERS = 4_000_000  # larger models are stored in int8
INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class EncodedWeights:
    precision: Precision  # as stored, not "auto"
    layout: list[dict[str, Any]]  # name, shape, dtype and offset in bytes of each tensor
    text: str  # base64


def encode_weights(model: ViT, precision: Precision = "auto") -> EncodedWeights:
    """All tensors that the browser needs, including the position tables that are not parameters.

    "auto": bf16 where that is exact, otherwise fp32 for small models, bf16 for larger ones and int8 for the largest.
    """
    tensors = browser_tensors(model)
    stored = stored_precision(tensors, precision)
    layout, parts, offset = [], [], 0
    for name, tensor in tensors.items():
        dtype = tensor_dtype(name, tensor, stored)
        content = ENCODERS[dtype](tensor)
        layout.append({"name": name, "shape": list(tensor.shape), "dtype": dtype, "offset": offset})
        parts.append(content)
        offset += len(content)
    text = base64.b64encode(zlib.compress(b"".join(parts), level=6)).decode()
    return EncodedWeights(precision=stored, layout=layout, text=text)


def browser_tensors(model: ViT) -> dict[str, Tensor]:
    """Tensors by their name in vit.py. Computed tables are included: "rope" (2, T, d/2) and sincos positions."""
    tensors = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, QKVLinear):
            tensors[f"{name}.bias"] = module.masked_bias().detach().float().cpu()
    if model.position_embedding is not None:
        tensors["position_embedding.table"] = model.position_embedding.table.detach().float().cpu()
    if model.encoder.rotary_position is not None:
        tensors["rope"] = model.encoder.rotary_position.rope.float().cpu()
    return tensors


def stored_precision(tensors: dict[str, Tensor], precision: Precision) -> Precision:
    if precision != "auto":
        return precision
    if all(is_bf16(tensor) for name, tensor in tensors.items() if name != "rope"):
        return "bf16"
    count = sum(tensor.numel() for tensor in tensors.values())
    return "fp32" if count <= MAX_FP32_PARAMETERS else "bf16" if count <= MAX_BF16_PARAMETERS else "int8"


def tensor_dtype(name: str, tensor: Tensor, precision: Precision) -> str:
    """Type of one tensor. In int8 models vectors and tables stay precise, because they are small."""
    if name == "rope":
        return "float32"
    if is_bf16(tensor):
        return "bfloat16"
    if precision == "int8":
        return "int8" if tensor.ndim == 2 else "float32"
    return "float32" if precision == "fp32" else "bfloat16"


def is_bf16(tensor: Tensor) -> bool:
    """Whether bf16 represents all values exactly."""
    return torch.equal(tensor, tensor.bfloat16().float())


def _planes(array: np.ndarray[Any, Any]) -> bytes:
    """All first bytes of little-endian values, then all second bytes, and so on."""
    return array.reshape(-1, 1).view(np.uint8).T.tobytes()


def _bfloat16(tensor: Tensor) -> bytes:
    return _planes(tensor.bfloat16().contiguous().view(torch.int16).numpy())


def _float32(tensor: Tensor) -> bytes:
    return _planes(tensor.contiguous().numpy().astype("<f4"))


def _int8(tensor: Tensor) -> bytes:
    """One scale per row, then the rounded values: the largest magnitude of a row is 127."""
    scale = tensor.abs().amax(dim=1).clamp_min(1e-12) / INT8_MAX
    values = (tensor / scale[:, None]).round().to(torch.int8)
    return _float32(scale) + values.numpy().tobytes()


ENCODERS = {"float32": _float32, "bfloat16": _bfloat16, "int8": _int8}
