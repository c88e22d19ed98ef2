"""Which family's names these are, or why they are nobody's that vitral reads."""

from __future__ import annotations

import re

from vitral.errors import VitralError
from vitral.weights.checkpoint import refuse
from vitral.weights.files import Found

# Names that only models have whose blocks compute something else.
REASONS = {
    r"relative_position|rel_pos|cpb_mlp": "relative positions",
    r"(^|\.)layers\.\d+\.blocks\.\d+\.": "windowed attention in stages",
    r"\.mlp\.(w12|w3|weights_in|fc1_g|gate_proj)\.": "a SwiGLU MLP",
    r"(^|/)conv_root/|patch_embed\.backbone\.|embeddings\.backbone\.": "a convolutional network before its patches",
    r"(^|\.)(norm_pre|ln_pre|pre_layrnorm)\.": "a norm before the first block, as CLIP has",
    r"(^|\.)rope|\.attn\.q_proj\.": "rotary positions or blocks of EVA's kind",
    r"blocks\.\d+\.(attns|ffns)\.|blocks\.\d+\.in_proj\.": "blocks whose attention and MLP stand side by side",
    r"transformer\.layers\.\d+\.\d\.fn\.": "layers wrapped as in early versions of vit-pytorch",
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


def family_of(found: Found) -> str:
    for pattern, reason in REASONS.items():
        for name in found.tensors:
            if re.search(pattern, name):
                raise refuse(found.where, f"{reason} ({name})")
    for family, pattern in SIGNATURES.items():
        if any(re.fullmatch(pattern, name) for name in found.tensors):
            return family
    shown = ", ".join(sorted(found.tensors)[:3])
    raise VitralError(
        f"{found.where} is not a Vision Transformer of a family that vitral reads: {len(found.tensors)} tensors",
        f"known are {', '.join(SIGNATURES)}; its names are {shown} …",
    )
