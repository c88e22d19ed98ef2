"""timm's VisionTransformer and VisionTransformerDistilled; DeiT's, MAE's and DINOv2's own files have the same names."""

from __future__ import annotations

import math
from typing import Any

import torch

from vitral.data.preprocess import Preprocessing
from vitral.models.vit import ViTConfig
from vitral.weights.checkpoint import Asked, Checkpoint, Written, refuse
from vitral.weights.files import Found
from vitral.weights.key_mapping import Names, State
from vitral.weights.preprocessing import HALF, IMAGENET, preprocessing, seen
from vitral.weights.reading import HEADS, architecture, choose_heads, finish, place_rows
from vitral.weights.writing import writable

NAMES = Names(
    {
        "patch_embedding.project.{leaf}": "patch_embed.proj.{leaf}",
        "class_token.token": "cls_token",
        "distillation_token": "dist_token",
        "registers": ("reg_token", "register_tokens"),  # the second is DINOv2's own
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
        "head.hidden.{leaf}": "pre_logits.fc.{leaf}",  # older versions of timm
        "head.out.{leaf}": "head.{leaf}",
        "head.label_head.out.{leaf}": "head.{leaf}",
        "head.teacher_head.out.{leaf}": "head_dist.{leaf}",
    }
)
OTHER_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt": 16}  # not what is usual at their width
POOLING = {"token": "class", "avg": "mean", "map": "attention"}
GELU = {"gelu": "exact", "gelu_tanh": "tanh"}
# SigLIP 2's sizes; the other SigLIP models of timm compute the exact GELU.
TANH = (
    "vit_base_patch32_siglip",
    "vit_large_patch16_siglip_512",
    "vit_large_patch16_siglip_gap_512",
    "vit_so400m_patch16_siglip",
    "vit_giantopt_patch16_siglip",
)
# A registered model to start from: model_args say all that makes this one, so the name only has to be near.
NEAR = {192: "vit_tiny_patch16_224", 384: "vit_small_patch16_224", 1024: "vit_large_patch16_224"}


def to_vitral(found: Found, asked: Asked) -> Checkpoint:
    notes: list[str] = []
    name, given = str(found.config.get("architecture", "")), dict(found.config.get("model_args") or {})
    gelu = _gelu(found.where, name, given)
    masks = [key for key in ("mask_token",) if found.tensors.pop(key, None) is not None]
    state, unknown = NAMES.read(found.tensors)
    kernel = state["patch_embedding.project.weight"]
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise refuse(found.where, f"its patches are not squares: patch_embed.proj.weight is {tuple(kernel.shape)}")
    width, channels, patch, _ = kernel.shape
    state["patch_embedding.project.weight"] = kernel.flatten(1)  # d c p q -> d (c p q)
    pooling = _pooling(found, state, given, notes)
    late = "pooled_norm.weight" in state and pooling == "mean"
    if "pooled_norm.weight" in state and not late:  # the norm of one token is the same before and after taking it
        for leaf in ("weight", "bias"):
            state[f"encoder.norm.{leaf}"] = state.pop(f"pooled_norm.{leaf}")
    distilled = "distillation_token" in state
    size = _tokens(found, state, patch, pooling, given, asked, notes)
    if distilled:
        for leaf in ("weight", "bias"):
            if f"head.out.{leaf}" in state:
                state[f"head.label_head.out.{leaf}"] = state.pop(f"head.out.{leaf}")
    if masks:
        notes.append("mask_token is for training only: left out")
    usual = _heads_of(name, width)
    said, by = given.get("num_heads", usual), f"config.json's {name or 'model_args'}"
    config = architecture(
        found,
        state,
        NAMES.theirs,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=choose_heads(width, asked, said, by, notes, found.where),
        pooling=pooling,
        positions="learned" if "position_embedding.table" in state else "none",
        layer_scale=given.get("init_values"),
        gelu=gelu,
        norm_eps=1e-6,
    )
    pixels = _preprocessing(found.config, config, bool(masks) or distilled, notes)
    variant = "distilled" if distilled else "late-norm" if late else "plain"
    labels = found.config.get("label_names")
    classes = [str(label) for label in labels] if isinstance(labels, list) else None
    return finish("timm", found, state, unknown, config, NAMES.theirs, pixels, notes, variant=variant, classes=classes)


def _heads_of(name: str, width: int) -> int | None:
    """Of a model that timm has under this name."""
    for beginning, heads in OTHER_HEADS.items():
        if name.startswith(beginning):
            return heads
    return HEADS.get(width, width // 64) if name.startswith(("vit_", "deit")) and width % 64 == 0 else None


def _gelu(where: str, name: str, given: dict[str, Any]) -> str:
    """What config.json says that the tensors do not."""
    for key in ("block_fn", "mlp_layer", "norm_layer", "attn_layer", "pool_include_prefix", "scale_attn_norm"):
        if given.get(key):
            raise refuse(where, f"config.json sets {key} to {given[key]!r}")
    if "rpn" in name or "relpos" in name:
        raise refuse(where, f"{name} has norms after the branches (post-norm)")
    activation = str(given.get("act_layer") or ("gelu_tanh" if name.startswith(TANH) else "gelu"))
    if activation not in GELU or "quickgelu" in name:
        raise refuse(where, f"its activation is {activation if activation not in GELU else 'quick_gelu'}")
    return GELU[activation]


def _pooling(found: Found, state: State, given: dict[str, Any], notes: list[str]) -> str:
    said = given.get("global_pool") or found.config.get("global_pool")
    if "attention_pooling.probe" in state:
        return "attention"
    if said and said not in POOLING:
        raise refuse(found.where, f"its pooling is {said!r}")
    if said:
        return POOLING[said]
    if "class_token.token" in state and "pooled_norm.weight" in state:
        notes.append("pooling: mean, ASSUMED: there is a class token, but the last norm stands after the pooling")
    return "mean" if "pooled_norm.weight" in state or "class_token.token" not in state else "class"


def _tokens(
    found: Found, state: State, patch: int, pooling: str, given: dict[str, Any], asked: Asked, notes: list[str]
) -> tuple[int, int]:
    """Class token, registers and positions as vitral keeps them; the image size."""
    said = (found.config.get("pretrained_cfg") or {}).get("input_size") or [0, 0, 0]
    image = given.get("img_size") or said[1:]
    hint = (int(image), int(image)) if isinstance(image, int) else (int(image[0]), int(image[1]))
    registers = state["registers"].shape[1] if "registers" in state else 0
    extra = ("class_token.token" in state) + ("distillation_token" in state)
    if "position_embedding.table" not in state:
        return asked.image_size or hint
    table = state["position_embedding.table"]
    # Rows before the patches': none (no_embed_class), the class token's alone (DINOv2's own files), or all.
    fronts = [0, extra, extra + registers] if registers else [extra, 0]
    if "no_embed_class" in given:
        fronts = [0] if given["no_embed_class"] else [extra + registers]
    front, size = place_rows(table.shape[1], fronts, patch, asked, hint, found.where)
    if extra and front == 0 and "no_embed_class" not in given:
        notes.append(f"{table.shape[1]} positions, ASSUMED to be all for patches, none for the class token")
    before, patches = table[:, :front], table[:, front:]
    if registers and front == extra + registers:
        state["registers"] = state["registers"] + before[:, extra:]
    if "distillation_token" in state and front == 2:
        state["distillation_position_table"] = before[:, 1:2].clone()
        state["position_embedding.table"] = torch.cat([before[:, :1], patches], dim=1)
    elif pooling == "class":
        row = before[:, :1] if front else torch.zeros_like(patches[:, :1])
        state["position_embedding.table"] = table if front == 1 else torch.cat([row, patches], dim=1)
    else:
        state["position_embedding.table"] = patches if front == 0 else patches.clone()
        if extra:  # a class token that nobody pools is one more register
            token = state.pop("class_token.token")
            token = token + before[:, :1] if front else token
            state["registers"] = torch.cat([token, state["registers"]], dim=1) if registers else token
            notes.append("the class token is not pooled: it is kept as a register")
    return size


def _preprocessing(file: dict[str, Any], config: ViTConfig, dino_or_deit: bool, notes: list[str]) -> Preprocessing:
    size, channels = config.image_size, config.channels
    said = file.get("pretrained_cfg") or (file if "mean" in file else None)  # the second is timm's older layout
    if not said:
        made = preprocessing(size, channels, IMAGENET if dino_or_deit else HALF, 0.9, "bicubic", notes)
        notes.append(f"preprocessing ASSUMED, timm's usual: {seen(made)}")
        return made
    shown = tuple(said.get("input_size", (channels, *size))[1:])
    if any(side % config.patch_size for side in shown):
        shown = size
    colours = tuple(said.get("mean", IMAGENET[0])), tuple(said.get("std", IMAGENET[1]))
    crop, interpolation = said.get("crop_pct") or 0.9, str(said.get("interpolation", "bicubic"))
    made = preprocessing(shown, channels, colours, crop, interpolation, notes)
    notes.append(f"preprocessing from config.json: {seen(made)}")
    if said.get("crop_mode", "center") != "center":
        notes.append(f"timm's crop_mode is {said['crop_mode']}; vitral cuts the middle")
    return made


def from_vitral(checkpoint: Checkpoint) -> Written:
    config = checkpoint.config
    state, notes = writable(
        checkpoint,
        "timm",
        variants=("plain", "distilled", "late-norm"),
        poolings=("class", "mean", "attention"),
        registers=True,
        qk_norm=True,
        norm_eps=1e-6,
    )
    no_embed_class = _their_tokens(config, state)
    kernel = state["patch_embedding.project.weight"]
    state["patch_embedding.project.weight"] = kernel.unflatten(1, (config.channels, config.patch_size, -1))
    given = {
        "img_size": list(config.image_size),
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _ratio(config),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "act_layer": "gelu_tanh" if config.gelu == "tanh" else None,
    }
    pool = {theirs: ours for ours, theirs in POOLING.items()}[config.pooling]
    if checkpoint.variant != "distilled":
        given |= {
            "class_token": config.pooling == "class",
            "global_pool": pool,
            "reg_tokens": config.registers,
            "no_embed_class": no_embed_class,
            "fc_norm": checkpoint.variant == "late-norm",
        }
    name = NEAR.get(config.width, "vit_base_patch16_224")
    if checkpoint.variant == "distilled":
        name = "deit_base_distilled_patch16_224"
    seen_by = checkpoint.preprocessing
    classes = 0 if checkpoint.headless else config.classes
    document: dict[str, Any] = {
        "architecture": name,
        "num_classes": classes,
        "num_features": config.width,
        "global_pool": pool,
        "model_args": {key: value for key, value in given.items() if value is not None},
        "pretrained_cfg": {
            "input_size": [config.channels, *seen_by.image_size],
            "fixed_input_size": True,
            "interpolation": seen_by.interpolation,
            "crop_pct": seen_by.crop,
            "crop_mode": "center",
            "mean": list(seen_by.mean),
            "std": list(seen_by.std),
            "num_classes": classes,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if checkpoint.variant == "distilled" else "head",
        },
    }
    if checkpoint.classes and not checkpoint.headless:
        document["label_names"] = list(checkpoint.classes)
    return Written(tensors=NAMES.write(state), documents={"config.json": document}, notes=notes)


def _their_tokens(config: ViTConfig, state: State) -> bool:
    """timm has rows for all tokens before the patches or for none; where ours are mixed, the row joins its token."""
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


def _ratio(config: ViTConfig) -> float:
    """The number with which int(width · ratio) is the hidden width."""
    ratio = config.hidden_width / config.width
    return ratio if int(config.width * ratio) == config.hidden_width else math.nextafter(ratio, math.inf)
