"""Hugging Face transformers: ViT, DeiT and DINOv2 (with registers), as save_pretrained writes them."""

from __future__ import annotations

import re
from typing import Any

import torch

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.weights.checkpoint import Asked, Checkpoint, Written, refuse
from vitral.weights.files import Found
from vitral.weights.key_mapping import Names, State, fold_layer_scale, join_maps, split_maps
from vitral.weights.preprocessing import HALF, IMAGENET, Colours, crop_share, preprocessing, seen
from vitral.weights.reading import architecture, choose_heads, finish, place_rows
from vitral.weights.writing import writable

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
VIT = Names(
    COMMON
    | {
        "encoder.blocks.{i}.norm1.{leaf}": "encoder.layer.{i}.layernorm_before.{leaf}",
        "encoder.blocks.{i}.norm2.{leaf}": "encoder.layer.{i}.layernorm_after.{leaf}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": "encoder.layer.{i}.intermediate.dense.{leaf}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": "encoder.layer.{i}.output.dense.{leaf}",
    }
)
DINOV2 = Names(
    COMMON
    | {
        "encoder.blocks.{i}.norm1.{leaf}": "encoder.layer.{i}.norm1.{leaf}",
        "encoder.blocks.{i}.residual1.scale": "encoder.layer.{i}.layer_scale1.lambda1",
        "encoder.blocks.{i}.norm2.{leaf}": "encoder.layer.{i}.norm2.{leaf}",
        "encoder.blocks.{i}.mlp.expand.{leaf}": "encoder.layer.{i}.mlp.fc1.{leaf}",
        "encoder.blocks.{i}.mlp.contract.{leaf}": "encoder.layer.{i}.mlp.fc2.{leaf}",
        "encoder.blocks.{i}.residual2.scale": "encoder.layer.{i}.layer_scale2.lambda1",
    }
)
# transformers 5 has other names in memory (torch.save(model.state_dict())) than in its files.
IN_MEMORY = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
IN_MEMORY_VIT = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))
PREFIX = r"^(vit|deit|dinov2|dinov2_with_registers)\."
TRAINING_ONLY = r"embeddings\.(mask_token|position_ids)"
CLASSES = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
REASONS = {
    "swin": "windowed attention",
    "swinv2": "windowed attention, relative positions and post-norm",
    "beit": "relative positions",
    "data2vec-vision": "relative positions",
    "dinov3_vit": "rotary positions",
    "vit_hybrid": "a convolutional network before its patches",
}
GELU = {"gelu": "exact", "gelu_python": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def to_vitral(found: Found, asked: Asked) -> Checkpoint:
    said, notes = found.config, list[str]()
    tensors = {re.sub(PREFIX, "", name): found.tensors.pop(name) for name in list(found.tensors)}
    dino = any("layer_scale" in name or ".norm1." in name for name in tensors)
    kind = _kind(found.where, said, dino)
    for pattern, file_name in IN_MEMORY + (() if dino else IN_MEMORY_VIT):
        tensors = {re.sub(pattern, file_name, name): tensors.pop(name) for name in list(tensors)}
    for name in [name for name in tensors if re.fullmatch(TRAINING_ONLY, name)]:
        del tensors[name]
        notes.append(f"{name} is for training only: left out")
    names = DINOV2 if dino else VIT
    state, unknown = names.read(tensors)
    join_maps(state)
    if "head.out.weight" in state and "head.hidden.weight" in state:
        for leaf in ("weight", "bias"):
            state.pop(f"head.hidden.{leaf}", None)
        notes.append("the pooler does not lead to the classifier: left out")
    kernel = state["patch_embedding.project.weight"]
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise refuse(found.where, f"its patches are not squares: projection.weight is {tuple(kernel.shape)}")
    width, channels, patch, _ = kernel.shape
    state["patch_embedding.project.weight"] = kernel.flatten(1)  # d c p q -> d (c p q)
    size = _tokens(found, state, patch, asked, notes)
    variant = "distilled" if "distillation_token" in state else _pooled(state)
    if not said:  # a bare file
        notes.append(f"no config.json: GELU exact and norm eps {1e-6 if dino else 1e-12:g} ASSUMED")
    config = architecture(
        found,
        state,
        names.theirs,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=choose_heads(width, asked, said.get("num_attention_heads"), "config.json", notes, found.where),
        layer_scale=said.get("layerscale_value"),
        gelu=GELU[said.get("hidden_act", "gelu")],
        norm_eps=float(said.get("layer_norm_eps", 1e-6 if dino else 1e-12)),
    )
    pixels = _preprocessing(found.preprocessor, config, HALF if kind == "vit" else IMAGENET, notes)
    return finish(
        "transformers",
        found,
        state,
        unknown,
        config,
        names.theirs,
        pixels,
        notes,
        variant=variant,
        classes=_labels(said),
    )


def _kind(where: str, config: dict[str, Any], dino: bool) -> str:
    kind = str(config.get("model_type", "dinov2" if dino else "vit"))
    if kind not in CLASSES:
        raise refuse(where, f"model_type {kind}" + (f", with {REASONS[kind]}" if kind in REASONS else ""))
    activation = config.get("hidden_act", "gelu")
    if activation not in GELU:
        raise refuse(where, f"its activation is {activation}")
    if config.get("use_swiglu_ffn"):
        raise refuse(where, "its MLP is a SwiGLU")
    if config.get("pooler_act", "tanh") != "tanh":
        raise refuse(where, f"its pooler has the activation {config['pooler_act']}")
    return kind


def _tokens(found: Found, state: State, patch: int, asked: Asked, notes: list[str]) -> tuple[int, int]:
    """Class and distillation token, registers and positions as vitral keeps them; the image size."""
    table = state.get("position_embedding.table")
    if table is None or table.ndim != 3:
        raise VitralError(f"{found.where} is not a whole transformers model", "missing: embeddings.position_embeddings")
    image = found.config.get("image_size")
    hint = (image, image) if isinstance(image, int) else tuple(image) if image else None
    front, size = place_rows(
        table.shape[1], [2 if "distillation_token" in state else 1], patch, asked, hint, found.where
    )
    if front == 2:
        row, state["position_embedding.table"] = table[:, 1:2], torch.cat([table[:, :1], table[:, 2:]], dim=1)
        if "head.label_head.out.weight" in state:
            state["distillation_position_table"] = row.clone()
        else:  # a distillation token that nobody asks is a register
            state["registers"] = state.pop("distillation_token") + row
            notes.append("the distillation token has no head: it is kept as a register")
    return size


def _pooled(state: State) -> str:
    """DINOv2's classifier sees class token and mean; one whose second half is zero sees the class token alone."""
    weight, width = state.get("head.out.weight"), state["patch_embedding.project.weight"].shape[0]
    if weight is None or weight.ndim != 2 or weight.shape[1] != 2 * width:
        return "plain"
    if weight[:, width:].any():
        return "class-and-mean"
    state["head.out.weight"] = weight[:, :width].clone()
    return "plain"


def _labels(config: dict[str, Any]) -> list[str] | None:
    names = config.get("id2label")
    if not isinstance(names, dict) or any(re.fullmatch(r"LABEL_\d+", str(name)) for name in names.values()):
        return None
    return [str(names[key]) for key in sorted(names, key=int)]


def _preprocessing(said: dict[str, Any], config: ViTConfig, usual: Colours, notes: list[str]) -> Preprocessing:
    size, channels = config.image_size, config.channels
    if not said:
        made = preprocessing(size, channels, usual, 1.0, "bilinear" if usual == HALF else "bicubic", notes)
        notes.append(f"preprocessing ASSUMED, no preprocessor_config.json: {seen(made)}")
        return made
    scaled = _sides(said.get("size")) or size
    shown = (_sides(said.get("crop_size")) or size) if said.get("do_center_crop") else scaled
    crop = crop_share(max(shown), max(scaled))
    if any(side % config.patch_size for side in shown):
        shown = size
    colours = tuple(said.get("image_mean", usual[0])), tuple(said.get("image_std", usual[1]))
    if said.get("do_normalize") is False:
        colours = (0.0,) * channels, (1.0,) * channels
    number = said.get("resample", 2)
    made = preprocessing(shown, channels, colours, crop, RESAMPLE.get(number, f"number {number}"), notes)
    notes.append(f"preprocessing from preprocessor_config.json: {seen(made)}")
    if "shortest_edge" not in str(said.get("size")):
        notes.append("transformers squeezes pictures into a square; vitral keeps their proportions and cuts the middle")
    if shown != size:
        notes.append(f"pictures are {shown[0]}×{shown[1]}, positions are for {size[0]}×{size[1]}: they are resampled")
    return made


def _sides(said: Any) -> tuple[int, int] | None:
    """A size in any of the ways that transformers has written it."""
    if isinstance(said, dict):
        edge = said.get("shortest_edge")
        said = edge if edge is not None else [said.get("height"), said.get("width")]
    if isinstance(said, int):
        return said, said
    return (int(said[0]), int(said[1])) if said and None not in said else None


def from_vitral(checkpoint: Checkpoint) -> Written:
    config, variant = checkpoint.config, checkpoint.variant
    variants = ("plain", "distilled", "class-and-mean")
    state, notes = writable(checkpoint, "transformers", variants=variants, registers=True, hidden=checkpoint.headless)
    kind = _their_kind(checkpoint)
    if kind.startswith("dinov2"):
        _as_dinov2(state, config.width, config.depth, variant)
    elif config.layer_scale is not None:
        fold_layer_scale(state)
        notes.append("layer scale is multiplied into the projections before it")
    if kind == "deit":
        _as_deit(state)
    kernel = state["patch_embedding.project.weight"]
    state["patch_embedding.project.weight"] = kernel.unflatten(1, (config.channels, config.patch_size, -1))
    split_maps(state)
    tensors = (DINOV2 if kind.startswith("dinov2") else VIT).write(state)
    if kind.startswith("dinov2"):
        tensors["embeddings.mask_token"] = kernel.new_zeros(1, config.width)
    if not checkpoint.headless:
        tensors = {name if "classifier." in name else f"{kind}.{name}": tensors.pop(name) for name in list(tensors)}
    documents = {
        "config.json": _document(checkpoint, kind) | {"dtype": str(kernel.dtype).removeprefix("torch.")},
        "preprocessor_config.json": _their_preprocessing(checkpoint, notes),
    }
    return Written(tensors=tensors, documents=documents, notes=notes)


def _their_kind(checkpoint: Checkpoint) -> str:
    """The model of transformers that computes the same."""
    config, variant = checkpoint.config, checkpoint.variant
    rest, square = config.hidden_width % config.width, config.image_size[0] == config.image_size[1]
    dinov2_can = config.head == "linear" and not rest and square
    dinov2_must = variant == "class-and-mean" or config.registers > 1
    if dinov2_must and not dinov2_can:
        raise VitralError(
            "transformers cannot hold this model: its DINOv2 takes square images, an MLP of a whole multiple of the "
            "width and a head of one layer",
            "another family may: --to vitral can",
        )
    if dinov2_must or (dinov2_can and config.layer_scale is not None and variant == "plain"):
        return "dinov2_with_registers" if config.registers else "dinov2"
    return "deit" if variant == "distilled" or config.registers == 1 else "vit"


def _document(checkpoint: Checkpoint, kind: str) -> dict[str, Any]:
    config = checkpoint.config
    ending = "Model" if checkpoint.headless else "ForImageClassification"
    ending += "WithTeacher" if checkpoint.variant == "distilled" and not checkpoint.headless else ""
    height, width = config.image_size
    document: dict[str, Any] = {
        "architectures": [CLASSES[kind] + ending],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": "gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
    }
    if kind.startswith("dinov2"):
        document |= {"mlp_ratio": config.hidden_width // config.width, "layerscale_value": config.layer_scale or 1.0}
        document |= {"use_swiglu_ffn": False}
        document |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        document |= {"intermediate_size": config.hidden_width, "encoder_stride": config.patch_size}
    if not checkpoint.headless:
        labels = checkpoint.classes or [f"LABEL_{k}" for k in range(config.classes)]
        document["id2label"] = {str(k): label for k, label in enumerate(labels)}
        document["label2id"] = {label: k for k, label in enumerate(labels)}
    return document


def _as_deit(state: State) -> None:
    """A row for the distillation token; a lone register is one whose row is zero."""
    table = state["position_embedding.table"]
    if "registers" in state:
        state["distillation_token"] = state.pop("registers")
    row = state.pop("distillation_position_table", torch.zeros_like(table[:, :1]))
    state["position_embedding.table"] = torch.cat([table[:, :1], row, table[:, 1:]], dim=1)


def _as_dinov2(state: State, width: int, depth: int, variant: str) -> None:
    """DINOv2 always has layer scale, and a classifier that sees the mean too: ones and zeros change nothing."""
    like = state["encoder.norm.weight"]
    for i in range(depth):
        for residual in ("residual1", "residual2"):
            state.setdefault(f"encoder.blocks.{i}.{residual}.scale", torch.ones_like(like))
    if variant == "plain" and "head.out.weight" in state:
        weight = state["head.out.weight"]
        state["head.out.weight"] = torch.cat([weight, weight.new_zeros(weight.shape[0], width)], dim=1)


def _their_preprocessing(checkpoint: Checkpoint, notes: list[str]) -> dict[str, Any]:
    said = checkpoint.preprocessing
    height, width = said.image_size
    if height != width:
        notes.append(
            "transformers scales the shorter side alone: for images that are not square its crop differs a little"
        )
    return {
        "image_processor_type": "BitImageProcessor",  # the one that keeps the proportions
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": max(int(height / said.crop), int(width / said.crop))},
        "resample": {theirs: number for number, theirs in RESAMPLE.items()}[said.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(said.mean),
        "image_std": list(said.std),
    }
