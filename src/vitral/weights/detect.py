"""Detect the format of a checkpoint from its tensor names, and refuse architectures that vitral does not support."""

from __future__ import annotations

import re

from vitral.errors import VitralError
from vitral.weights.checkpoint import unsupported_model_error
from vitral.weights.files import RawCheckpoint

# Tensor names that occur only in models whose blocks compute something else.
UNSUPPORTED = {
    r"relative_position|rel_pos|cpb_mlp": "relative positions",
    r"(^|\.)layers\.\d+\.blocks\.\d+\.": "windowed attention in stages",
    r"\.mlp\.(w12|w3|weights_in|fc1_g|gate_proj)\.": "SwiGLU MLP",
    r"(^|/)conv_root/|patch_embed\.backbone\.|embeddings\.backbone\.": "convolutional stem before the patches",
    r"(^|\.)(norm_pre|ln_pre|pre_layrnorm)\.": "norm before the first block, as in CLIP",
    r"(^|\.)rope|\.attn\.q_proj\.": "rotary positions or EVA blocks",
    r"blocks\.\d+\.(attns|ffns)\.|blocks\.\d+\.in_proj\.": "parallel attention and MLP branches",
    r"transformer\.layers\.\d+\.\d\.fn\.": "wrapped layers of early vit-pytorch versions",
    r"(^|\.)(res_post_norm|layernorm_post_attention)\.": "norms after the branches (post-norm)",
}
SIGNATURES = {
    "vitral": r"patch_embedding\.project\.weight",
    "timm": r"patch_embed\.proj\.weight",
    "transformers": r"(.+\.)?embeddings\.patch_embeddings\.projection\.weight",
    "torchvision": r"conv_proj\.weight",
    "vit-pytorch": r"to_patch_embedding\.\d\.weight",
    "npz": r"(.+/)?embedding/kernel",
}


def detect_format(raw: RawCheckpoint) -> str:
    for pattern, reason in UNSUPPORTED.items():
        for name in raw.tensors:
            if re.search(pattern, name):
                raise unsupported_model_error(raw.source, f"{reason} ({name})")
    for format_name, pattern in SIGNATURES.items():
        if any(re.fullmatch(pattern, name) for name in raw.tensors):
            return format_name
    examples = ", ".join(sorted(raw.tensors)[:3])
    raise VitralError(
        f"the {len(raw.tensors)} tensors of {raw.source} are not a Vision Transformer in a supported format",
        f"Supported formats: {', '.join(SIGNATURES)}; found tensors such as {examples}",
    )
