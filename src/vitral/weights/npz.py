"""Google's .npz formats: vision_transformer and AugReg (class token), and big_vision (mean pooling, MAP head)."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint, ConvertedModel, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, State, add_zero_qkv_bias, fuse_qkv, split_qkv
from vitral.weights.preprocessing import HALF, describe_preprocessing
from vitral.weights.reading import PATCH_KERNEL, build_checkpoint, infer_config, rename_tensors
from vitral.weights.writing import exportable_state, fold_unsupported_layer_scale, resampling_notes

BLOCK = "Transformer/encoderblock_{i}"
# Spelling of vision_transformer, then of big_vision.
ATTENTION = (f"{BLOCK}/MultiHeadDotProductAttention_1", f"{BLOCK}/MultiHeadDotProductAttention_0")
MLP = (f"{BLOCK}/MlpBlock_3", f"{BLOCK}/MlpBlock_0")
NORM2 = (f"{BLOCK}/LayerNorm_2", f"{BLOCK}/LayerNorm_1")
POOL, POOL_ATTENTION = "MAPHead_0", "MAPHead_0/MultiHeadDotProductAttention_0"


def _spellings(modules: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"{module}/{leaf}" for module in modules)


KEYS = KeyMapping(
    {
        "patch_embedding.project.weight": "embedding/kernel",
        "patch_embedding.project.bias": "embedding/bias",
        "class_token.token": "cls",
        "position_embedding.table": ("Transformer/posembed_input/pos_embedding", "pos_embedding"),
        "encoder.blocks.{i}.norm1.weight": f"{BLOCK}/LayerNorm_0/scale",
        "encoder.blocks.{i}.norm1.bias": f"{BLOCK}/LayerNorm_0/bias",
        "encoder.blocks.{i}.attention.q.weight": _spellings(ATTENTION, "query/kernel"),
        "encoder.blocks.{i}.attention.q.bias": _spellings(ATTENTION, "query/bias"),
        "encoder.blocks.{i}.attention.k.weight": _spellings(ATTENTION, "key/kernel"),
        "encoder.blocks.{i}.attention.k.bias": _spellings(ATTENTION, "key/bias"),
        "encoder.blocks.{i}.attention.v.weight": _spellings(ATTENTION, "value/kernel"),
        "encoder.blocks.{i}.attention.v.bias": _spellings(ATTENTION, "value/bias"),
        "encoder.blocks.{i}.attention.project.weight": _spellings(ATTENTION, "out/kernel"),
        "encoder.blocks.{i}.attention.project.bias": _spellings(ATTENTION, "out/bias"),
        "encoder.blocks.{i}.norm2.weight": _spellings(NORM2, "scale"),
        "encoder.blocks.{i}.norm2.bias": _spellings(NORM2, "bias"),
        "encoder.blocks.{i}.mlp.expand.weight": _spellings(MLP, "Dense_0/kernel"),
        "encoder.blocks.{i}.mlp.expand.bias": _spellings(MLP, "Dense_0/bias"),
        "encoder.blocks.{i}.mlp.contract.weight": _spellings(MLP, "Dense_1/kernel"),
        "encoder.blocks.{i}.mlp.contract.bias": _spellings(MLP, "Dense_1/bias"),
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
HEAD_INPUT_KEYS = r".*attention(_pooling)?\.[qkv]\.(weight|bias)"  # kernels (D, heads, head_dim) in Flax
HEAD_OUTPUT_KEYS = r".*attention(_pooling)?\.project\.weight"  # kernels (heads, head_dim, D) in Flax


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions) -> Checkpoint:
    reading = Interpretation(source=raw.source, options=options)
    selected = _unstack_blocks(_select_image_model(raw.tensors, reading.notes))
    query = next((selected[name] for name in selected if re.search(r"/query/kernel$", name)), None)
    stored_heads = query.shape[1] if query is not None and query.ndim == 3 else None  # (D, heads, head_dim)
    tensors = rename_tensors("npz", raw, selected, KEYS)
    state = tensors.state
    kernel = state[PATCH_KERNEL]
    if kernel.ndim != 4 or kernel.shape[0] != kernel.shape[1]:
        raise unsupported_model_error(
            raw.source, f"patches are not square: embedding/kernel has shape {tuple(kernel.shape)}"
        )
    patch, _, channels, width = kernel.shape
    for key in state:
        state[key] = _from_flax(key, state[key])
    fuse_qkv(state)
    pooling = "attention" if "attention_pooling.probe" in state else "class" if "class_token.token" in state else "mean"
    positions, size = _read_positions(state, pooling, patch, reading)
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=reading.heads(width, stored_heads, "the shape of query/kernel"),
        pooling=pooling,
        positions=positions,
        activation=options.activation or "gelu_tanh",  # Flax's gelu
        norm_eps=options.norm_eps or 1e-6,  # Flax's default
        position_resampling="bilinear-corners",
    )
    # big_vision's default
    preprocessing = reading.preprocessing(size, channels, mean_std=HALF, crop=0.875, interpolation="bilinear")
    return build_checkpoint(tensors, config, preprocessing, reading)


def _read_positions(state: State, pooling: str, patch: int, reading: Interpretation) -> tuple[str, tuple[int, int]]:
    """Kind of the position embedding, and the image size."""
    table = state.get("position_embedding.table")
    if table is None:
        if reading.options.image_size is None:
            raise VitralError(
                f"{reading.source} has no position table (fixed sincos)", reading.missing_hint("--image-size H W")
            )
        return "sincos", reading.options.image_size
    prefix_options = [1, 0] if pooling == "class" else [0]
    num_prefix, size = reading.position_table(table.shape[1], prefix_options, patch)
    if pooling == "class" and num_prefix == 0:  # big_vision prepends the class token after adding the positions
        state["position_embedding.table"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    return "learned", size


def _select_image_model(tensors: State, notes: list[str]) -> State:
    """The model's part of a training checkpoint (params/, opt/target/) or of an image-text model (params/img/).

    Empties `tensors`.
    """
    prefix = next(name for name in tensors if name.endswith("embedding/kernel")).removesuffix("embedding/kernel")
    selected = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    if prefix:
        notes.append(f"used {prefix}" + (f"; ignored {len(tensors)} other tensors" if tensors else ""))
    tensors.clear()
    return selected


def _unstack_blocks(tensors: State) -> State:
    """Split the stacked blocks of big_vision's scanned encoder."""
    for name in [name for name in tensors if name.startswith("Transformer/encoderblock/")]:
        for i, layer in enumerate(tensors.pop(name)):
            tensors[name.replace("encoderblock/", f"encoderblock_{i}/")] = layer
    return tensors


def _from_flax(key: str, tensor: Tensor) -> Tensor:
    """Flax kernels are (in, out), with a separate axis for the heads; PyTorch weights are (out, in)."""
    if key == PATCH_KERNEL:
        return tensor.permute(3, 2, 0, 1).flatten(1).contiguous()  # (P, P, C, D) to (D, C·P·P)
    if re.fullmatch(HEAD_INPUT_KEYS, key):
        tensor = tensor.flatten(-2)
    elif re.fullmatch(HEAD_OUTPUT_KEYS, key) and tensor.ndim == 3:
        tensor = tensor.flatten(0, 1)
    return tensor.mT.contiguous() if tensor.ndim == 2 else tensor.contiguous()


def _to_flax(key: str, tensor: Tensor, config: ViTConfig) -> Tensor:
    if key == PATCH_KERNEL:
        return tensor.unflatten(1, (config.channels, config.patch_size, -1)).permute(2, 3, 1, 0)
    tensor = tensor.mT if tensor.ndim == 2 else tensor
    if re.fullmatch(HEAD_INPUT_KEYS, key):
        return tensor.unflatten(-1, (config.heads, -1))
    return tensor.unflatten(0, (config.heads, -1)) if re.fullmatch(HEAD_OUTPUT_KEYS, key) else tensor


def from_vitral(checkpoint: Checkpoint) -> ConvertedModel:
    config = checkpoint.config
    state, notes = exportable_state(
        checkpoint,
        "npz",
        poolings=("class", "mean", "attention"),
        hidden_head=True,
        norm_eps=1e-6,
        activation="gelu_tanh",
    )
    notes += resampling_notes(config, "npz", "bilinear-corners")
    notes += fold_unsupported_layer_scale(checkpoint, state)
    add_zero_qkv_bias(state)
    split_qkv(state)
    is_big_vision = config.pooling != "class"  # class-token models use the layout of vision_transformer
    if config.positions == "sincos" and is_big_vision:
        del state["position_embedding.table"]
    state = {key: _to_flax(key, tensor, config) for key, tensor in state.items()}
    tensors = KEYS.rename_from_vitral(state, int(is_big_vision))
    if is_big_vision:
        tensors = {f"params/{name}": tensor for name, tensor in tensors.items()}
    notes.append(f"an npz file does not contain the preprocessing: {describe_preprocessing(checkpoint.preprocessing)}")
    return ConvertedModel(tensors=tensors, notes=notes)
