"""The timm format: VisionTransformer and VisionTransformerDistilled.

The official files of DeiT, MAE, MSN, I-JEPA and DINOv2 have the same tensor names.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import Activation, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import USUAL_HEADS, Interpretation
from vitral.weights.key_mapping import KeyMapping, State
from vitral.weights.preprocessing import HALF, IMAGENET
from vitral.weights.reading import (
    build_checkpoint,
    check_has_blocks,
    drop_tensors,
    flatten_patch_kernel,
    infer_config,
    split_position_table,
)
from vitral.weights.writing import exportable_state, resampling_notes, unflatten_patch_kernel

KEYS = KeyMapping(
    {
        "patch_embedding.project.{leaf}": "patch_embed.proj.{leaf}",
        "class_token.token": "cls_token",
        "distillation_token": "dist_token",
        "registers": ("reg_token", "register_tokens"),  # second spelling: DINOv2's own files
        "position_embedding.table": "pos_embed",
        "encoder.blocks.{i}.norm1.{leaf}": "blocks.{i}.norm1.{leaf}",
        "encoder.blocks.{i}.attention.qkv.{leaf}": "blocks.{i}.attn.qkv.{leaf}",
        "encoder.blocks.{i}.attention.norm_q.{leaf}": "blocks.{i}.attn.q_norm.{leaf}",
        "encoder.blocks.{i}.attention.norm_k.{leaf}": "blocks.{i}.attn.k_norm.{leaf}",
        "encoder.blocks.{i}.attention.project.{leaf}": "blocks.{i}.attn.proj.{leaf}",
        "encoder.blocks.{i}.residual1.scale": "blocks.{i}.ls1.gamma",
        "encoder.blocks.{i}.norm2.{leaf}": "blocks.{i}.norm2.{leaf}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": "blocks.{i}.mlp.fc1.{leaf}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": "blocks.{i}.mlp.fc2.{leaf}",
        "encoder.blocks.{i}.residual2.scale": "blocks.{i}.ls2.gamma",
        "encoder.norm.{leaf}": "norm.{leaf}",
        "pooled_norm.{leaf}": "fc_norm.{leaf}",
        "attention_pooling.probe": "attn_pool.latent",
        "attention_pooling.q.{leaf}": "attn_pool.q.{leaf}",
        "attention_pooling.kv.{leaf}": "attn_pool.kv.{leaf}",
        "attention_pooling.project.{leaf}": "attn_pool.proj.{leaf}",
        "attention_pooling.norm.{leaf}": "attn_pool.norm.{leaf}",
        "attention_pooling.mlp.expand.{leaf}": "attn_pool.mlp.fc1.{leaf}",
        "attention_pooling.mlp.contract.{leaf}": "attn_pool.mlp.fc2.{leaf}",
        "head.hidden.{leaf}": "pre_logits.fc.{leaf}",  # older timm versions
        "head.out.{leaf}": "head.{leaf}",
        "head.label_head.out.{leaf}": "head.{leaf}",
        "head.teacher_head.out.{leaf}": "head_dist.{leaf}",
    }
)
# Parts of the official files of MAE and MSN that only pre-training uses
PRETRAINING_KEYS = {
    r"decoder_(embed|pos_embed|blocks|norm|pred)\b.*": "the decoder of MAE",
    r"(fc\.(fc|bn)\d|pred\.\w+)\..*": "the projection head of MSN",
}
# Settings of config.json under which the blocks compute something else
UNSUPPORTED_ARGS = (
    "block_fn", "mlp_layer", "norm_layer", "attn_layer", "pool_include_prefix", "scale_attn_norm",
    "scale_attn_inner_norm", "scale_mlp_norm", "use_rot_pos_emb", "use_post_norm", "pre_norm",
)  # fmt: skip
UNUSUAL_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt": 16}  # by prefix of the architecture name
POOLING = {"token": "class", "avg": "mean", "map": "attention"}
# timm's names of activations
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_erf": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"
}  # fmt: skip
EVA_NAMES = ("eva", "vit_pe_", "rope", "dinov3")  # in names of architectures with rotary positions or EVA blocks
# Architectures with tanh GELU: the sizes of SigLIP 2. timm's other SigLIP models use the exact GELU.
TANH_PREFIXES = (
    "vit_base_patch32_siglip",
    "vit_large_patch16_siglip_512",
    "vit_large_patch16_siglip_gap_512",
    "vit_so400m_patch16_siglip",
    "vit_giantopt_patch16_siglip",
)
# Registered architecture by width. Its settings are overridden by model_args, so that only the class matters.
ARCHITECTURES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    name, model_args = str(raw.config.get("architecture", "")), dict(raw.config.get("model_args") or {})
    _check_settings(raw.source, name, model_args)
    activation = _stored_activation(raw.source, name, model_args)
    has_mask_token = raw.tensors.pop("mask_token", None) is not None
    drop_tensors(raw.tensors, PRETRAINING_KEYS, reading.notes)
    state, unexpected = KEYS.rename_to_vitral(raw.tensors)
    check_has_blocks(raw.source, "timm", state, unexpected, KEYS.from_vitral)
    width, channels, patch = flatten_patch_kernel(raw, state, "patch_embed.proj.weight")
    is_distilled = "distillation_token" in state
    pooling = _pooling(raw, state, model_args, reading)
    is_late_norm = "pooled_norm.weight" in state and pooling == "mean"
    _rename_norm_and_head(state, is_late_norm, is_distilled)
    size = _read_tokens(raw, state, patch, pooling, model_args, reading)
    if has_mask_token:
        reading.notes.append("mask_token is used in training only: ignored")
    stored_heads = model_args.get("num_heads", _registered_heads(name, width))
    config = infer_config(
        "timm",
        raw,
        state,
        unexpected,
        KEYS.from_vitral,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width, stored_heads, f"config.json ({name or 'model_args'})"),
        pooling=pooling,
        positions="learned" if "position_embedding.table" in state else "none",
        layer_scale=model_args.get("init_values"),
        activation=reading.setting("activation", "gelu", "gelu activation", stored=activation),
        norm_eps=reading.setting("norm_eps", 1e-6, "norm eps 1e-06", stored=1e-6 if name else None),
    )
    label_names = raw.config.get("label_names")
    return build_checkpoint(
        "timm",
        raw,
        state,
        unexpected,
        config,
        KEYS.from_vitral,
        _read_preprocessing(raw.config, config, has_mask_token or is_distilled, reading),
        reading,
        variant="distilled" if is_distilled else "late-norm" if is_late_norm else "plain",
        classes=[str(label) for label in label_names] if isinstance(label_names, list) else None,
    )


def _rename_norm_and_head(state: State, is_late_norm: bool, is_distilled: bool) -> None:
    for leaf in ("weight", "bias"):
        if f"pooled_norm.{leaf}" in state and not is_late_norm:  # selecting the class token commutes with the norm
            state[f"encoder.norm.{leaf}"] = state.pop(f"pooled_norm.{leaf}")
        if is_distilled and f"head.out.{leaf}" in state:
            state[f"head.label_head.out.{leaf}"] = state.pop(f"head.out.{leaf}")


def _registered_heads(name: str, width: int) -> int | None:
    """Attention heads of one of timm's registered architectures; None if the name is not one."""
    for prefix, heads in UNUSUAL_HEADS.items():
        if name.startswith(prefix):
            return heads
    return USUAL_HEADS.get(width, width // 64) if name.startswith(("vit_", "deit")) and width % 64 == 0 else None


def _check_settings(source: str, name: str, model_args: dict[str, Any]) -> None:
    """Refuse settings of config.json that vitral does not support."""
    for key in UNSUPPORTED_ARGS:
        if model_args.get(key):
            raise unsupported_model_error(source, f"config.json sets {key} to {model_args[key]!r}")
    if "rpn" in name or "relpos" in name:
        raise unsupported_model_error(source, f"{name} has norms after the branches (post-norm)")
    if any(part in name for part in EVA_NAMES):
        raise unsupported_model_error(source, f"{name} has rotary positions or EVA blocks")


def _stored_activation(source: str, name: str, model_args: dict[str, Any]) -> Activation | None:
    """The activation of the MLP according to config.json; None if it states neither it nor the architecture."""
    activation = model_args.get("act_layer")
    if activation is None and name:
        is_tanh = name.startswith(TANH_PREFIXES)
        activation = "quick_gelu" if "quickgelu" in name else "gelu_tanh" if is_tanh else "gelu"
    if activation is not None and activation not in ACTIVATIONS:
        raise unsupported_model_error(source, f"activation {activation}")
    return None if activation is None else ACTIVATIONS[activation]


def _pooling(raw: RawCheckpoint, state: State, model_args: dict[str, Any], reading: Interpretation) -> str:
    stored = model_args.get("global_pool") or raw.config.get("global_pool") or None
    if "attention_pooling.probe" in state:
        return str(reading.setting("pooling", "", "", stored="attention", origin="attn_pool"))
    if "distillation_token" in state:
        return str(reading.setting("pooling", "", "", stored="class", origin="dist_token"))
    if stored is not None and stored not in POOLING:
        raise unsupported_model_error(raw.source, f"pooling {stored!r}")
    has_class_token = "class_token.token" in state
    default = "class" if has_class_token and "pooled_norm.weight" not in state else "mean"
    text = f"{'class-token' if default == 'class' else 'mean'} pooling"
    pooling = str(reading.setting("pooling", default, text, stored=None if stored is None else POOLING[stored]))
    if (pooling == "class" and not has_class_token) or pooling == "attention":
        missing = "class token" if pooling == "class" else "attention pooling"
        raise VitralError(f"{raw.source} has no {missing}, which --pooling {pooling} needs", f"Use --pooling {default}")
    return pooling


def _read_tokens(
    raw: RawCheckpoint,
    state: State,
    patch: int,
    pooling: str,
    model_args: dict[str, Any],
    reading: Interpretation,
) -> tuple[int, int]:
    """Rearrange class token, registers and positions as in vitral; returns the image size.

    vitral has position rows for the class token, if it is pooled, and for the patches only.
    """
    input_size = (raw.config.get("pretrained_cfg") or {}).get("input_size") or [0, 0, 0]
    size = model_args.get("img_size") or input_size[1:]
    stored_size = (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
    num_registers = state["registers"].shape[1] if "registers" in state else 0
    num_cls = ("class_token.token" in state) + ("distillation_token" in state)
    if "position_embedding.table" not in state:
        if model_args.get("pos_embed") != "none":
            raise unsupported_model_error(
                raw.source, "no pos_embed: rotary or relative positions (config.json does not set pos_embed to none)"
            )
        return reading.options.image_size or stored_size
    if not raw.config:
        reading.assume("no rotary positions")
    table = state["position_embedding.table"]
    # Rows before the patches: none (no_embed_class), the class token only (DINOv2's own files), or all prefix tokens.
    prefix_options = [0, num_cls, num_cls + num_registers] if num_registers else [num_cls, 0]
    if "no_embed_class" in model_args:
        prefix_options = [0] if model_args["no_embed_class"] else [num_cls + num_registers]
    num_prefix, size = reading.position_table(table.shape[1], prefix_options, patch, stored_size)
    if num_cls and num_prefix == 0 and "no_embed_class" not in model_args:
        reading.assume(f"{table.shape[1]} positions for the patches and none for the class token")
    split_position_table(state, num_prefix, num_cls, pooling, reading.notes)
    return size


def _read_preprocessing(
    file: dict[str, Any], config: ViTConfig, has_imagenet_default: bool, reading: Interpretation
) -> Preprocessing:
    """`has_imagenet_default`: files of DeiT, MAE and DINOv2, which normalise with ImageNet statistics."""
    size, channels = config.image_size, config.channels
    stored = file.get("pretrained_cfg") or (file if "mean" in file else {})  # second: older timm versions
    input_size = tuple(stored.get("input_size", (channels, *size))[1:])
    if any(side % config.patch_size for side in input_size):
        input_size = size
    names = {"mean": "mean", "std": "std", "crop": "crop_pct", "interpolation": "interpolation"}
    preprocessing = reading.preprocessing(
        input_size,
        channels,
        mean_std=IMAGENET if has_imagenet_default or stored else HALF,
        crop=0.9,
        interpolation="bicubic",
        stored={field: stored[name] for field, name in names.items() if stored.get(name)},
        origin="config.json",
    )
    if stored.get("crop_mode", "center") != "center":
        reading.notes.append(f"timm's crop_mode is {stored['crop_mode']}; vitral uses a centre crop")
    return preprocessing


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    state, notes = exportable_state(
        checkpoint,
        "timm",
        variants=("plain", "distilled", "late-norm"),
        poolings=("class", "mean", "attention"),
        registers=True,
        qk_norm=True,
        norm_eps=1e-6,
    )
    notes += resampling_notes(config, "timm", "bicubic-antialias")
    no_embed_class = _merge_position_rows(config, state)
    unflatten_patch_kernel(state, config)
    is_distilled = checkpoint.variant == "distilled"
    num_classes = 0 if checkpoint.headless else config.num_classes
    config_json: dict[str, Any] = {
        "architecture": "deit_base_distilled_patch16_224"
        if is_distilled
        else ARCHITECTURES.get(config.width, "vit_base_patch16_224"),
        "num_classes": num_classes,
        "num_features": config.width,
        "global_pool": _global_pool(config),
        "model_args": _model_args(checkpoint, no_embed_class),
        "pretrained_cfg": _pretrained_cfg(checkpoint, num_classes),
    }
    if checkpoint.classes and not checkpoint.headless:
        config_json["label_names"] = list(checkpoint.classes)
    tensors = KEYS.rename_from_vitral(state)
    return ConvertedModel(tensors=tensors, json_files={"config.json": config_json}, notes=notes)


def _global_pool(config: ViTConfig) -> str:
    return next(name for name, pooling in POOLING.items() if pooling == config.pooling)


def _model_args(checkpoint: Checkpoint, no_embed_class: bool) -> dict[str, Any]:
    """Arguments of timm's model class."""
    config = checkpoint.config
    arguments = {
        "img_size": list(config.image_size),
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _mlp_ratio(config),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "act_layer": None if config.activation == "gelu" else config.activation,
    }
    if checkpoint.variant != "distilled":
        arguments |= {
            "class_token": config.pooling == "class",
            "global_pool": _global_pool(config),
            "reg_tokens": config.registers,
            "no_embed_class": no_embed_class,
            "fc_norm": checkpoint.variant == "late-norm",
        }
    return {key: value for key, value in arguments.items() if value is not None}


def _pretrained_cfg(checkpoint: Checkpoint, num_classes: int) -> dict[str, Any]:
    """Preprocessing and head as timm stores them."""
    preprocessing = checkpoint.preprocessing
    return {
        "input_size": [checkpoint.config.channels, *preprocessing.image_size],
        "fixed_input_size": True,
        "interpolation": preprocessing.interpolation,
        "crop_pct": preprocessing.crop,
        "crop_mode": "center",
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "num_classes": num_classes,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if checkpoint.variant == "distilled" else "head",
    }


def _merge_position_rows(config: ViTConfig, state: State) -> bool:
    """Arrange the position rows as in timm: for all prefix tokens or for none; returns timm's `no_embed_class`.

    With registers, which have no rows in vitral, the class token's row is added to the token itself.
    """
    table = state["position_embedding.table"]
    if "distillation_position_table" in state:
        rows = [table[:, :1], state.pop("distillation_position_table"), table[:, 1:]]
        state["position_embedding.table"] = torch.cat(rows, dim=1)
        return False
    if config.pooling != "class":
        return True
    row = table[:, :1]
    if not config.registers and row.any():
        return False
    if row.any():
        state["class_token.token"] = state["class_token.token"] + row
    state["position_embedding.table"] = table[:, 1:].clone()
    return True


def _mlp_ratio(config: ViTConfig) -> float:
    """The ratio for which timm's int(width · ratio) is the hidden width."""
    ratio = config.hidden_width / config.width
    return ratio if int(config.width * ratio) == config.hidden_width else math.nextafter(ratio, math.inf)
