"""Detect the format of a checkpoint from its tensor names, and refuse architectures that vitral does not support."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vitral.errors import VitralError, shell_quote
from vitral.weights.checkpoint import unsupported_model_error
from vitral.weights.files import RawCheckpoint

# Tensor names that occur only in other kinds of models.
OTHER_MODELS = {
    r"(^|\.)(word_embeddings|token_embedding|embed_tokens|wte)\.": "a language model",
    r"(^|\.)(running_mean|running_var)$": "a convolutional network with batch norms",
    r"^(conv1|features\.0|stem\.0|stem\.conv\d?)\.(\d\.)?weight$": "a convolutional network",
}
# Tensor names that occur only in models whose blocks compute something else.
UNSUPPORTED = {
    r"relative_position|rel_pos|cpb_mlp": "relative positions",
    r"(^|\.)layers\.\d+\.blocks\.\d+\.": "windowed attention in stages",
    r"(^|/)conv_root/|patch_embed\.backbone\.|embeddings\.backbone\.": "convolutional stem before the patches",
    r"(^|\.)rope\.freqs$": "rotary positions with learned frequencies (mixed RoPE)",
    r"\.(mlp|attn)\.(norm|ffn_ln|inner_attn_ln)\.": "EVA-02 blocks, with norms inside their branches",
    r"\.attn\.q_proj\.": "separate projections to q, k and v, as in EVA-02 and Sapiens 2",
    r"\.attn\.(lambda_|sub_norm\.)": "differential attention",
    r"\.output\.LayerNorm\.": "norms after the branches (post-norm), as in BERT",
    r"blocks\.\d+\.(attns|ffns)\.|blocks\.\d+\.in_proj\.": "parallel attention and MLP branches",
    r"transformer\.layers\.\d+\.\d\.fn\.": "wrapped layers of early vit-pytorch versions",
    r"(^|\.)(res_post_norm|layernorm_post_attention)\.": "norms after the branches (post-norm)",
}
# Tensor names of models whose function depends on more than their tensors; a key map states it.
UNDETERMINED = {
    r"(^|\.)self_attn\.in_proj_weight$": (
        "layers of torch.nn.TransformerEncoder can be pre- or post-norm (norm_first) with ReLU or GELU, and the "
        "default, post-norm, is not supported"
    ),
}
SIGNATURES = {
    "vitral": r"patch_embedding\.project\.weight",
    "timm": r"patch_embed\.proj\.weight",
    "transformers": r"(.+\.)?embeddings\.(patch_embeddings(\.projection)?|patch_embedding)\.weight",
    "torchvision": r"conv_proj\.weight",
    "vit-pytorch": r"to_patch_embedding\.\d\.weight",
    "npz": r"(.+/)?embedding/kernel",
    "open-clip": r"visual\.(conv1\.weight|trunk\.patch_embed\.proj\.weight)|transformer\.resblocks\.0\.ln_1\.weight",
}


def detect_format(raw: RawCheckpoint) -> str:
    if any(name.startswith("members.0.") for name in raw.tensors):
        raise VitralError(
            f"{raw.source} is an ensemble, and this needs a single model",
            "Pass one of its models instead, such as the folder fold-1 of the cross-validation",
        )
    signatures = {name: re.compile(pattern) for name, pattern in SIGNATURES.items()}
    detected = next(
        (name for name, pattern in signatures.items() if any(map(pattern.fullmatch, raw.tensors))),
        None,
    )
    if detected is None and (match := _first_match(OTHER_MODELS, raw)):
        raise VitralError(
            f"{raw.source} is not a Vision Transformer but {match[0]} ({match[1]})",
            f"Supported formats: {', '.join(SIGNATURES)}",
        )
    if match := _first_match(UNSUPPORTED, raw):
        raise unsupported_model_error(raw.source, f"{match[0]} ({match[1]})")
    if match := _first_match(UNDETERMINED, raw):
        raise VitralError(
            f"the tensors of {raw.source} do not determine the model: {match[0]} ({match[1]})",
            _key_map_hint(raw.source),
        )
    if detected is not None:
        return detected
    examples = ", ".join(sorted(raw.tensors)[:3])
    raise VitralError(
        f"the {len(raw.tensors)} tensors of {raw.source} are not a Vision Transformer in a supported format",
        f"Found tensors such as {examples}. {_key_map_hint(raw.source)}",
    )


def _key_map_hint(source: str) -> str:
    name = shell_quote(source)
    return f"A key map converts any pre-norm ViT; start one with: vitral convert {name} --explain --write-map map.toml"


def _first_match(patterns: Mapping[str, str], raw: RawCheckpoint) -> tuple[str, str] | None:
    """The first reason whose pattern occurs in a tensor name, and that name."""
    for pattern, reason in patterns.items():
        if name := next((name for name in raw.tensors if re.search(pattern, name)), None):
            return reason, name
    return None
