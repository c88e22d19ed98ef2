"""DINOv3's ViT as transformers stores it: a backbone with rotary positions and without a classifier."""

from __future__ import annotations

import re
from typing import Any

from vitral.models.vit import ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import (
    KeyMapping,
    State,
    add_unit_layer_scale,
    add_zero_key_bias,
    fuse_qkv,
    split_qkv,
    split_swiglu,
)
from vitral.weights.preprocessing import IMAGENET
from vitral.weights.reading import (
    build_checkpoint,
    check_has_blocks,
    drop_tensors,
    flatten_patch_kernel,
    infer_config,
    is_gated,
    rename_tensors,
)
from vitral.weights.timm_eva import DINOV3_HEADS
from vitral.weights.transformers_files import ACTIVATIONS, preprocessor_json, read_preprocessing
from vitral.weights.writing import NotRepresentableError, exportable_state, unflatten_patch_kernel

PATCH_NAME = r"(.+\.)?embeddings\.patch_embeddings\.weight"


def _layer(name: str) -> tuple[str, str]:
    """Names in files and in memory."""
    return f"layer.{{i}}.{name}", f"model.layer.{{i}}.{name}"


KEYS = KeyMapping(
    {
        "patch_embedding.project.{leaf}": "embeddings.patch_embeddings.{leaf}",
        "class_token.token": "embeddings.cls_token",
        "registers": "embeddings.register_tokens",
        "encoder.blocks.{i}.norm1.{leaf}": _layer("norm1.{leaf}"),
        "encoder.blocks.{i}.attention.q.{leaf}": _layer("attention.q_proj.{leaf}"),
        "encoder.blocks.{i}.attention.k.{leaf}": _layer("attention.k_proj.{leaf}"),
        "encoder.blocks.{i}.attention.v.{leaf}": _layer("attention.v_proj.{leaf}"),
        "encoder.blocks.{i}.attention.project.{leaf}": _layer("attention.o_proj.{leaf}"),
        "encoder.blocks.{i}.residual1.scale": _layer("layer_scale1.lambda1"),
        "encoder.blocks.{i}.norm2.{leaf}": _layer("norm2.{leaf}"),
        "encoder.blocks.{i}.mlp.gate.{leaf}": _layer("mlp.gate_proj.{leaf}"),
        "encoder.blocks.{i}.mlp.value.{leaf}": _layer("mlp.up_proj.{leaf}"),  # without gates, the whole first layer
        "encoder.blocks.{i}.mlp.contract.{leaf}": _layer("mlp.down_proj.{leaf}"),
        "encoder.blocks.{i}.residual2.scale": _layer("layer_scale2.lambda1"),
        "encoder.norm.{leaf}": "norm.{leaf}",
    }
)
TRAINING_ONLY_KEYS = {r"embeddings\.mask_token": "the mask token of pre-training"}
DEFAULT_EPS, DEFAULT_SIZE, DEFAULT_BASE = 1e-5, 224, 100.0


def is_dinov3(raw: RawCheckpoint) -> bool:
    return any(re.fullmatch(PATCH_NAME, name) for name in raw.tensors)


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    stored, reading = raw.config, Interpretation(source=raw.source, options=options)
    model_type = str(stored.get("model_type", "dinov3_vit"))
    if model_type != "dinov3_vit":
        raise unsupported_model_error(raw.source, f"model_type {model_type}")
    drop_tensors(raw.tensors, TRAINING_ONLY_KEYS, reading.notes)
    tensors = rename_tensors("transformers", raw, raw.tensors, KEYS)
    state = tensors.state
    if "registers" in state and not state["registers"].numel():
        del state["registers"]
    if not any(".mlp.gate." in key for key in state):
        for key in [key for key in state if ".mlp.value." in key]:
            state[key.replace("value", "expand")] = state.pop(key)
    has_key_bias = not add_zero_key_bias(state)
    fuse_qkv(state)
    check_has_blocks(tensors)
    width, channels, patch = flatten_patch_kernel(tensors)
    norm_eps = float(stored.get("layer_norm_eps", DEFAULT_EPS)) if stored else None
    config = infer_config(
        tensors,
        image_size=_image_size(stored, reading),
        patch_size=patch,
        channels=channels,
        heads=_heads(width, stored, reading),
        pooling="class",
        positions="rotary",
        rope="centered",
        rope_base=float(stored.get("rope_theta", DEFAULT_BASE)),
        key_bias=has_key_bias,
        layer_scale=stored.get("layerscale_value"),
        activation=_activation(raw.source, stored, state, reading),
        norm_eps=reading.setting("norm_eps", DEFAULT_EPS, f"norm eps {DEFAULT_EPS:g}", stored=norm_eps),
    )
    preprocessing = read_preprocessing(raw.preprocessor_config, config, IMAGENET, "bilinear", reading)
    return build_checkpoint(tensors, config, preprocessing, reading)


def _heads(width: int, stored: dict[str, Any], reading: Interpretation) -> int:
    if not stored and reading.options.heads is None and width in DINOV3_HEADS:
        return reading.heads(width, DINOV3_HEADS[width], "the sizes of DINOv3")
    return reading.heads(width, stored.get("num_attention_heads"))


def _image_size(stored: dict[str, Any], reading: Interpretation) -> tuple[int, int]:
    """No tensor depends on it; rotary positions adapt to every size."""
    size = stored.get("image_size", DEFAULT_SIZE)
    if reading.options.image_size is None and not stored:
        reading.assume(f"square images of {size}×{size}", "image_size")
    return reading.options.image_size or ((size, size) if isinstance(size, int) else (int(size[0]), int(size[1])))


def _activation(source: str, stored: dict[str, Any], state: State, reading: Interpretation) -> Any:
    name = str(stored.get("hidden_act", "gelu"))
    if is_gated(state):
        if stored and name != "silu":
            raise unsupported_model_error(source, f"gated MLP with activation {name}")
        origin = "gate_proj"
        return reading.setting("activation", "", "", stored="swiglu", origin=origin)
    if name not in ACTIVATIONS:
        raise unsupported_model_error(source, f"activation {name}")
    return reading.setting("activation", "gelu", "gelu activation", stored=ACTIVATIONS[name] if stored else None)


def fits(checkpoint: Checkpoint) -> bool:
    """Whether the model has DINOv3's rotary positions, which no other class of transformers has."""
    return checkpoint.config.positions == "rotary" and checkpoint.config.rope == "centered"


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    if not checkpoint.headless:
        raise NotRepresentableError("transformers", "its DINOv3 has no classifier")
    state, notes = exportable_state(
        checkpoint,
        "transformers",
        poolings=("class", "mean"),
        registers=True,
        supported=("swiglu", "rotary", "class_token"),
    )
    if not config.has_class_token:
        raise NotRepresentableError("transformers", "its DINOv3 always has a class token")
    if config.pooling != "class":
        notes.append("transformers' pooler_output is the class token; this model pools the mean of the patches")
    like = state["encoder.norm.weight"]
    add_unit_layer_scale(state, config.depth)
    state.setdefault("registers", like.new_zeros(1, 0, config.width))
    unflatten_patch_kernel(state, config)
    split_qkv(state)
    if config.activation == "swiglu":
        split_swiglu(state)
    for key in list(state):
        if key.endswith("attention.k.bias") and not config.key_bias:
            del state[key]
        elif ".mlp.expand." in key:
            state[key.replace("expand", "value")] = state.pop(key)
    tensors = KEYS.rename_from_vitral(state)
    tensors["embeddings.mask_token"] = like.new_zeros(1, 1, config.width)
    json_files = {
        "config.json": _config_json(config) | {"dtype": str(like.dtype).removeprefix("torch.")},
        "preprocessor_config.json": preprocessor_json(checkpoint.preprocessing, notes),
    }
    return ConvertedModel(tensors=tensors, json_files=json_files, notes=notes)


def _config_json(config: ViTConfig) -> dict[str, Any]:
    height, width = config.image_size
    is_gated_mlp = config.activation == "swiglu"
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden_width,
        "hidden_act": next((name for name, kind in ACTIVATIONS.items() if kind == config.activation), "silu"),
        "use_gated_mlp": is_gated_mlp,
        "layer_norm_eps": config.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "num_register_tokens": config.registers,
        "rope_theta": config.rope_base,
        "query_bias": config.qkv_bias,
        "key_bias": config.qkv_bias and config.key_bias,
        "value_bias": config.qkv_bias,
        "layerscale_value": config.layer_scale or 1.0,
    }
