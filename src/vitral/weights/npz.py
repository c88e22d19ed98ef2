"""Google's .npz: vision_transformer's and AugReg's files (class token), and big_vision's (mean, MAP head)."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.weights.checkpoint import Asked, Checkpoint, Written, refuse
from vitral.weights.files import Found
from vitral.weights.key_mapping import Names, State, fold_layer_scale, join_maps, split_maps, with_qkv_bias
from vitral.weights.preprocessing import HALF, preprocessing, seen
from vitral.weights.reading import architecture, choose_heads, finish, place_rows, say_size
from vitral.weights.writing import writable

BLOCK = "Transformer/encoderblock_{i}"
# vision_transformer's spelling, then big_vision's.
ATTENTION = (f"{BLOCK}/MultiHeadDotProductAttention_1", f"{BLOCK}/MultiHeadDotProductAttention_0")
MLP = (f"{BLOCK}/MlpBlock_3", f"{BLOCK}/MlpBlock_0")
NORM2 = (f"{BLOCK}/LayerNorm_2", f"{BLOCK}/LayerNorm_1")
POOL, POOL_ATTENTION = "MAPHead_0", "MAPHead_0/MultiHeadDotProductAttention_0"


def _both(folders: tuple[str, ...] | str, leaf: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{leaf}" for folder in ((folders,) if isinstance(folders, str) else folders))


NAMES = Names(
    {
        "patch_embedding.project.weight": "embedding/kernel",
        "patch_embedding.project.bias": "embedding/bias",
        "class_token.token": "cls",
        "position_embedding.table": ("Transformer/posembed_input/pos_embedding", "pos_embedding"),
        "encoder.blocks.{i}.norm1.weight": f"{BLOCK}/LayerNorm_0/scale",
        "encoder.blocks.{i}.norm1.bias": f"{BLOCK}/LayerNorm_0/bias",
        "encoder.blocks.{i}.attention.q.weight": _both(ATTENTION, "query/kernel"),
        "encoder.blocks.{i}.attention.q.bias": _both(ATTENTION, "query/bias"),
        "encoder.blocks.{i}.attention.k.weight": _both(ATTENTION, "key/kernel"),
        "encoder.blocks.{i}.attention.k.bias": _both(ATTENTION, "key/bias"),
        "encoder.blocks.{i}.attention.v.weight": _both(ATTENTION, "value/kernel"),
        "encoder.blocks.{i}.attention.v.bias": _both(ATTENTION, "value/bias"),
        "encoder.blocks.{i}.attention.project.weight": _both(ATTENTION, "out/kernel"),
        "encoder.blocks.{i}.attention.project.bias": _both(ATTENTION, "out/bias"),
        "encoder.blocks.{i}.norm2.weight": _both(NORM2, "scale"),
        "encoder.blocks.{i}.norm2.bias": _both(NORM2, "bias"),
        "encoder.blocks.{i}.mlp.expand.weight": _both(MLP, "Dense_0/kernel"),
        "encoder.blocks.{i}.mlp.expand.bias": _both(MLP, "Dense_0/bias"),
        "encoder.blocks.{i}.mlp.contract.weight": _both(MLP, "Dense_1/kernel"),
        "encoder.blocks.{i}.mlp.contract.bias": _both(MLP, "Dense_1/bias"),
        "encoder.norm.weight": "Transformer/encoder_norm/scale",
        "encoder.norm.bias": "Transformer/encoder_norm/bias",
        "attention_pooling.probe": f"{POOL}/probe",
        "attention_pooling.q.weight": f"{POOL_ATTENTION}/query/kernel",
        "attention_pooling.q.bias": f"{POOL_ATTENTION}/query/bias",
        "attention_pooling.k.weight": f"{POOL_ATTENTION}/key/kernel",
        "attention_pooling.k.bias": f"{POOL_ATTENTION}/key/bias",
        "attention_pooling.v.weight": f"{POOL_ATTENTION}/value/kernel",
        "attention_pooling.v.bias": f"{POOL_ATTENTION}/value/bias",
        "attention_pooling.project.weight": f"{POOL_ATTENTION}/out/kernel",
        "attention_pooling.project.bias": f"{POOL_ATTENTION}/out/bias",
        "attention_pooling.norm.weight": f"{POOL}/LayerNorm_0/scale",
        "attention_pooling.norm.bias": f"{POOL}/LayerNorm_0/bias",
        "attention_pooling.mlp.expand.weight": f"{POOL}/MlpBlock_0/Dense_0/kernel",
        "attention_pooling.mlp.expand.bias": f"{POOL}/MlpBlock_0/Dense_0/bias",
        "attention_pooling.mlp.contract.weight": f"{POOL}/MlpBlock_0/Dense_1/kernel",
        "attention_pooling.mlp.contract.bias": f"{POOL}/MlpBlock_0/Dense_1/bias",
        "head.hidden.weight": "pre_logits/kernel",
        "head.hidden.bias": "pre_logits/bias",
        "head.out.weight": "head/kernel",
        "head.out.bias": "head/bias",
    }
)
INTO_HEADS = r".*attention(_pooling)?\.[qkv]\.(weight|bias)"  # D (h d)
OUT_OF_HEADS = r".*attention(_pooling)?\.project\.weight"  # (h d) D


def to_vitral(found: Found, asked: Asked) -> Checkpoint:
    notes: list[str] = []
    tensors = _unstacked(_ours_alone(found.tensors, notes))
    query = next((tensors[name] for name in tensors if re.search(r"/query/kernel$", name)), None)
    said = query.shape[1] if query is not None and query.ndim == 3 else None  # D h d
    state, unknown = NAMES.read(tensors)
    kernel = state["patch_embedding.project.weight"]
    if kernel.ndim != 4 or kernel.shape[0] != kernel.shape[1]:
        raise refuse(found.where, f"its patches are not squares: embedding/kernel is {tuple(kernel.shape)}")
    patch, _, channels, width = kernel.shape
    for name in state:
        state[name] = _from_flax(name, state[name])
    join_maps(state)
    pooling = "attention" if "attention_pooling.probe" in state else "class" if "class_token.token" in state else "mean"
    table = state.get("position_embedding.table")
    if table is None:
        if asked.image_size is None:
            raise VitralError(f"{found.where} has no position table (fixed sines and cosines)", say_size(found.where))
        positions, size = "sincos", asked.image_size
    else:
        front, size = place_rows(table.shape[1], [1, 0] if pooling == "class" else [0], patch, asked, None, found.where)
        positions = "learned"
        if pooling == "class" and front == 0:  # big_vision puts the class token in front after the positions
            state["position_embedding.table"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    notes.append("GELU by its tanh form, norm eps 1e-06: as Flax computes them")
    config = architecture(
        found,
        state,
        NAMES.theirs,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=choose_heads(width, asked, said, "the shape of query/kernel", notes, found.where),
        pooling=pooling,
        positions=positions,
        gelu="tanh",
        norm_eps=1e-6,
    )
    pixels = preprocessing(size, channels, HALF, 0.875, "bilinear", notes)
    notes.append(f"preprocessing ASSUMED, big_vision's usual: {seen(pixels)}")
    return finish("npz", found, state, unknown, config, NAMES.theirs, pixels, notes)


def _ours_alone(tensors: State, notes: list[str]) -> State:
    """The model's part of a training's file (params/…, opt/target/…), or of an image-and-text model (params/img/…)."""
    prefix = next(name for name in tensors if name.endswith("embedding/kernel")).removesuffix("embedding/kernel")
    kept = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    if prefix:
        notes.append(f"taken from {prefix}" + (f"; {len(tensors)} tensors elsewhere left out" if tensors else ""))
    tensors.clear()
    return kept


def _unstacked(tensors: State) -> State:
    """big_vision's scanned encoder: the blocks of all layers lie one above the other."""
    for name in [name for name in tensors if name.startswith("Transformer/encoderblock/")]:
        for i, layer in enumerate(tensors.pop(name)):
            tensors[name.replace("encoderblock/", f"encoderblock_{i}/")] = layer
    return tensors


def _from_flax(name: str, tensor: Tensor) -> Tensor:
    """Flax multiplies from the right: kernels are in × out, with heads as an axis of their own."""
    if name == "patch_embedding.project.weight":
        return tensor.permute(3, 2, 0, 1).flatten(1).contiguous()  # p q c d -> d (c p q)
    if re.fullmatch(INTO_HEADS, name):
        tensor = tensor.flatten(-2)
    elif re.fullmatch(OUT_OF_HEADS, name) and tensor.ndim == 3:
        tensor = tensor.flatten(0, 1)
    return tensor.mT.contiguous() if tensor.ndim == 2 else tensor.contiguous()


def _to_flax(name: str, tensor: Tensor, config: ViTConfig) -> Tensor:
    if name == "patch_embedding.project.weight":
        return tensor.unflatten(1, (config.channels, config.patch_size, -1)).permute(2, 3, 1, 0)
    tensor = tensor.mT if tensor.ndim == 2 else tensor
    if re.fullmatch(INTO_HEADS, name):
        return tensor.unflatten(-1, (config.heads, -1))
    return tensor.unflatten(0, (config.heads, -1)) if re.fullmatch(OUT_OF_HEADS, name) else tensor


def from_vitral(checkpoint: Checkpoint) -> Written:
    config = checkpoint.config
    state, notes = writable(
        checkpoint, "Google's npz", poolings=("class", "mean", "attention"), hidden=True, norm_eps=1e-6, gelu="tanh"
    )
    if config.layer_scale is not None:
        fold_layer_scale(state)
        notes.append("layer scale is multiplied into the projections before it")
    with_qkv_bias(state)
    split_maps(state)
    big_vision = config.pooling != "class"  # vision_transformer's layout has the class token, big_vision's the others
    if config.positions == "sincos" and big_vision:
        del state["position_embedding.table"]
    state = {name: _to_flax(name, tensor, config) for name, tensor in state.items()}
    tensors = NAMES.write(state, int(big_vision))
    if big_vision:
        tensors = {f"params/{name}": tensor for name, tensor in tensors.items()}
    notes.append(f"an npz holds no preprocessing: {seen(checkpoint.preprocessing)}")
    return Written(tensors=tensors, notes=notes)
