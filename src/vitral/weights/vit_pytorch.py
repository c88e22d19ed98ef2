"""lucidrains' vit-pytorch: ViT and SimpleViT, with their layer norms around the patch embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.weights.checkpoint import Asked, Checkpoint, Written, refuse
from vitral.weights.files import Found
from vitral.weights.key_mapping import Names, fold_layer_scale
from vitral.weights.preprocessing import HALF, preprocessing, seen
from vitral.weights.reading import architecture, choose_heads, finish, place_rows, say_size
from vitral.weights.writing import writable

NAMES = Names(
    {
        "patch_embedding.norm_pixels.{leaf}": "to_patch_embedding.1.{leaf}",
        "patch_embedding.project.{leaf}": "to_patch_embedding.2.{leaf}",
        "patch_embedding.norm.{leaf}": "to_patch_embedding.3.{leaf}",
        "class_token.token": "cls_token",
        "position_embedding.table": "pos_embedding",
        "encoder.blocks.{i}.norm1.{leaf}": "transformer.layers.{i}.0.norm.{leaf}",
        "encoder.blocks.{i}.attention.qkv.{leaf}": "transformer.layers.{i}.0.to_qkv.{leaf}",
        # ViT's, then SimpleViT's
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


def to_vitral(found: Found, asked: Asked) -> Checkpoint:
    notes: list[str] = []
    simple = "pos_embedding" not in found.tensors
    state, unknown = NAMES.read(found.tensors)
    project, qkv = state.get("patch_embedding.project.weight"), state.get("encoder.blocks.0.attention.qkv.weight")
    if project is None or project.ndim != 2 or qkv is None:
        raise VitralError(
            f"{found.where} is not a whole vit-pytorch ViT or SimpleViT",
            "missing: to_patch_embedding.2.weight or to_qkv",
        )
    width, inner = project.shape[0], qkv.shape[0] // 3
    if inner != width:
        raise refuse(found.where, f"its heads together are {inner} wide, the model {width}")
    channels, patch = _patch(project.shape[1], found.where)
    for name in ("project.weight", "norm_pixels.weight", "norm_pixels.bias"):
        if f"patch_embedding.{name}" in state:
            state[f"patch_embedding.{name}"] = _channels_first(state[f"patch_embedding.{name}"], channels, patch)
    if simple:
        for name in [name for name in state if name.endswith("attention.project.weight")]:
            state.setdefault(name.replace("weight", "bias"), state[name].new_zeros(width))
        if asked.image_size is None:
            raise VitralError(f"{found.where}: a SimpleViT's tensors do not tell its image size", say_size(found.where))
        size, pooling = asked.image_size, "mean"
    else:
        token = state.pop("class_token.token", torch.empty(0, width)).reshape(1, -1, width)
        pooling = "class" if token.shape[1] else "mean"
        if token.shape[1]:
            state["class_token.token"] = token
            notes.append("pooling: class token, ASSUMED: earlier versions have one with pool='mean' too")
        table = state["position_embedding.table"].reshape(1, -1, width)
        state["position_embedding.table"] = table
        _, size = place_rows(table.shape[1], [token.shape[1]], patch, asked, None, found.where)

    def their_name(name: str) -> str | None:
        return NAMES.theirs(name, int(simple))

    config = architecture(
        found,
        state,
        their_name,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=choose_heads(width, asked, None, "", notes, found.where),
        pooling=pooling,
        positions="sincos" if simple else "learned",
        norm_eps=1e-5,  # PyTorch's own
    )
    pixels = preprocessing(size, channels, HALF, 1.0, "bilinear", notes)
    notes.append(f"preprocessing ASSUMED, vit-pytorch leaves it to its users: {seen(pixels)}")
    return finish("vit-pytorch", found, state, unknown, config, their_name, pixels, notes, variant="patch-norm")


def _patch(numbers: int, where: str) -> tuple[int, int]:
    """Channels and side of patches with so many numbers: 3·P² is never a square, so that the two cannot be confused."""
    for channels in (3, 1):
        side = math.isqrt(numbers // channels)
        if channels * side**2 == numbers:
            return channels, side
    raise refuse(where, f"patches of {numbers} numbers are not squares with 1 or 3 channels")


def _channels_first(tensor: Tensor, channels: int, patch: int) -> Tensor:
    """… (p q c) -> … (c p q)."""
    return tensor.unflatten(-1, (patch, patch, channels)).movedim(-1, -3).flatten(-3).contiguous()


def _channels_last(tensor: Tensor, channels: int, patch: int) -> Tensor:
    return tensor.unflatten(-1, (channels, patch, patch)).movedim(-3, -1).flatten(-3).contiguous()


def from_vitral(checkpoint: Checkpoint) -> Written:
    config = checkpoint.config
    simple = config.positions == "sincos" and config.pooling == "mean"
    state, notes = writable(
        checkpoint,
        "vit-pytorch",
        variants=("patch-norm",),
        poolings=("class", "mean"),
        norm_eps=1e-5,
        gelu="exact",
    )
    if config.channels not in (1, 3) or config.heads == 1:
        raise VitralError(
            f"vit-pytorch cannot hold this model: {config.channels} channels, {config.heads} heads",
            "it can with 1 or 3 channels and more than one head",
        )
    if config.layer_scale is not None:
        fold_layer_scale(state)
        notes.append("layer scale is multiplied into the projections before it")
    unbiased = ["attention.qkv.bias"] + (["attention.project.bias"] if simple else [])
    for name in [name for name in state if name.endswith(tuple(unbiased))]:
        if state.pop(name).any():
            raise VitralError(f"vit-pytorch cannot hold this model: it has no {name}", "--to vitral can")
    for name in ("project.weight", "norm_pixels.weight", "norm_pixels.bias"):
        tensor = state[f"patch_embedding.{name}"]
        state[f"patch_embedding.{name}"] = _channels_last(tensor, config.channels, config.patch_size)
    if simple:
        del state["position_embedding.table"]
    else:
        state["class_token.token"] = state.get("class_token.token", torch.empty(1, 0, config.width))[0]
        state["position_embedding.table"] = state["position_embedding.table"][0]
    notes.append(
        f"a vit-pytorch file does not say: heads {config.heads}, image size {config.image_size}; "
        f"preprocessing {seen(checkpoint.preprocessing)}"
    )
    return Written(tensors=NAMES.write(state, int(simple)), notes=notes)
