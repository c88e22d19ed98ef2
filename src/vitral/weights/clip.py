"""Vision towers of CLIP, SigLIP and SigLIP 2 as transformers stores them, alone or next to a text tower.

A tower is a feature backbone of width D. CLIP's projection to the space that images and texts share is not part of the
model: it is named as ignored, as are the tensors of the text tower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from vitral.errors import truncate_list
from vitral.models.vit import Activation, Resampling, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, State, add_zero_qkv_bias, fuse_qkv, split_qkv
from vitral.weights.preprocessing import CLIP, HALF, MeanStd
from vitral.weights.reading import (
    PATCH_KERNEL,
    RenamedTensors,
    build_checkpoint,
    channels_first,
    channels_last,
    check_has_blocks,
    drop_tensors,
    flatten_patch_kernel,
    incomplete_error,
    infer_config,
    rename_tensors,
)
from vitral.weights.transformers_files import (
    ACTIVATIONS,
    pixel_json,
    preprocessor_json,
    read_labels,
    read_preprocessing,
)
from vitral.weights.writing import (
    NotRepresentableError,
    exportable_state,
    fold_unsupported_layer_scale,
    resampling_notes,
    unflatten_patch_kernel,
)

PATCH_NAME = "embeddings.patch_embedding.weight"
LAYER = "encoder.layers.{i}"
POOLING = "attention_pooling"
KEYS = KeyMapping(
    {
        "patch_embedding.project.{leaf}": "embeddings.patch_embedding.{leaf}",
        "class_token.token": "embeddings.class_embedding",
        "position_embedding.table": "embeddings.position_embedding.weight",
        "pre_norm.{leaf}": ("pre_layrnorm.{leaf}", "pre_layernorm.{leaf}"),  # the misspelling is theirs
        "encoder.blocks.{i}.norm1.{leaf}": f"{LAYER}.layer_norm1.{{leaf}}",
        "encoder.blocks.{i}.attention.q.{leaf}": f"{LAYER}.self_attn.q_proj.{{leaf}}",
        "encoder.blocks.{i}.attention.k.{leaf}": f"{LAYER}.self_attn.k_proj.{{leaf}}",
        "encoder.blocks.{i}.attention.v.{leaf}": f"{LAYER}.self_attn.v_proj.{{leaf}}",
        "encoder.blocks.{i}.attention.project.{leaf}": f"{LAYER}.self_attn.out_proj.{{leaf}}",
        "encoder.blocks.{i}.norm2.{leaf}": f"{LAYER}.layer_norm2.{{leaf}}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": f"{LAYER}.mlp.fc1.{{leaf}}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": f"{LAYER}.mlp.fc2.{{leaf}}",
        "encoder.norm.{leaf}": "post_layernorm.{leaf}",
        f"{POOLING}.probe": "head.probe",
        f"{POOLING}.qkv.{{leaf}}": "head.attention.in_proj_{leaf}",  # of torch.nn.MultiheadAttention
        f"{POOLING}.project.{{leaf}}": "head.attention.out_proj.{leaf}",
        f"{POOLING}.norm.{{leaf}}": "head.layernorm.{leaf}",
        f"{POOLING}.mlp.expand.{{leaf}}": "head.mlp.fc1.{leaf}",
        f"{POOLING}.mlp.contract.{{leaf}}": "head.mlp.fc2.{leaf}",
        "head.out.{leaf}": "classifier.{leaf}",
    }
)
IGNORED_KEYS = {
    r"text_model\..*|text_projection\..*|text_embeds\..*": "the text tower",
    r"logit_(scale|bias)": "the scale of the similarity of images and texts",
    r"visual_projection\..*": "the projection to the space of images and texts",
    r"(.*\.)?embeddings\.position_ids": "the index of the positions",
}


@dataclass(frozen=True, kw_only=True)
class TowerFamily:
    """Defaults of transformers, which older configuration files omit."""

    class_name: str
    activation: str
    norm_eps: float
    mean_std: MeanStd
    resampling: Resampling
    image_size: int | None
    heads: int = 12


FAMILIES = {
    "clip": TowerFamily(
        class_name="CLIPVisionModel",
        activation="quick_gelu",
        norm_eps=1e-5,
        mean_std=CLIP,
        resampling="bicubic",
        image_size=224,
    ),
    "siglip": TowerFamily(
        class_name="SiglipVisionModel",
        activation="gelu_pytorch_tanh",
        norm_eps=1e-6,
        mean_std=HALF,
        resampling="bicubic",
        image_size=224,
    ),
    "siglip2": TowerFamily(
        class_name="Siglip2VisionModel",
        activation="gelu_pytorch_tanh",
        norm_eps=1e-6,
        mean_std=HALF,
        resampling="bilinear-antialias",
        image_size=None,  # NaFlex: any number of patches, whose positions form a square
    ),
}
MODEL_TYPES = {name: family for family in FAMILIES for name in (family, f"{family}_vision_model")}


def is_tower(raw: RawCheckpoint) -> bool:
    """Whether the tensors have the names of CLIP or SigLIP rather than those of ViT."""
    return any(f".{name}".endswith(f".{PATCH_NAME}") for name in raw.tensors)


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    drop_tensors(raw.tensors, IGNORED_KEYS, reading.notes)
    prefix = next(name for name in raw.tensors if name.endswith(PATCH_NAME)).removesuffix(PATCH_NAME)
    stored_tensors = {name.removeprefix(prefix): raw.tensors.pop(name) for name in list(raw.tensors)}
    family_name = _family_name(raw, stored_tensors)
    family, stored = FAMILIES[family_name], _vision_config(raw.config, family_name)
    tensors = rename_tensors("transformers", raw, stored_tensors, KEYS)
    state = tensors.state
    fuse_qkv(state)
    check_has_blocks(tensors)
    pooling = _read_head(family_name, state, reading)
    patch, channels = _read_patches(tensors)
    size = _read_positions(tensors, patch, stored, family, reading)
    width = state[PATCH_KERNEL].shape[0]
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width, stored.get("num_attention_heads", family.heads) if stored else None),
        pooling=pooling,
        final_norm="encoder.norm.weight" in state,
        activation=_activation(stored, family, reading),
        norm_eps=_norm_eps(stored, family, reading),
        position_resampling=family.resampling,
    )
    preprocessing = read_preprocessing(raw.preprocessor_config, config, family.mean_std, "bicubic", reading)
    if family_name == "siglip2":  # NaFlex keeps the aspect ratio of each image and limits the number of patches
        preprocessing = replace(preprocessing, resize="native", patch_size=patch, crop=1.0)
        reading.notes.append(f"NaFlex: images keep their aspect ratio, with at most {math.prod(config.grid)} patches")
    return build_checkpoint(tensors, config, preprocessing, reading, classes=read_labels(raw.config))


def _family_name(raw: RawCheckpoint, tensors: State) -> str:
    """clip, siglip or siglip2, from config.json or the tensors."""
    if not raw.config:
        if tensors[PATCH_NAME].ndim == 2:
            return "siglip2"
        return "clip" if "embeddings.class_embedding" in tensors else "siglip"
    model_type = str((raw.config.get("vision_config") or {}).get("model_type") or raw.config.get("model_type", ""))
    if model_type not in MODEL_TYPES:
        raise unsupported_model_error(raw.source, f"model_type {model_type}")
    return MODEL_TYPES[model_type]


def _vision_config(config: dict[str, Any], family_name: str) -> dict[str, Any]:
    """The part of config.json about images; empty without a config.json."""
    if "vision_config" in config:
        return {"model_type": family_name} | config["vision_config"]
    return config


def _activation(stored: dict[str, Any], family: TowerFamily, reading: Interpretation) -> Activation:
    name, default = stored.get("hidden_act", family.activation), ACTIVATIONS[family.activation]
    if name not in ACTIVATIONS:
        raise unsupported_model_error(reading.source, f"activation {name}")
    stated = ACTIVATIONS[name] if stored else None
    return cast(Activation, reading.setting("activation", default, f"{default} activation", stored=stated))


def _norm_eps(stored: dict[str, Any], family: TowerFamily, reading: Interpretation) -> float:
    stated = float(stored.get("layer_norm_eps", family.norm_eps)) if stored else None
    return float(reading.setting("norm_eps", family.norm_eps, f"norm eps {family.norm_eps:g}", stored=stated))


def _read_head(family_name: str, state: State, reading: Interpretation) -> str:
    """Split the projection of attention pooling, drop parts that the classifier does not use; returns the pooling."""
    has_classifier = "head.out.weight" in state
    if has_classifier:  # transformers pools the mean of the patches for its classifiers
        unused = [key for key in state if key.startswith(f"{POOLING}.")]
        if family_name == "clip":
            unused += [key for key in state if key.startswith("encoder.norm.")]
        if unused:
            reading.notes.append(f"the classifier does not use {truncate_list(_names(unused), 3)}: ignored")
        for key in unused:
            del state[key]
        return "mean"
    if f"{POOLING}.probe" not in state:
        return "class" if "class_token.token" in state else "mean"
    for leaf in ("weight", "bias"):
        if f"{POOLING}.qkv.{leaf}" in state:
            q, k, v = state.pop(f"{POOLING}.qkv.{leaf}").chunk(3)
            state[f"{POOLING}.q.{leaf}"], state[f"{POOLING}.kv.{leaf}"] = q.clone(), torch.cat([k, v])
    return "attention"


def _names(keys: list[str]) -> list[str]:
    return [KEYS.from_vitral(key) or key for key in keys]


def _read_patches(tensors: RenamedTensors) -> tuple[int, int]:
    """Flatten the patch embedding, linear with channels last in SigLIP 2; returns patch size and channels."""
    kernel, raw = tensors.state[PATCH_KERNEL], tensors.raw
    if kernel.ndim == 4:
        _, channels, patch = flatten_patch_kernel(tensors)
        return patch, channels
    if kernel.ndim != 2:
        raise unsupported_model_error(raw.source, f"{PATCH_NAME} has shape {tuple(kernel.shape)}")
    channels = (raw.config.get("vision_config") or raw.config).get("num_channels", 3)
    side = math.isqrt(kernel.shape[1] // max(int(channels), 1))
    if int(channels) * side**2 != kernel.shape[1]:
        raise unsupported_model_error(raw.source, f"patches of {kernel.shape[1]} values are not square")
    tensors.state[PATCH_KERNEL] = channels_first(kernel, int(channels), side)
    return side, int(channels)


def _read_positions(
    tensors: RenamedTensors, patch: int, stored: dict[str, Any], family: TowerFamily, reading: Interpretation
) -> tuple[int, int]:
    """Reshape class token and positions as in vitral; returns the image size."""
    state = tensors.state
    table = state.get("position_embedding.table")
    if table is None or table.ndim != 2:
        raise incomplete_error(tensors, "embeddings.position_embedding.weight")
    state["position_embedding.table"] = table[None]
    num_cls = int("class_token.token" in state)
    if num_cls:
        state["class_token.token"] = state["class_token.token"].reshape(1, 1, -1)
    side = stored.get("image_size", family.image_size) if stored else None
    if stored and family.image_size is None:
        side = math.isqrt(table.shape[0]) * patch
    return reading.position_table(table.shape[0], [num_cls], patch, (side, side) if isinstance(side, int) else None)[1]


def fits(checkpoint: Checkpoint) -> bool:
    """Whether the model is a tower of CLIP or SigLIP for transformers, which ViT's classes cannot express."""
    return checkpoint.config.pre_norm or checkpoint.config.pooling == "attention"


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    family_name = "clip" if config.pre_norm else "siglip"
    if config.position_resampling == "bilinear-antialias" and family_name == "siglip":
        family_name = "siglip2"
    family, is_clip = FAMILIES[family_name], family_name == "clip"
    if not checkpoint.headless:
        raise NotRepresentableError("transformers", f"{family.class_name} has no classifier on its pooled features")
    if config.image_size[0] != config.image_size[1]:
        raise NotRepresentableError("transformers", f"{family.class_name} supports only square images")
    state, notes = exportable_state(
        checkpoint, "transformers", poolings=("class",) if is_clip else ("attention",), supported=("pre_norm",)
    )
    notes += resampling_notes(config, "transformers", family.resampling)
    notes += fold_unsupported_layer_scale(checkpoint, state)
    add_zero_qkv_bias(state)
    state["position_embedding.table"] = state["position_embedding.table"][0]
    if is_clip:
        state["class_token.token"] = state["class_token.token"].flatten()
    for leaf in ("weight", "bias") if not is_clip else ():
        parts = [state.pop(f"{POOLING}.{part}.{leaf}") for part in ("q", "kv")]
        state[f"{POOLING}.qkv.{leaf}"] = torch.cat(parts)
    kernel = state[PATCH_KERNEL]
    if family_name == "siglip2":
        state[PATCH_KERNEL] = channels_last(kernel, config.channels, config.patch_size)
    else:
        unflatten_patch_kernel(state, config)
    split_qkv(state)
    json_files = {
        "config.json": _config_json(config, family_name) | {"dtype": str(kernel.dtype).removeprefix("torch.")},
        "preprocessor_config.json": _naflex_json(checkpoint)
        if family_name == "siglip2"
        else preprocessor_json(checkpoint.preprocessing, notes),
    }
    return ConvertedModel(tensors=KEYS.rename_from_vitral(state), json_files=json_files, notes=notes)


def _naflex_json(checkpoint: Checkpoint) -> dict[str, Any]:
    num_patches, patch_size = math.prod(checkpoint.config.grid), checkpoint.config.patch_size
    limits = {"max_num_patches": num_patches, "patch_size": patch_size}
    return {"image_processor_type": "Siglip2ImageProcessor", **limits, **pixel_json(checkpoint.preprocessing)}


def _config_json(config: ViTConfig, family_name: str) -> dict[str, Any]:
    size: dict[str, Any] = {"image_size": config.image_size[0]}
    if family_name == "siglip2":
        size = {"num_patches": config.grid[0] * config.grid[1]}
    return {
        "architectures": [FAMILIES[family_name].class_name],
        "model_type": f"{family_name}_vision_model",
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden_width,
        "hidden_act": next(name for name, kind in ACTIVATIONS.items() if kind == config.activation),
        "layer_norm_eps": config.norm_eps,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "attention_dropout": 0.0,
        **size,
    }
