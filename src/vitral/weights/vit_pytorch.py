"""The vit-pytorch format (lucidrains): ViT and SimpleViT, which have layer norms around the patch embedding."""

from __future__ import annotations

import torch

from vitral.errors import VitralError
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, State
from vitral.weights.preprocessing import HALF, describe_preprocessing
from vitral.weights.reading import (
    RenamedTensors,
    build_checkpoint,
    channels_first,
    channels_last,
    incomplete_error,
    infer_config,
    infer_patch_shape,
)
from vitral.weights.writing import NotRepresentableError, exportable_state, fold_unsupported_layer_scale

KEYS = KeyMapping(
    {
        "patch_embedding.norm_pixels.{leaf}": "to_patch_embedding.1.{leaf}",
        "patch_embedding.project.{leaf}": "to_patch_embedding.2.{leaf}",
        "patch_embedding.norm.{leaf}": "to_patch_embedding.3.{leaf}",
        "class_token.token": "cls_token",
        "position_embedding.table": "pos_embedding",
        "encoder.blocks.{i}.norm1.{leaf}": "transformer.layers.{i}.0.norm.{leaf}",
        "encoder.blocks.{i}.attention.qkv.{leaf}": "transformer.layers.{i}.0.to_qkv.{leaf}",
        # ViT, then SimpleViT
        "encoder.blocks.{i}.attention.project.{leaf}": (
            "transformer.layers.{i}.0.to_out.0.{leaf}",
            "transformer.layers.{i}.0.to_out.{leaf}",
        ),
        "encoder.blocks.{i}.norm2.{leaf}": "transformer.layers.{i}.1.net.0.{leaf}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": "transformer.layers.{i}.1.net.1.{leaf}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": (
            "transformer.layers.{i}.1.net.4.{leaf}",
            "transformer.layers.{i}.1.net.3.{leaf}",
        ),
        "encoder.norm.{leaf}": "transformer.norm.{leaf}",
        "head.out.{leaf}": ("mlp_head.{leaf}", "linear_head.{leaf}"),
    }
)


PER_PIXEL_KEYS = ("project.weight", "norm_pixels.weight", "norm_pixels.bias")  # of patch_embedding, per pixel value


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    is_simple = "pos_embedding" not in raw.tensors
    state, unexpected = KEYS.rename_to_vitral(raw.tensors)
    tensors = RenamedTensors(
        format="vit-pytorch",
        raw=raw,
        state=state,
        unexpected=unexpected,
        source_key=lambda key: KEYS.from_vitral(key, int(is_simple)),
    )
    project, qkv = state.get("patch_embedding.project.weight"), state.get("encoder.blocks.0.attention.qkv.weight")
    if project is None or project.ndim != 2 or qkv is None:
        raise incomplete_error(tensors, "to_patch_embedding.2.weight and to_qkv.weight")
    width, attention_width = project.shape[0], qkv.shape[0] // 3
    if attention_width != width:
        raise unsupported_model_error(raw.source, f"attention of width {attention_width} in a model of width {width}")
    channels, patch = infer_patch_shape(project.shape[1], _num_patches(state, width), reading)
    for key in PER_PIXEL_KEYS:
        if f"patch_embedding.{key}" in state:
            state[f"patch_embedding.{key}"] = channels_first(state[f"patch_embedding.{key}"], channels, patch)
    if is_simple:
        pooling, size = "mean", _read_simple_vit(state, width, reading)
    else:
        pooling, size = _read_tokens(state, width, patch, reading)
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width),
        pooling=pooling,
        positions="sincos" if is_simple else "learned",
        activation=options.activation or "gelu",
        norm_eps=options.norm_eps or 1e-5,  # PyTorch's default
    )
    preprocessing = reading.preprocessing(size, channels, mean_std=HALF, crop=1.0, interpolation="bilinear")
    return build_checkpoint(tensors, config, preprocessing, reading, variant="patch-norm")


def _read_simple_vit(state: State, width: int, reading: Interpretation) -> tuple[int, int]:
    """Add the projection biases that SimpleViT does not have; returns the image size."""
    for key in [key for key in state if key.endswith("attention.project.weight")]:
        state.setdefault(key.replace("weight", "bias"), state[key].new_zeros(width))
    if reading.options.image_size is None:
        raise VitralError(
            f"{reading.source}: the image size of a SimpleViT cannot be inferred from its tensors",
            reading.missing_hint("--image-size H W"),
        )
    return reading.options.image_size


def _read_tokens(state: State, width: int, patch: int, reading: Interpretation) -> tuple[str, tuple[int, int]]:
    """Reshape the class token and positions of a ViT; returns pooling and image size."""
    token = state.pop("class_token.token", torch.empty(0, width)).reshape(1, -1, width)
    pooling = "mean"
    if token.shape[1]:
        state["class_token.token"] = token
        pooling = reading.setting("pooling", "class", "class-token pooling")
    if token.shape[1] and pooling != "class":
        raise unsupported_model_error(
            reading.source, f"vit-pytorch's {pooling} pooling of a model with a class token includes the class token"
        )
    table = state["position_embedding.table"].reshape(1, -1, width)
    state["position_embedding.table"] = table
    _, size = reading.position_table(table.shape[1], [token.shape[1]], patch)
    return pooling, size


def _num_patches(state: State, width: int) -> int | None:
    """The number of patches according to the position table; None for SimpleViT, which has none."""
    table, token = state.get("position_embedding.table"), state.get("class_token.token")
    return None if table is None else table.numel() // width - (0 if token is None else token.numel() // width)


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    is_simple = config.positions == "sincos" and config.pooling == "mean"
    state, notes = exportable_state(
        checkpoint,
        "vit-pytorch",
        variants=("patch-norm",),
        poolings=("class", "mean"),
        norm_eps=1e-5,
        activation="gelu",
    )
    if config.heads == 1:
        raise NotRepresentableError("vit-pytorch", "expected several heads, got 1")
    notes += fold_unsupported_layer_scale(checkpoint, state)
    unsupported_biases = ["attention.qkv.bias"] + (["attention.project.bias"] if is_simple else [])
    for key in [key for key in state if key.endswith(tuple(unsupported_biases))]:
        if state.pop(key).any():
            raise NotRepresentableError("vit-pytorch", f"it does not support {key}")
    for key in PER_PIXEL_KEYS:
        tensor = state[f"patch_embedding.{key}"]
        state[f"patch_embedding.{key}"] = channels_last(tensor, config.channels, config.patch_size)
    if is_simple:
        del state["position_embedding.table"]
    else:
        state["class_token.token"] = state.get("class_token.token", torch.empty(1, 0, config.width))[0]
        state["position_embedding.table"] = state["position_embedding.table"][0]
    height, width = config.image_size
    notes.append(
        f"a vit-pytorch file does not contain heads ({config.heads}), channels ({config.channels}), "
        f"image size ({height}×{width}) "
        f"or preprocessing ({describe_preprocessing(checkpoint.preprocessing)})"
    )
    return ConvertedModel(tensors=KEYS.rename_from_vitral(state, int(is_simple)), notes=notes)
