"""The torchvision format: vit_b_16, vit_b_32, vit_l_16, vit_l_32 and vit_h_14."""

from __future__ import annotations

from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint, ConvertedModel
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, add_zero_qkv_bias
from vitral.weights.preprocessing import IMAGENET, describe_preprocessing
from vitral.weights.reading import (
    build_checkpoint,
    check_has_blocks,
    flatten_patch_kernel,
    incomplete_error,
    infer_config,
    rename_tensors,
)
from vitral.weights.writing import (
    NotRepresentableError,
    exportable_state,
    fold_unsupported_layer_scale,
    resampling_notes,
    unflatten_patch_kernel,
)

BLOCK = "encoder.layers.encoder_layer_{i}"
KEYS = KeyMapping(
    {
        "patch_embedding.project.{leaf}": "conv_proj.{leaf}",
        "class_token.token": "class_token",
        "position_embedding.table": "encoder.pos_embedding",
        "encoder.blocks.{i}.norm1.{leaf}": f"{BLOCK}.ln_1.{{leaf}}",
        "encoder.blocks.{i}.attention.qkv.{leaf}": f"{BLOCK}.self_attention.in_proj_{{leaf}}",
        "encoder.blocks.{i}.attention.project.{leaf}": f"{BLOCK}.self_attention.out_proj.{{leaf}}",
        "encoder.blocks.{i}.norm2.{leaf}": f"{BLOCK}.ln_2.{{leaf}}",
        # second spelling: earlier releases
        "encoder.blocks.{i}.mlp.expand.{leaf}": (f"{BLOCK}.mlp.0.{{leaf}}", f"{BLOCK}.mlp.linear_1.{{leaf}}"),
        "encoder.blocks.{i}.mlp.contract.{leaf}": (f"{BLOCK}.mlp.3.{{leaf}}", f"{BLOCK}.mlp.linear_2.{{leaf}}"),
        "encoder.norm.{leaf}": "encoder.ln.{leaf}",
        "head.hidden.{leaf}": "heads.pre_logits.{leaf}",
        "head.out.{leaf}": "heads.head.{leaf}",
    }
)


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    tensors = rename_tensors("torchvision", raw, raw.tensors, KEYS)
    check_has_blocks(tensors)
    width, channels, patch = flatten_patch_kernel(tensors)
    table = tensors.state.get("position_embedding.table")
    if table is None or table.ndim != 3:
        raise incomplete_error(tensors, "encoder.pos_embedding")
    _, size = reading.position_table(table.shape[1], [1], patch)
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width),
        activation=options.activation or "gelu",
        norm_eps=options.norm_eps or 1e-6,
        position_resampling="bicubic-corners",
    )
    # IMAGENET1K_V1 weights are for 224 px; the larger ones are SWAG's, which resize without a margin.
    crop, interpolation = (0.875, "bilinear") if min(size) <= 224 else (1.0, "bicubic")
    preprocessing = reading.preprocessing(size, channels, mean_std=IMAGENET, crop=crop, interpolation=interpolation)
    return build_checkpoint(tensors, config, preprocessing, reading)


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    if config.image_size[0] != config.image_size[1] or config.channels != 3:
        height, width = config.image_size
        raise NotRepresentableError(
            "torchvision", f"expected square images with 3 channels, got {height}×{width} with {config.channels}"
        )
    state, notes = exportable_state(
        checkpoint,
        "torchvision",
        hidden_head=True,
        norm_eps=1e-6,
        activation="gelu",
    )
    notes += resampling_notes(config, "torchvision", "bicubic-corners")
    notes += fold_unsupported_layer_scale(checkpoint, state)
    add_zero_qkv_bias(state)
    unflatten_patch_kernel(state, config)
    notes.append(
        f"a torchvision file does not contain the preprocessing: {describe_preprocessing(checkpoint.preprocessing)}"
    )
    return ConvertedModel(tensors=KEYS.rename_from_vitral(state), notes=notes)
