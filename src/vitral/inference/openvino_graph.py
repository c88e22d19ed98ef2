"""A ViT as an OpenVINO graph: patches with pixels from 0 to 255 (B, N, CPP) to the encoder's output tokens (B, P, D).

The weights are those of the PyTorch CPU engine, with normalisation and scales folded in. P is the number of tokens that
pooling reads: the last block computes only those, and neither keys nor values. For int8, the inputs of the linear
layers are quantized to the calibrated ranges.

Shapes as in vit.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.inference.folded_weights import (
    Int8Weights,
    Linear,
    Norm,
    fold_int8_weights,
    fold_norm,
    fold_patch_embedding,
    fold_weights,
)
from vitral.inference.int8_calibration import ActivationRanges
from vitral.models.vit import ClassificationHead, EncoderBlock, PatchEmbedding, QuickGELU, RopeTable, SwiGLU, ViT

Node = Any  # ov.Node
ZERO_POINT = 128  # of layer norms and attention outputs, whose scale is 1
PlainNorm = tuple[None, None, float]  # a layer norm without weight and bias: epsilon


def build_graph(
    model: ViT,
    preprocessing: Preprocessing,
    num_outputs: int | None,
    ranges: ActivationRanges | None = None,
    batch_size: int | None = None,
    row_multiple: int = 1,
) -> ov.Model:
    """Build the graph, in int8 if `ranges` are given; `num_outputs` is P, None for all tokens.

    `batch_size` is B, None for any. A fixed one saves 0.3 ms per call, in which OpenVINO derives shapes. Linear layers
    compute a multiple of `row_multiple` rows per image: OpenVINO divides 198 rows evenly among two threads, not 197.
    """
    encoder = model.encoder
    rope = None if encoder.rotary_position is None else encoder.rotary_position(model.config.grid)
    patches = ops.parameter([batch_size or -1, _num_patches(model), _patch_values(model)], ov.Type.f32, name="patches")
    z, num_tokens = embed(patches, model, preprocessing, row_multiple if rope is None else 1)
    last = len(encoder.blocks) - 1
    for index, module in enumerate(encoder.blocks):
        block, count = cast(EncoderBlock, module), num_outputs if index == last else None
        if count is not None and rope is None and isinstance(block.attention.norm_k, nn.Identity):
            z = encode_outputs(_drop_padding(z, num_tokens), block, count)
            continue
        linears: FloatLinears | Int8Linears
        linears = FloatLinears(block) if ranges is None else Int8Linears(block, f"blocks.{index}.", ranges)
        z = encode(z, block, linears, rope, count, num_tokens)
    z = z if num_outputs is not None else _drop_padding(z, num_tokens)
    return ov.Model([layer_norm(z, _norm(encoder.norm))], [patches], "vit")


def build_head(head: ClassificationHead) -> ov.Model:
    """Features (B, D) to logits (B, K)."""
    features = ops.parameter([-1, head.out.in_features], ov.Type.f32, name="features")
    hidden = features if head.hidden is None else ops.tanh(linear(features, (head.hidden.weight, head.hidden.bias)))
    return ov.Model([linear(hidden, (head.out.weight, head.out.bias))], [features], "head")


def cut_patches(images_BCHW: Tensor, patch_size: int) -> np.ndarray[Any, Any]:
    """Patches (B, N, CPP) in fp32. In numpy, which starts no threads that would keep the cores from OpenVINO's."""
    B, C, H, W = images_BCHW.shape
    P = patch_size
    patches = images_BCHW.numpy().reshape(B, C, H // P, P, W // P, P).transpose(0, 2, 4, 1, 3, 5)
    return patches.astype(np.float32, order="C").reshape(B, -1, C * P * P)


def embed(patches: Node, model: ViT, preprocessing: Preprocessing, row_multiple: int) -> tuple[Node, int]:
    """z0 (B, T, D), followed by rows of zeros up to a multiple of `row_multiple`; and T."""
    num_patches = _num_patches(model)
    base_TD = constant_tokens(model)
    assert base_TD is not None, "checked before a graph is built"
    weight, bias = fold_patch_embedding(model.patch_embedding, preprocessing)
    tokens = linear(patches, (weight, base_TD[None, -num_patches:] + bias))

    def repeat(rows_RD: Tensor) -> list[Node]:
        """The same rows for each image of the batch."""
        if not len(rows_RD):
            return []
        batch = ops.gather(ops.shape_of(patches), _shape(0), _scalar(0))
        return [ops.broadcast(_constant(rows_RD[None]), ops.concat([batch, _shape(*rows_RD.shape)], axis=0))]

    padding = base_TD.new_zeros(-len(base_TD) % row_multiple, model.config.width)
    parts = [*repeat(base_TD[:-num_patches]), tokens, *repeat(padding)]
    z = parts[0] if len(parts) == 1 else ops.concat(parts, axis=1)
    return layer_norm(z, _norm(model.pre_norm)), len(base_TD)


def _num_patches(model: ViT) -> int:
    rows, columns = model.config.grid
    return rows * columns


def _patch_values(model: ViT) -> int:
    return int(model.config.channels * model.config.patch_size**2)


class _GivenTokens(nn.Module):
    """Patch embedding that returns given tokens."""

    def __init__(self, tokens_BND: Tensor) -> None:
        super().__init__()
        self.tokens = tokens_BND

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.tokens


@torch.inference_mode()
def constant_tokens(model: ViT) -> Tensor | None:
    """What `embed` adds to the patches, (T, D): prefix tokens and positions. None if it does more than adding.

    Found by calling `embed` itself, without the final norm.
    """
    config, num_patches = model.config, _num_patches(model)
    images = torch.zeros(1, config.channels, *config.image_size)

    def embed_tokens(tokens_BND: Tensor) -> Tensor:
        without_norm = copy.copy(model)
        without_norm._modules = dict(model._modules)
        without_norm.patch_embedding = cast(PatchEmbedding, _GivenTokens(tokens_BND))
        without_norm.pre_norm = nn.Identity()
        return without_norm.embed(images, config.grid)[0]

    patches = torch.randn(1, num_patches, config.width, generator=torch.Generator().manual_seed(0))
    base_TD, tokens_TD = embed_tokens(torch.zeros_like(patches)), embed_tokens(patches)
    if len(base_TD) < num_patches or not torch.equal(tokens_TD[:-num_patches], base_TD[:-num_patches]):
        return None
    return base_TD if torch.allclose(tokens_TD[-num_patches:], base_TD[-num_patches:] + patches[0]) else None


def encode(
    z: Node,
    block: EncoderBlock,
    linears: FloatLinears | Int8Linears,
    rope: RopeTable | None,
    num_outputs: int | None,
    num_tokens: int,
) -> Node:
    """One encoder block; returns the first `num_outputs` tokens of each image, all if None.

    Rows after `num_tokens` are padding, which no token attends to.
    """
    attention = block.attention
    normed = linears.quantize(layer_norm(z, linears.norm1))
    query_input = normed
    if num_outputs is not None:
        z, query_input = select_first(z, num_outputs), _first(normed, num_outputs)

    def split_heads(x: Node, heads: int = attention.heads) -> Node:  # b t (h d) -> b h t d
        return ops.transpose(ops.reshape(x, _shape(0, 0, heads, -1), True), _shape(0, 2, 1, 3))

    q = split_heads(linears.qkv(query_input, 0))
    if _num_rows(z) == num_tokens or num_outputs is not None:
        k, v = (split_heads(_drop_padding(linears.qkv(normed, part), num_tokens)) for part in (1, 2))
    else:  # one matmul for both: with several threads, each operation costs about 9 µs to start
        kv = split_heads(_drop_padding(linears.qkv(normed, 1, 3), num_tokens), 2 * attention.heads)
        k, v = ops.split(kv, _scalar(1), num_splits=2).outputs()
    if isinstance(attention.norm_q, nn.LayerNorm):
        d = attention.norm_q.normalized_shape[0]
        q, k = layer_norm(q, _norm(attention.norm_q)), layer_norm(k, _norm(attention.norm_k))
        q = ops.multiply(q, np.float32(d**-0.5))
    if rope is not None:
        q, k = apply_rope(q, rope if num_outputs is None else rope[:, :num_outputs]), apply_rope(k, rope)
    scores = ops.softmax(ops.matmul(q, k, False, True), axis=-1)
    out = ops.transpose(ops.matmul(scores, v, False, False), _shape(0, 2, 1, 3))
    out = ops.reshape(out, _shape(0, 0, -1), True)  # b h t d -> b t (h d)
    z = ops.add(z, linears.project(linears.quantize(out)))
    return linears.mlp(z, layer_norm(z, linears.norm2), _activation(block))


def encode_outputs(z: Node, block: EncoderBlock, num_outputs: int) -> Node:
    """The first `num_outputs` tokens of a block, computed without keys and values of the others.

    Scores are q·(K·x) = (q·K)·x, and the attention output is A·(V·x) = V·(A·x): two matmuls for each output token
    instead of two for each token. The bias of the keys adds the same to all scores of a query and has no effect. The
    linear layers are not in int8: with few tokens they take hardly any time.
    """
    heads, linears = block.attention.heads, FloatLinears(block)
    (weight, bias), D = linears.weights["qkv"], block.norm1.normalized_shape[0]
    query, key_hdD, value_hdD = (
        weight[:D],
        weight[D : 2 * D].view(1, heads, -1, D),
        weight[2 * D :].view(1, heads, -1, D),
    )
    normed = layer_norm(z, linears.norm1)
    q = ops.reshape(linear(_first(normed, num_outputs), (query, bias[:D])), _shape(0, 0, heads, -1), True)
    q = ops.matmul(ops.transpose(q, _shape(0, 2, 1, 3)), _constant(key_hdD), False, False)  # b h p D
    scores = ops.matmul(ops.reshape(q, _shape(0, -1, D), True), normed, False, True)  # b (h p) t
    attended = ops.matmul(ops.softmax(scores, axis=-1), normed, False, False)
    attended = ops.reshape(attended, _shape(0, heads, num_outputs, D), True)
    out = ops.transpose(ops.matmul(attended, _constant(value_hdD), False, True), _shape(0, 2, 1, 3))  # b p h d
    out = ops.add(ops.reshape(out, _shape(0, num_outputs, D), True), _constant(bias[2 * D :]))
    z = ops.add(select_first(z, num_outputs), linears.project(out))
    return linears.mlp(z, layer_norm(z, linears.norm2), _activation(block))


class FloatLinears:
    """Linear layers of a block in the precision that the graph is compiled for."""

    def __init__(self, block: EncoderBlock) -> None:
        self.weights = fold_weights(block)
        # Weight and bias of a layer norm are part of the linear layer after it.
        self.weights["qkv"] = fold_norm(block.norm1, self.weights["qkv"])
        self.weights["expand"] = fold_norm(block.norm2, self.weights["expand"])
        self.norm1: PlainNorm = (None, None, block.norm1.eps)
        self.norm2: PlainNorm = (None, None, block.norm2.eps)

    def quantize(self, x: Node) -> Node:
        return x

    def qkv(self, x: Node, first: int, end: int | None = None) -> Node:
        """Queries (part 0), keys (1) or values (2), or several of them up to part `end`."""
        return linear(x, _select_parts(self.weights["qkv"], first, end))

    def project(self, x: Node) -> Node:
        return linear(x, self.weights["project"])

    def mlp(self, z: Node, normed: Node, activation: Callable[[Node], Node]) -> Node:
        hidden = activation(linear(normed, self.weights["expand"]))
        return ops.add(z, linear(hidden, self.weights["contract"]))


class Int8Linears:
    """int8 linear layers of a block; attention in the precision that the graph is compiled for."""

    def __init__(self, block: EncoderBlock, prefix: str, ranges: ActivationRanges) -> None:
        self.weights: Int8Weights = fold_int8_weights(block, prefix, ranges)
        self.norm1, self.norm2 = self.weights.norm1, self.weights.norm2

    def quantize(self, x: Node) -> Node:
        return quantize_uint8(x, 1.0, ZERO_POINT)

    def qkv(self, x: Node, first: int, end: int | None = None) -> Node:
        return int8_linear(x, _select_parts(self.weights.qkv, first, end), 1.0, ZERO_POINT)

    def project(self, x: Node) -> Node:
        return int8_linear(x, self.weights.project, 1.0, ZERO_POINT)

    def mlp(self, z: Node, normed: Node, activation: Callable[[Node], Node]) -> Node:
        weights = self.weights
        hidden = activation(int8_linear(self.quantize(normed), weights.expand, 1.0, ZERO_POINT))
        hidden_range = weights.hidden_scale, weights.hidden_zero_point
        hidden = quantize_uint8(hidden, *hidden_range)
        if weights.outliers is not None:
            expand, bias, contract_FD = weights.outliers
            outliers = activation(linear(normed, (expand, bias)))
            z = ops.add(z, ops.matmul(outliers, _constant(contract_FD), False, False))
        return ops.add(z, int8_linear(hidden, weights.contract, *hidden_range))


def _select_parts(qkv: Linear, first: int, end: int | None) -> Linear:
    weight, bias = (torch.cat(values.chunk(3)[first : end or first + 1]) for values in qkv)
    return weight, bias


def linear(x: Node, layer: Linear) -> Node:
    weight_NK, bias_N = layer
    return ops.add(ops.matmul(x, _constant(weight_NK), False, True), _constant(bias_N))


def quantize_uint8(x: Node, scale: float, zero_point: int) -> Node:
    """round(x/scale) + zero_point, clamped to 0...255. OpenVINO computes it in an integer type.

    VNNI multiplies unsigned by signed values, so int8 would be shifted to this range in every GEMM.
    """
    low = -zero_point * scale
    limits = (np.float32(value) for value in (low, low + 255 * scale, 0, 255))
    return ops.fake_quantize(x, *limits, levels=256)


def int8_linear(x: Node, layer: Linear, scale: float, zero_point: int) -> Node:
    """Linear layer on the result of `quantize_uint8`, with int8 weights and one scale per output row.

    The zero point of x is part of the bias.
    """
    weight_NK, bias_N = layer
    scales = (weight_NK.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-12)
    quantized = (weight_NK / scales).round()
    offsets_N = scale * zero_point * (quantized.double() * scales).sum(dim=1)
    weight = ops.multiply(ops.convert(_constant(quantized.to(torch.int8)), ov.Type.f32), _constant(scale * scales))
    return ops.add(ops.matmul(x, weight, False, True), _constant((bias_N - offsets_N).float()))


def layer_norm(x: Node, norm: Norm | PlainNorm | None) -> Node:
    if norm is None:
        return x
    weight, bias, eps = norm
    normed = ops.mvn(x, _shape(-1), normalize_variance=True, eps=eps, eps_mode="inside_sqrt")
    if weight is None or bias is None:
        return normed
    return ops.add(ops.multiply(normed, _constant(weight)), _constant(bias))


def apply_rope(x: Node, rope: RopeTable) -> Node:
    cos, sin = (_constant(table) for table in rope)
    a, b = ops.split(x, _scalar(-1), num_splits=2).outputs()
    rotated = (
        ops.subtract(ops.multiply(a, cos), ops.multiply(b, sin)),
        ops.add(ops.multiply(a, sin), ops.multiply(b, cos)),
    )
    return ops.concat(list(rotated), axis=-1)


def _swiglu(x: Node) -> Node:
    gate, value = ops.split(x, _scalar(-1), num_splits=2).outputs()
    return ops.multiply(ops.swish(gate), value)


ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "gelu": lambda x: ops.gelu(x, "erf"),
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "quick_gelu": lambda x: ops.swish(x, np.float32(1.702)),
    "relu": ops.relu,
    "swiglu": _swiglu,
}


def activation_name(activation: nn.Module) -> str | None:
    """Key of ACTIVATIONS, or None for another activation."""
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return {QuickGELU: "quick_gelu", nn.ReLU: "relu", SwiGLU: "swiglu"}.get(type(activation))


def _activation(block: EncoderBlock) -> Callable[[Node], Node]:
    return ACTIVATIONS[activation_name(block.mlp.activation) or ""]


def _norm(norm: nn.Module) -> Norm | None:
    return (norm.weight.detach(), norm.bias.detach(), norm.eps) if isinstance(norm, nn.LayerNorm) else None


def select_first(z: Node, count: int) -> Node:
    """The first tokens, by a matmul, which is exact.

    OpenVINO keeps additions in fp32 that no matmul separates from the output. For the few tokens after this one that
    costs nothing, for all tokens of all blocks a twentieth of the time.
    """
    return ops.matmul(_constant(torch.eye(count, _num_rows(z))[None]), z, False, False)


def _first(x: Node, count: int) -> Node:
    return ops.slice(x, _shape(0), _shape(count), _shape(1), _shape(1))


def _num_rows(z: Node) -> int:
    return int((z if isinstance(z, ov.Output) else z.output(0)).get_partial_shape()[1].get_length())


def _drop_padding(x: Node, num_tokens: int) -> Node:
    """The first `num_tokens` rows of each image. With one image this is a view, not a copy."""
    padding = _num_rows(x) - num_tokens
    return ops.variadic_split(x, _scalar(1), _shape(num_tokens, padding)).output(0) if padding else x


def _constant(values: Tensor) -> Node:
    return ops.constant(values.detach().contiguous().numpy())


def _shape(*sizes: int) -> Node:
    return ops.constant(np.array(sizes, dtype=np.int64))


def _scalar(value: int) -> Node:
    return ops.constant(np.int64(value))
