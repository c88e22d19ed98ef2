"""The timm format: VisionTransformer, VisionTransformerDistilled and Eva (timm_eva.py).

The official files of DeiT, MAE, MSN, I-JEPA and DINOv2 have the same tensor names.
"""

from __future__ import annotations

import math
import re
from typing import Any, cast

import torch

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import Activation, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights import timm_eva
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import USUAL_HEADS, Interpretation
from vitral.weights.key_mapping import KeyMapping, State, add_zero_key_bias, fuse_qkv
from vitral.weights.preprocessing import HALF, IMAGENET
from vitral.weights.reading import (
    build_checkpoint,
    check_has_blocks,
    drop_tensors,
    flatten_patch_kernel,
    infer_config,
    is_gated,
    rename_tensors,
    split_position_table,
)
from vitral.weights.writing import exportable_state, resampling_notes, unflatten_patch_kernel

KEYS = KeyMapping(
    {
        "patch_embedding.project.{leaf}": "patch_embed.proj.{leaf}",
        "class_token.token": "cls_token",
        "distillation_token": "dist_token",
        "registers": ("reg_token", "register_tokens", "storage_tokens"),  # others: DINOv2's and DINOv3's own files
        "position_embedding.table": "pos_embed",
        "pre_norm.{leaf}": "norm_pre.{leaf}",
        "encoder.blocks.{i}.norm1.{leaf}": "blocks.{i}.norm1.{leaf}",
        "encoder.blocks.{i}.attention.q.bias": "blocks.{i}.attn.q_bias",
        "encoder.blocks.{i}.attention.v.bias": "blocks.{i}.attn.v_bias",
        "encoder.blocks.{i}.attention.qkv.{leaf}": "blocks.{i}.attn.qkv.{leaf}",
        "encoder.blocks.{i}.attention.norm_q.{leaf}": "blocks.{i}.attn.q_norm.{leaf}",
        "encoder.blocks.{i}.attention.norm_k.{leaf}": "blocks.{i}.attn.k_norm.{leaf}",
        "encoder.blocks.{i}.attention.project.{leaf}": "blocks.{i}.attn.proj.{leaf}",
        "encoder.blocks.{i}.residual1.scale": ("blocks.{i}.ls1.gamma", "blocks.{i}.gamma_1"),  # second spelling: Eva
        "encoder.blocks.{i}.norm2.{leaf}": "blocks.{i}.norm2.{leaf}",
        "encoder.blocks.{i}.mlp.gate.{leaf}": ("blocks.{i}.mlp.fc1_g.{leaf}", "blocks.{i}.mlp.w1.{leaf}"),
        "encoder.blocks.{i}.mlp.value.{leaf}": ("blocks.{i}.mlp.fc1_x.{leaf}", "blocks.{i}.mlp.w2.{leaf}"),
        "encoder.blocks.{i}.mlp.expand.{leaf}": ("blocks.{i}.mlp.fc1.{leaf}", "blocks.{i}.mlp.w12.{leaf}"),
        "encoder.blocks.{i}.mlp.contract.{leaf}": ("blocks.{i}.mlp.fc2.{leaf}", "blocks.{i}.mlp.w3.{leaf}"),
        "encoder.blocks.{i}.residual2.scale": ("blocks.{i}.ls2.gamma", "blocks.{i}.gamma_2"),
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
    "scale_attn_inner_norm", "scale_mlp_norm", *timm_eva.UNSUPPORTED_ARGS,
)  # fmt: skip
UNUSUAL_HEADS = {  # by prefix of the architecture name
    "vit_base_patch16_gap_224": 16, "vit_giantopt": 16, "vit_huge_plus_patch16_dinov3": 20, "vit_7b_patch16_dinov3": 32,
    "vit_pe_lang_gigantic": 16, "vit_pe_spatial_gigantic": 16,
}  # fmt: skip
CROP_MODES = {"squash": "stretch", "border": "pad"}
POOLING = {"token": "class", "avg": "mean", "map": "attention"}
# timm's names of activations
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_erf": "gelu", "quick_gelu": "quick_gelu", "relu": "relu"
}  # fmt: skip
LARGE_EPS_NAMES = ("clip", "dinov3", "lingbot", "vit_pe_")  # in names of architectures with norm eps 1e-5
NO_FINAL_NORM_NAMES = ("intern300m", "vit_pe_lang", "vit_pe_spatial")
# Architectures with tanh GELU: the sizes of SigLIP 2. timm's other SigLIP models use the exact GELU.
TANH_PREFIXES = (
    "vit_base_patch32_siglip",
    "vit_large_patch16_siglip_512",
    "vit_large_patch16_siglip_gap_512",
    "vit_so400m_patch16_siglip",
    "vit_giantopt_patch16_siglip",
)
# Registered architecture by width. Its settings are overridden by model_args, so that only the class matters, and what
# model_args cannot state: norm eps and SwiGLU.
ARCHITECTURES = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}
LARGE_EPS_ARCHITECTURE, SWIGLU_ARCHITECTURE = "vit_base_patch16_clip_224", "vit_giant_patch14_dinov2"


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    name, model_args = str(raw.config.get("architecture", "")), dict(raw.config.get("model_args") or {})
    _check_settings(raw.source, name, model_args)
    timm_eva.drop_training_tensors(raw, reading.notes)
    has_mask_token = raw.tensors.pop("mask_token", None) is not None
    drop_tensors(raw.tensors, PRETRAINING_KEYS, reading.notes)
    is_eva = any(re.search(r"\.(gamma_[12]|q_bias)$", name) for name in raw.tensors)
    tensors = rename_tensors("timm", raw, raw.tensors, KEYS)
    state = tensors.state
    _drop_clip_projection(name, raw.config, state, reading.notes)
    has_key_bias = not add_zero_key_bias(state)
    fuse_qkv(state)
    check_has_blocks(tensors)
    width, channels, patch = flatten_patch_kernel(tensors)
    is_distilled = "distillation_token" in state
    pooling = _pooling(raw, state, model_args, reading)
    if is_distilled:
        for key in [key for key in state if key.startswith("head.out")]:
            state[key.replace("out", "label_head.out")] = state.pop(key)
    size = _read_tokens(raw, state, patch, model_args, reading)
    rope = timm_eva.read_rope(name, model_args, state, is_eva, (size[0] // patch, size[1] // patch), reading)
    _check_positions(raw.source, state, rope, model_args)
    if has_mask_token:
        reading.notes.append("mask_token is used in training only: ignored")
    heads = _heads(name, model_args, width, rope, reading)
    if rope is not None:
        timm_eva.permute_heads(state, rope, heads)
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=heads,
        pooling=pooling,
        positions=_positions(state, rope),
        layer_scale=model_args.get("init_values"),
        key_bias=has_key_bias,
        final_norm=not _lacks_final_norm(name, model_args, state),
        activation=_activation(raw.source, name, model_args, state, reading),
        norm_eps=_norm_eps(name, state, rope, reading),
        **({} if rope is None else {"rope": rope.rope, "rope_base": rope.base}),
    )
    label_names = raw.config.get("label_names")
    is_late_norm = "pooled_norm.weight" in state
    has_imagenet_default = has_mask_token or is_distilled or rope is not None
    return build_checkpoint(
        tensors,
        config,
        _read_preprocessing(raw.config, config, has_imagenet_default, reading),
        reading,
        variant="distilled" if is_distilled else "late-norm" if is_late_norm else "plain",
        classes=[str(label) for label in label_names] if isinstance(label_names, list) else None,
    )


def _drop_clip_projection(name: str, config: dict[str, Any], state: State, notes: list[str]) -> None:
    """Remove the head of a CLIP tower, which timm makes of the projection: linear, without bias and class names."""
    bias = state.get("head.out.bias")
    is_projection = "clip" in name and "label_names" not in config and (bias is None or not bias.any())
    if is_projection and "head.out.weight" in state:
        num_outputs = state.pop("head.out.weight").shape[0]
        state.pop("head.out.bias", None)
        notes.append(f"head is CLIP's projection to {num_outputs} values, not a classifier: ignored")


def _positions(state: State, rope: timm_eva.RopeLayout | None) -> str:
    learned = "learned" if "position_embedding.table" in state else ""
    return learned or "none" if rope is None else "learned+rotary" if learned else "rotary"


def _check_positions(source: str, state: State, rope: timm_eva.RopeLayout | None, model_args: dict[str, Any]) -> None:
    """Refuse models without positions that config.json does not state to have none."""
    if "position_embedding.table" not in state and rope is None and model_args.get("pos_embed") != "none":
        raise unsupported_model_error(
            source, "no pos_embed: rotary or relative positions (config.json does not set pos_embed to none)"
        )


def _lacks_final_norm(name: str, model_args: dict[str, Any], state: State) -> bool:
    """Whether the missing final norm is intended."""
    is_stated = False in (model_args.get("final_norm"), model_args.get("use_post_transformer_norm"))
    is_missing = "encoder.norm.weight" not in state and "pooled_norm.weight" not in state
    return is_missing and (is_stated or any(part in name for part in NO_FINAL_NORM_NAMES))


def _norm_eps(name: str, state: State, rope: timm_eva.RopeLayout | None, reading: Interpretation) -> float:
    """1e-6, but 1e-5 in CLIP and DINOv3. config.json states it by the architecture only."""
    is_large = "pre_norm.weight" in state or (rope is not None and rope.rope == "centered")
    default = 1e-5 if is_large else 1e-6
    stored = (1e-5 if any(part in name for part in LARGE_EPS_NAMES) else 1e-6) if name else None
    return float(reading.setting("norm_eps", default, f"norm eps {default:g}", stored=stored))


def _heads(
    name: str, model_args: dict[str, Any], width: int, rope: timm_eva.RopeLayout | None, reading: Interpretation
) -> int:
    """Attention heads: as config.json states or its architecture has, or those of DINOv3 for a model like it."""
    if not name and rope is not None and reading.options.heads is None:
        return reading.heads(width, timm_eva.DINOV3_HEADS.get(width), "the sizes of DINOv3")
    stored = model_args.get("num_heads", _registered_heads(name, width))
    return reading.heads(width, stored, f"config.json ({name or 'model_args'})")


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


def _activation(
    source: str, name: str, model_args: dict[str, Any], state: State, reading: Interpretation
) -> Activation:
    """The activation of the MLP: SwiGLU by its tensors, others by config.json or assumed."""
    if is_gated(state):
        origin = "width of the MLP's first layer"
        return cast(Activation, reading.setting("activation", "", "", stored="swiglu", origin=origin))
    stored = model_args.get("act_layer")
    if stored is None and name:
        is_tanh = name.startswith(TANH_PREFIXES)
        stored = "quick_gelu" if "quickgelu" in name else "gelu_tanh" if is_tanh else "gelu"
    if stored is not None and stored not in ACTIVATIONS:
        raise unsupported_model_error(source, f"activation {stored}")
    activation = None if stored is None else ACTIVATIONS[stored]
    return cast(Activation, reading.setting("activation", "gelu", "gelu activation", stored=activation))


def _pooling(raw: RawCheckpoint, state: State, model_args: dict[str, Any], reading: Interpretation) -> str:
    stored = model_args.get("global_pool") or raw.config.get("global_pool") or None
    if "attention_pooling.probe" in state:
        if re.search(timm_eva.NAMES, str(raw.config.get("architecture", ""))):
            raise unsupported_model_error(raw.source, "attention pooling with heads of its own, of all tokens")
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
    raw: RawCheckpoint, state: State, patch: int, model_args: dict[str, Any], reading: Interpretation
) -> tuple[int, int]:
    """Rearrange the positions as in vitral; returns the image size."""
    input_size = (raw.config.get("pretrained_cfg") or {}).get("input_size") or [0, 0, 0]
    size = model_args.get("img_size") or input_size[1:]
    stored_size = (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))
    num_registers = state["registers"].shape[1] if "registers" in state else 0
    num_cls = ("class_token.token" in state) + ("distillation_token" in state)
    if "position_embedding.table" not in state:
        if not any(stored_size) and reading.options.image_size is None:
            reading.assume(f"square images of {16 * patch}×{16 * patch}", "image_size")
            return 16 * patch, 16 * patch
        return reading.options.image_size or stored_size
    table = state["position_embedding.table"]
    # Rows before the patches: none (no_embed_class), the class token only (DINOv2's own files), or all prefix tokens.
    prefix_options = [0, num_cls, num_cls + num_registers] if num_registers else [num_cls, 0]
    if "no_embed_class" in model_args:
        prefix_options = [0] if model_args["no_embed_class"] else [num_cls + num_registers]
    num_prefix, size = reading.position_table(table.shape[1], prefix_options, patch, stored_size)
    if num_cls and num_prefix == 0 and "no_embed_class" not in model_args:
        reading.assume(f"{table.shape[1]} positions for the patches and none for the class token")
    split_position_table(state, num_prefix, num_cls)
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
    crop_mode = stored.get("crop_mode", "center")
    is_whole = stored.get("crop_pct") == 1  # with a crop, timm stretches or pads to a larger size first
    resize = {"resize": CROP_MODES[crop_mode]} if is_whole and crop_mode in CROP_MODES else {}
    preprocessing = reading.preprocessing(
        input_size,
        channels,
        mean_std=IMAGENET if has_imagenet_default or stored else HALF,
        crop=0.9,
        interpolation="bicubic",
        stored={field: stored[name] for field, name in names.items() if stored.get(name)} | resize,
        origin="config.json",
    )
    if crop_mode != "center" and not resize:
        reading.notes.append(f"timm's crop_mode is {crop_mode}; vitral uses a centre crop")
    return preprocessing


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    is_eva = timm_eva.is_needed(config)
    architecture, norm_eps = _architecture(checkpoint, is_eva)
    state, notes = exportable_state(
        checkpoint,
        "timm",
        variants=("plain", "late-norm") if is_eva else ("plain", "distilled", "late-norm"),
        poolings=("class", "mean") if is_eva else ("class", "mean", "attention"),
        registers=True,
        qk_norm=True,
        supported=("swiglu", "pre_norm", "no_final_norm", "rotary", "class_token", "register_positions"),
        norm_eps=norm_eps,
    )
    notes += resampling_notes(config, "timm", "bicubic-antialias")
    no_embed_class = _merge_position_rows(config, state)
    unflatten_patch_kernel(state, config)
    model_args = _model_args(checkpoint, no_embed_class)
    if is_eva:
        model_args = timm_eva.rename_arguments(model_args) | timm_eva.to_eva(config, state)
    num_classes = 0 if checkpoint.headless else config.num_classes
    config_json: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": num_classes,
        "num_features": config.width,
        "global_pool": _global_pool(config),
        "model_args": model_args,
        "pretrained_cfg": _pretrained_cfg(checkpoint, num_classes),
    }
    if checkpoint.classes and not checkpoint.headless:
        config_json["label_names"] = list(checkpoint.classes)
    tensors = KEYS.rename_from_vitral(state)
    if is_eva:
        tensors = timm_eva.rename_layer_scale(tensors)
    return ConvertedModel(tensors=tensors, json_files={"config.json": config_json}, notes=notes)


def _architecture(checkpoint: Checkpoint, is_eva: bool) -> tuple[str, float]:
    """A registered architecture of the right class, and the norm eps that comes with it."""
    config = checkpoint.config
    if is_eva:
        eps = 1e-5 if config.norm_eps == 1e-5 else 1e-6
        return timm_eva.ARCHITECTURES[eps], eps
    if checkpoint.variant == "distilled":
        return "deit_base_distilled_patch16_224", 1e-6
    if config.activation == "swiglu":
        return SWIGLU_ARCHITECTURE, 1e-6
    if config.norm_eps == 1e-5:
        return LARGE_EPS_ARCHITECTURE, 1e-5
    return ARCHITECTURES.get(config.width, "vit_base_patch16_224"), 1e-6


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
        "mlp_ratio": _mlp_ratio(config, packed=config.activation == "swiglu" and not timm_eva.is_needed(config)),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
    }
    if config.activation not in ("gelu", "swiglu"):
        arguments["act_layer"] = config.activation
    if checkpoint.variant != "distilled":
        arguments |= {
            "class_token": config.has_class_token,
            "global_pool": _global_pool(config),
            "reg_tokens": config.registers,
            "no_embed_class": no_embed_class,
            "fc_norm": checkpoint.variant == "late-norm",
            "pre_norm": config.pre_norm,
            "final_norm": config.final_norm,
        }
    return arguments


def _pretrained_cfg(checkpoint: Checkpoint, num_classes: int) -> dict[str, Any]:
    """Preprocessing and head as timm stores them."""
    preprocessing = checkpoint.preprocessing
    return {
        "input_size": [checkpoint.config.channels, *preprocessing.image_size],
        "fixed_input_size": True,
        "interpolation": preprocessing.interpolation,
        "crop_pct": preprocessing.crop,
        "crop_mode": {resize: mode for mode, resize in CROP_MODES.items()}.get(preprocessing.resize, "center"),
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
    table = state.get("position_embedding.table")
    if table is None or config.register_positions:
        return False
    if "distillation_position_table" in state:
        rows = [table[:, :1], state.pop("distillation_position_table"), table[:, 1:]]
        state["position_embedding.table"] = torch.cat(rows, dim=1)
        return False
    if not config.has_class_token:
        return True
    row = table[:, :1]
    if not config.registers and row.any():
        return False
    if row.any():
        state["class_token.token"] = state["class_token.token"] + row
    state["position_embedding.table"] = table[:, 1:].clone()
    return True


def _mlp_ratio(config: ViTConfig, packed: bool = False) -> float:
    """The ratio for which timm's int(width · ratio) is the hidden width; packed: of gates and values together."""
    hidden = config.hidden_width * (2 if packed else 1)
    ratio = hidden / config.width
    return ratio if int(config.width * ratio) == hidden else math.nextafter(ratio, math.inf)
