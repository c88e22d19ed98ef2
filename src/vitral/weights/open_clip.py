"""The OpenCLIP format, also OpenAI's: vision towers inside full checkpoints (`visual.*`) or alone.

As for the towers of transformers (clip.py), the text tower and the projection are named as ignored. Towers that
OpenCLIP takes from timm, such as SigLIP's, are read as timm models.
"""

from __future__ import annotations

from typing import Any

from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights import timm
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, add_zero_qkv_bias
from vitral.weights.preprocessing import CLIP, HALF, describe_preprocessing
from vitral.weights.reading import (
    PATCH_KERNEL,
    RenamedTensors,
    build_checkpoint,
    check_has_blocks,
    drop_tensors,
    flatten_patch_kernel,
    incomplete_error,
    infer_config,
    rename_tensors,
)
from vitral.weights.writing import NotRepresentableError, exportable_state, resampling_notes, unflatten_patch_kernel

TRUNK = "visual.trunk."  # of towers from timm
BLOCK = "visual.transformer.resblocks.{i}"
KEYS = KeyMapping(
    {
        "patch_embedding.project.weight": "visual.conv1.weight",
        "class_token.token": "visual.class_embedding",
        "position_embedding.table": "visual.positional_embedding",
        "pre_norm.{leaf}": "visual.ln_pre.{leaf}",
        "encoder.blocks.{i}.norm1.{leaf}": f"{BLOCK}.ln_1.{{leaf}}",
        "encoder.blocks.{i}.attention.qkv.{leaf}": f"{BLOCK}.attn.in_proj_{{leaf}}",
        "encoder.blocks.{i}.attention.project.{leaf}": f"{BLOCK}.attn.out_proj.{{leaf}}",
        "encoder.blocks.{i}.residual1.scale": f"{BLOCK}.ls_1.gamma",
        "encoder.blocks.{i}.norm2.{leaf}": f"{BLOCK}.ln_2.{{leaf}}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": f"{BLOCK}.mlp.c_fc.{{leaf}}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": f"{BLOCK}.mlp.c_proj.{{leaf}}",
        "encoder.blocks.{i}.residual2.scale": f"{BLOCK}.ls_2.gamma",
        "encoder.norm.{leaf}": "visual.ln_post.{leaf}",
    }
)
IGNORED_KEYS = {
    r"(transformer|token_embedding|ln_final|text|text_decoder)\..*|positional_embedding|text_projection|attn_mask"
    r"|context_length|vocab_size|input_resolution": "the text tower",
    r"logit_(scale|bias)": "the scale of the similarity of images and texts",
    r"visual\.proj|visual\.head\..*": "the projection to the space of images and texts",
}
UNSUPPORTED_SETTINGS = ("attentional_pool", "block_type", "qk_norm", "scaled_cosine_attn", "scale_heads", "scale_attn")
RESIZE_MODES = {"squash": "stretch", "longest": "pad", "shortest": "crop"}
NORM_EPS, HEAD_WIDTH = 1e-5, 64  # OpenCLIP's defaults


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    if not any(name.startswith("visual.") for name in raw.tensors):
        raw.tensors = {f"visual.{name}": raw.tensors.pop(name) for name in list(raw.tensors)}
    drop_tensors(raw.tensors, IGNORED_KEYS, raw.notes)
    if any(name.startswith(TRUNK) for name in raw.tensors):
        return _read_trunk(raw, options)
    model_cfg = raw.open_clip_config.get("model_cfg") or {}
    stored = model_cfg.get("vision_cfg") or {}
    for name in UNSUPPORTED_SETTINGS:
        if stored.get(name) not in (None, False):
            raise unsupported_model_error(raw.source, f"open_clip_config.json sets {name} to {stored[name]!r}")
    tensors = rename_tensors("open-clip", raw, raw.tensors, KEYS)
    check_has_blocks(tensors)
    width, channels, patch = flatten_patch_kernel(tensors)
    size = _read_tokens(tensors, patch, stored, reading)
    pooling = "mean" if stored.get("pool_type") == "avg" else "class"
    if "pre_norm.weight" not in tensors.state:  # vitral's patch embedding has a bias unless a norm follows it
        tensors.state["patch_embedding.project.bias"] = tensors.state[PATCH_KERNEL].new_zeros(width)
    activation = ("quick_gelu" if model_cfg.get("quick_gelu") else "gelu") if model_cfg else None
    heads = width // stored.get("head_width", HEAD_WIDTH) if stored else None
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width, heads, "open_clip_config.json"),
        pooling=reading.setting("pooling", pooling, f"{pooling} pooling", stored=pooling if stored else None),
        layer_scale=stored.get("ls_init_value"),
        activation=reading.setting(
            "activation", "gelu", "gelu activation, but OpenAI's weights need quick_gelu", stored=activation
        ),
        norm_eps=reading.setting("norm_eps", NORM_EPS, f"norm eps {NORM_EPS:g}", stored=NORM_EPS if stored else None),
        position_resampling="bicubic-antialias",
    )
    preprocessing = reading.preprocessing(
        size, channels, mean_std=CLIP, crop=1.0, interpolation="bicubic", **_preprocess_cfg(raw)
    )
    return build_checkpoint(tensors, config, preprocessing, reading)


def _read_trunk(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    """Read a tower that is a timm model."""
    tensors = {name.removeprefix(TRUNK): raw.tensors.pop(name) for name in list(raw.tensors)}
    name = ((raw.open_clip_config.get("model_cfg") or {}).get("vision_cfg") or {}).get("timm_model_name")
    config: dict[str, Any] = {"architecture": name} if name else {}
    stored = _preprocess_cfg(raw).get("stored")
    if stored:
        mode = {resize: mode for mode, resize in timm.CROP_MODES.items()}.get(stored.pop("resize", ""), "center")
        config["pretrained_cfg"] = {"crop_pct": 1.0, "crop_mode": mode, **stored}
    elif any("attn_pool" in key for key in tensors):
        config["pretrained_cfg"] = {"mean": HALF[0], "std": HALF[1], "crop_pct": 1.0}
    return timm.to_vitral(RawCheckpoint(source=raw.source, tensors=tensors, config=config, notes=raw.notes), options)


def _preprocess_cfg(raw: RawCheckpoint) -> dict[str, Any]:
    """Arguments of `Interpretation.preprocessing` from open_clip_config.json."""
    stored = raw.open_clip_config.get("preprocess_cfg") or {}
    fields = {name: stored[name] for name in ("mean", "std", "interpolation") if stored.get(name)}
    if stored.get("resize_mode") in RESIZE_MODES:
        fields["resize"] = RESIZE_MODES[stored["resize_mode"]]
    return {"stored": fields, "origin": "open_clip_config.json"} if fields else {}


def _read_tokens(
    tensors: RenamedTensors, patch: int, stored: dict[str, Any], reading: Interpretation
) -> tuple[int, int]:
    """Reshape class token and positions as in vitral; returns the image size."""
    state = tensors.state
    table, token = state.get("position_embedding.table"), state.get("class_token.token")
    if table is None or table.ndim != 2 or token is None:
        raise incomplete_error(tensors, "visual.positional_embedding and visual.class_embedding")
    state["position_embedding.table"], state["class_token.token"] = table[None], token.reshape(1, 1, -1)
    size = stored.get("image_size")
    stored_size = (size, size) if isinstance(size, int) else tuple(size) if size else None
    return reading.position_table(table.shape[0], [1], patch, stored_size)[1]


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    if not checkpoint.headless:
        raise NotRepresentableError("open-clip", "it has classes, and a tower of CLIP has none")
    if not config.pre_norm and checkpoint.state["patch_embedding.project.bias"].any():
        raise NotRepresentableError("open-clip", "it does not support a bias of the patch embedding")
    state, notes = exportable_state(checkpoint, "open-clip", supported=("pre_norm",), norm_eps=NORM_EPS)
    notes += resampling_notes(config, "open-clip", "bicubic-antialias")
    state.pop("patch_embedding.project.bias", None)
    add_zero_qkv_bias(state)
    unflatten_patch_kernel(state, config)
    state["class_token.token"] = state["class_token.token"].flatten()
    state["position_embedding.table"] = state["position_embedding.table"][0]
    notes.append(
        f"only the tower is written, not projection and text tower. The file does not contain heads ({config.heads}), "
        f"activation ({config.activation}) and preprocessing ({describe_preprocessing(checkpoint.preprocessing)})"
    )
    return ConvertedModel(tensors=KEYS.rename_from_vitral(state), notes=notes)
