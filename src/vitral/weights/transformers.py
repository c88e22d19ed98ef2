"""The transformers format: ViT, DeiT, DINOv2 (with registers), MAE, MSN and I-JEPA, as written by save_pretrained.

The vision towers of CLIP and SigLIP are in clip.py, DINOv3 is in dinov3.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F

from vitral.models.vit import Resampling, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights import clip, dinov3
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, State, add_unit_layer_scale, fuse_qkv, split_qkv
from vitral.weights.preprocessing import HALF, IMAGENET
from vitral.weights.reading import (
    PATCH_KERNEL,
    RenamedTensors,
    build_checkpoint,
    check_has_blocks,
    drop_tensors,
    flatten_patch_kernel,
    incomplete_error,
    infer_config,
    is_gated,
    rename_tensors,
)
from vitral.weights.transformers_files import ACTIVATIONS, preprocessor_json, read_labels, read_preprocessing
from vitral.weights.writing import (
    NotRepresentableError,
    exportable_state,
    fold_unsupported_layer_scale,
    resampling_notes,
    unflatten_patch_kernel,
)

COMMON: dict[str, str | tuple[str, ...]] = {
    "patch_embedding.project.{leaf}": "embeddings.patch_embeddings.projection.{leaf}",
    "class_token.token": "embeddings.cls_token",
    "distillation_token": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "position_embedding.table": "embeddings.position_embeddings",
    "encoder.blocks.{i}.attention.q.{leaf}": "encoder.layer.{i}.attention.attention.query.{leaf}",
    "encoder.blocks.{i}.attention.k.{leaf}": "encoder.layer.{i}.attention.attention.key.{leaf}",
    "encoder.blocks.{i}.attention.v.{leaf}": "encoder.layer.{i}.attention.attention.value.{leaf}",
    "encoder.blocks.{i}.attention.project.{leaf}": "encoder.layer.{i}.attention.output.dense.{leaf}",
    "encoder.norm.{leaf}": "layernorm.{leaf}",
    "head.hidden.{leaf}": "pooler.dense.{leaf}",
    "head.out.{leaf}": "classifier.{leaf}",
    "head.label_head.out.{leaf}": "cls_classifier.{leaf}",
    "head.teacher_head.out.{leaf}": "distillation_classifier.{leaf}",
}
VIT = KeyMapping(
    COMMON
    | {
        "encoder.blocks.{i}.norm1.{leaf}": "encoder.layer.{i}.layernorm_before.{leaf}",
        "encoder.blocks.{i}.norm2.{leaf}": "encoder.layer.{i}.layernorm_after.{leaf}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": "encoder.layer.{i}.intermediate.dense.{leaf}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": "encoder.layer.{i}.output.dense.{leaf}",
    }
)
DINOV2 = KeyMapping(
    COMMON
    | {
        "encoder.blocks.{i}.norm1.{leaf}": "encoder.layer.{i}.norm1.{leaf}",
        "encoder.blocks.{i}.residual1.scale": "encoder.layer.{i}.layer_scale1.lambda1",
        "encoder.blocks.{i}.norm2.{leaf}": "encoder.layer.{i}.norm2.{leaf}",
        # Second spellings: SwiGLU in files; third ones: in memory
        "encoder.blocks.{i}.mlp.expand.{leaf}": (
            "encoder.layer.{i}.mlp.fc1.{leaf}",
            "encoder.layer.{i}.mlp.weights_in.{leaf}",
        ),
        "encoder.blocks.{i}.mlp.gate.{leaf}": "encoder.layer.{i}.mlp.gate_proj.{leaf}",
        "encoder.blocks.{i}.mlp.value.{leaf}": "encoder.layer.{i}.mlp.up_proj.{leaf}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": (
            "encoder.layer.{i}.mlp.fc2.{leaf}",
            "encoder.layer.{i}.mlp.weights_out.{leaf}",
            "encoder.layer.{i}.mlp.down_proj.{leaf}",
        ),
        "encoder.blocks.{i}.residual2.scale": "encoder.layer.{i}.layer_scale2.lambda1",
    }
)
# Names in memory (torch.save(model.state_dict())) differ from those in files since transformers 5.
MEMORY_NAMES = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
MEMORY_NAMES_VIT = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))
TRAINING_ONLY_KEYS = r"embeddings\.(mask_token|position_ids)"
PRETRAINING_KEYS = {r"decoder\..*": "the decoder of MAE"}
CLASS_PREFIXES = {
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "vit_mae": "ViTMAE",
    "vit_msn": "ViTMSN",
    "ijepa": "IJepa",
}
UNSUPPORTED = {
    "swin": "windowed attention",
    "swinv2": "windowed attention, relative positions and post-norm",
    "beit": "relative positions",
    "data2vec-vision": "relative positions",
    "vit_hybrid": "convolutional stem before the patches",
}
# How positions are resized for another image size
RESAMPLING: dict[str, Resampling] = {
    "vit": "bicubic",
    "ijepa": "bicubic",
    "deit": "bicubic",
    "dinov2": "bicubic",
    "dinov2_with_registers": "bicubic-antialias",
}


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    if clip.is_tower(raw):
        return clip.to_vitral(raw, options)
    if dinov3.is_dinov3(raw):
        return dinov3.to_vitral(raw, options)
    stored, reading = raw.config, Interpretation(source=raw.source, options=options)
    stored_tensors = _without_model_prefix(raw.tensors)
    drop_tensors(stored_tensors, PRETRAINING_KEYS, reading.notes)
    is_dinov2 = any("layer_scale" in name or ".norm1." in name for name in stored_tensors)
    model_type = _check_model_type(raw.source, stored, is_dinov2)
    stored_tensors = _rename_to_file_names(stored_tensors, is_dinov2, reading.notes)
    tensors = rename_tensors("transformers", raw, stored_tensors, DINOV2 if is_dinov2 else VIT)
    state = tensors.state
    fuse_qkv(state)
    if "head.out.weight" in state and "head.hidden.weight" in state:
        for leaf in ("weight", "bias"):
            state.pop(f"head.hidden.{leaf}", None)
        reading.notes.append("the classifier does not use the pooler: ignored")
    check_has_blocks(tensors)
    width, channels, patch = flatten_patch_kernel(tensors)
    size = _read_tokens(tensors, patch, reading)
    variant = "distilled" if "distillation_token" in state else _head_variant(state)
    default_eps = 1e-6 if is_dinov2 or model_type == "vit_msn" else 1e-12
    activation = ACTIVATIONS[stored.get("hidden_act", "gelu")] if stored else None
    norm_eps = float(stored.get("layer_norm_eps", default_eps)) if stored else None
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width, stored.get("num_attention_heads")),
        pooling="class" if "class_token.token" in state else "mean",  # mean: I-JEPA
        layer_scale=stored.get("layerscale_value"),
        activation="swiglu"
        if is_gated(state)
        else reading.setting("activation", "gelu", "gelu activation", stored=activation),
        norm_eps=reading.setting("norm_eps", default_eps, f"norm eps {default_eps:g}", stored=norm_eps),
        position_resampling=RESAMPLING["dinov2_with_registers" if is_dinov2 and "registers" in state else "vit"],
    )
    default_mean_std, interpolation = (HALF, "bilinear") if model_type == "vit" else (IMAGENET, "bicubic")
    return build_checkpoint(
        tensors,
        config,
        read_preprocessing(raw.preprocessor_config, config, default_mean_std, interpolation, reading),
        reading,
        variant=variant,
        classes=read_labels(stored),
    )


def _without_model_prefix(tensors: State) -> State:
    """Tensors without the name of the model inside a larger one (`vit.`), which the classifier does not have.

    Empties `tensors`.
    """
    ending = "embeddings.patch_embeddings.projection.weight"
    prefix = next(name for name in tensors if name.endswith(ending)).removesuffix(ending)
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors)}


def _rename_to_file_names(tensors: State, is_dinov2: bool, notes: list[str]) -> State:
    """Rename tensors saved from memory to the names in files, and remove those used in training only."""
    for pattern, file_name in MEMORY_NAMES + (() if is_dinov2 else MEMORY_NAMES_VIT):
        tensors = {re.sub(pattern, file_name, name): tensors.pop(name) for name in list(tensors)}
    for name in [name for name in tensors if re.fullmatch(TRAINING_ONLY_KEYS, name)]:
        del tensors[name]
        notes.append(f"{name} is used in training only: ignored")
    return tensors


def _check_model_type(source: str, config: dict[str, Any], is_dinov2: bool) -> str:
    """Refuse models that vitral does not support; returns transformers' model_type."""
    model_type = str(config.get("model_type", "dinov2" if is_dinov2 else "vit"))
    if model_type not in CLASS_PREFIXES:
        reason = f" ({UNSUPPORTED[model_type]})" if model_type in UNSUPPORTED else ""
        raise unsupported_model_error(source, f"model_type {model_type}{reason}")
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise unsupported_model_error(source, f"activation {activation}")
    if config.get("pooler_act", "tanh") != "tanh":
        raise unsupported_model_error(source, f"pooler with activation {config['pooler_act']}")
    return model_type


def _read_tokens(tensors: RenamedTensors, patch: int, reading: Interpretation) -> tuple[int, int]:
    """Rearrange distillation token and positions as in vitral; returns the image size."""
    state = tensors.state
    table = state.get("position_embedding.table")
    if table is None or table.ndim != 3:
        raise incomplete_error(tensors, "embeddings.position_embeddings")
    image_size = tensors.raw.config.get("image_size")
    stored_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size) if image_size else None
    num_prefix = 2 if "distillation_token" in state else int("class_token.token" in state)
    _, size = reading.position_table(table.shape[1], [num_prefix], patch, stored_size)
    if num_prefix == 2:
        row, state["position_embedding.table"] = table[:, 1:2], torch.cat([table[:, :1], table[:, 2:]], dim=1)
        if "head.label_head.out.weight" in state:
            state["distillation_position_table"] = row.clone()
        else:
            state["registers"] = state.pop("distillation_token") + row
            reading.notes.append("the distillation token has no head: kept as a register")
    return size


def _head_variant(state: State) -> str:
    """Whether the classifier uses the mean of the patches too, as in DINOv2.

    If its weights for the mean are zero, they are removed and the model is a plain one.
    """
    weight, width = state.get("head.out.weight"), state[PATCH_KERNEL].shape[0]
    if weight is None or weight.ndim != 2 or weight.shape[1] != 2 * width:
        return "plain"
    if weight[:, width:].any():
        return "class-and-mean"
    state["head.out.weight"] = weight[:, :width].clone()
    return "plain"


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    if clip.fits(checkpoint):
        return clip.from_vitral(checkpoint)
    if dinov3.fits(checkpoint):
        return dinov3.from_vitral(checkpoint)
    config, variant = checkpoint.config, checkpoint.variant
    state, notes = exportable_state(
        checkpoint,
        "transformers",
        variants=("plain", "distilled", "class-and-mean"),
        poolings=("class", "mean"),
        registers=config.pooling == "class",
        hidden_head=checkpoint.headless,
        supported=("swiglu",) if config.pooling == "class" else (),
    )
    model_type = _choose_model_type(checkpoint)
    is_dinov2 = model_type.startswith("dinov2")
    notes += resampling_notes(config, "transformers", RESAMPLING[model_type])
    if is_dinov2:
        add_unit_layer_scale(state, config.depth)
        if variant == "plain" and "head.out.weight" in state:  # its classifier uses the mean of the patches too
            state["head.out.weight"] = F.pad(state["head.out.weight"], (0, config.width))
    else:
        notes += fold_unsupported_layer_scale(checkpoint, state)
    if model_type == "deit":
        _to_deit(state)
    kernel = state[PATCH_KERNEL]
    unflatten_patch_kernel(state, config)
    split_qkv(state)
    tensors = (DINOV2 if is_dinov2 else VIT).rename_from_vitral(state, spelling=int(config.activation == "swiglu"))
    if is_dinov2:
        tensors["embeddings.mask_token"] = kernel.new_zeros(1, config.width)
    if not checkpoint.headless:
        tensors = {
            name if "classifier." in name else f"{model_type}.{name}": tensors.pop(name) for name in list(tensors)
        }
    json_files = {
        "config.json": _config_json(checkpoint, model_type) | {"dtype": str(kernel.dtype).removeprefix("torch.")},
        "preprocessor_config.json": preprocessor_json(checkpoint.preprocessing, notes),
    }
    return ConvertedModel(tensors=tensors, json_files=json_files, notes=notes)


def _choose_model_type(checkpoint: Checkpoint) -> str:
    """The model of transformers that computes the same function."""
    config, variant = checkpoint.config, checkpoint.variant
    if config.pooling == "mean":
        return "ijepa"  # the class without a class token
    is_square = config.image_size[0] == config.image_size[1]
    fits_dinov2 = config.head == "linear" and _mlp_ratio(config) is not None and is_square
    needs_dinov2 = variant == "class-and-mean" or config.registers > 1 or config.activation == "swiglu"
    if needs_dinov2 and not fits_dinov2:
        raise NotRepresentableError(
            "transformers",
            "DINOv2 supports only square images, MLP widths that follow from an integer ratio, and linear heads",
        )
    if needs_dinov2 or (fits_dinov2 and config.layer_scale is not None and variant == "plain"):
        return "dinov2_with_registers" if config.registers else "dinov2"
    return "deit" if variant == "distilled" or config.registers == 1 else "vit"


def _mlp_ratio(config: ViTConfig) -> int | None:
    """DINOv2's ratio of MLP width to width, an integer; SwiGLU has two thirds of it, rounded up to a multiple of 8."""
    for ratio in range(1, 33):
        hidden = config.width * ratio
        if config.activation == "swiglu":
            hidden = -(-int(hidden * 2 / 3) // 8) * 8
        if hidden == config.hidden_width:
            return ratio
    return None


def _config_json(checkpoint: Checkpoint, model_type: str) -> dict[str, Any]:
    config = checkpoint.config
    class_suffix = "Model" if checkpoint.headless else "ForImageClassification"
    class_suffix += "WithTeacher" if checkpoint.variant == "distilled" and not checkpoint.headless else ""
    height, width = config.image_size
    content: dict[str, Any] = {
        "architectures": [CLASS_PREFIXES[model_type] + class_suffix],
        "model_type": model_type,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": next((name for name, kind in ACTIVATIONS.items() if kind == config.activation), "gelu"),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
    }
    if model_type.startswith("dinov2"):
        content |= {"mlp_ratio": _mlp_ratio(config), "layerscale_value": config.layer_scale or 1.0}
        content |= {"use_swiglu_ffn": config.activation == "swiglu"}
        content |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        content |= {"intermediate_size": config.hidden_width, "encoder_stride": config.patch_size}
    if not checkpoint.headless:
        labels = checkpoint.classes or [f"LABEL_{k}" for k in range(config.num_classes)]
        content["id2label"] = {str(k): label for k, label in enumerate(labels)}
        content["label2id"] = {label: k for k, label in enumerate(labels)}
    return content


def _to_deit(state: State) -> None:
    """Add a position row for the distillation token. A single register becomes one with a zero row."""
    table = state["position_embedding.table"]
    if "registers" in state:
        state["distillation_token"] = state.pop("registers")
    row = state.pop("distillation_position_table", torch.zeros_like(table[:, :1]))
    state["position_embedding.table"] = torch.cat([table[:, :1], row, table[:, 1:]], dim=1)
