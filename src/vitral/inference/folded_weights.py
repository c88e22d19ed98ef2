"""Weights with all scales folded in, for the CPU engines.

- Mean and standard deviation are part of the patch embedding, which then reads uint8 pixels.
- The attention scale 1/√d is part of the query weights, and layer scale of the linear layer before it.
- For int8, a scale per input column is part of the preceding layer norm and of the following weights, so that columns
  with large values do not cost the others precision (SmoothQuant, arXiv 2211.10438).

Shapes as in vit.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.inference.int8_calibration import ActivationRanges
from vitral.models.vit import EncoderBlock, PatchEmbedding, QKVLinear

MAX_OUTLIERS = 8  # hidden columns that stay in fp32
OUTLIER_RATIO = 1.5  # they stay in fp32 if the largest exceeds the next column by this factor
HIDDEN_CLIP = 0.8  # share of the largest hidden value that int8 covers: finer steps reduce the error by a sixth (Ti/16)
SMOOTHING = 0.65  # exponent of the column magnitudes that move into W: errors a tenth smaller than with 0.5 (Ti/16)
Linear = tuple[Tensor, Tensor]  # weight (N, K) and bias (N,)
Norm = tuple[Tensor, Tensor, float]  # weight (D,), bias (D,) and epsilon of a layer norm


@dataclass(frozen=True, kw_only=True)
class Int8Weights:
    """fp32 weights of one block, to be rounded to int8 per output row.

    Layer norms and v return values in units of the int8 scales, from −128 to 127.
    """

    norm1: Norm
    qkv: Linear
    project: Linear
    norm2: Norm
    expand: Linear
    contract: Linear
    hidden_scale: float  # of the input of `contract`, as uint8
    hidden_zero_point: int
    outliers: tuple[Tensor, Tensor, Tensor] | None  # weight and bias of `expand`, columns of `contract` (F, D), in fp32


def fold_patch_embedding(embedding: PatchEmbedding, preprocessing: Preprocessing) -> Linear:
    """Weights for uint8 pixels: ((x/255 − mean)/std)·E + b = x·E' + b'."""
    mean, std = (
        (torch.tensor(values, dtype=torch.float64) * 255).repeat_interleave(embedding.patch_size**2)
        for values in (preprocessing.mean, preprocessing.std)
    )
    weight, own_bias = embedding.project.weight.detach().double(), embedding.project.bias
    bias = (0 if own_bias is None else own_bias.detach().double()) - weight @ (mean / std)
    return (weight / std).float(), bias.float()


def fold_weights(block: EncoderBlock) -> dict[str, Linear]:
    """fp32 copies of a block's weights and biases, with 1/√d and layer scale folded in."""
    attention, mlp = block.attention, block.mlp
    layers = {"qkv": attention.qkv, "project": attention.project, "expand": mlp.expand, "contract": mlp.contract}
    folded: dict[str, Linear] = {}
    for name, layer in layers.items():
        weight = layer.weight.detach().float().clone()
        masked = layer.masked_bias() if isinstance(layer, QKVLinear) else layer.bias
        bias = torch.zeros(len(weight)) if masked is None else masked.detach().float().clone()
        layer_scale = {"project": block.residual1.scale, "contract": block.residual2.scale}.get(name)
        if layer_scale is not None:
            weight, bias = weight * layer_scale.detach()[:, None], bias * layer_scale.detach()
        if name == "qkv" and isinstance(attention.norm_q, nn.Identity):
            D = weight.shape[1]
            weight[:D] *= (D // attention.heads) ** -0.5
            bias[:D] *= (D // attention.heads) ** -0.5
        folded[name] = weight, bias
    return folded


def fold_norm(norm: nn.LayerNorm, layer: Linear) -> Linear:
    """The linear layer after a layer norm, with the weight and bias of the norm folded in."""
    weight_NK, bias_N = layer
    return weight_NK * norm.weight.detach(), bias_N + weight_NK @ norm.bias.detach()


def fold_int8_weights(block: EncoderBlock, prefix: str, ranges: ActivationRanges) -> Int8Weights:
    """`prefix` is the name of the block in `ranges`, with a dot at the end."""
    weights = fold_weights(block)
    D = block.norm1.normalized_shape[0]
    qkv, qkv_bias = weights["qkv"]
    project, project_bias = weights["project"]
    # Softmax rows sum to one, so scaling the columns of v scales the columns of the attention output.
    v_scales = column_scales(ranges[prefix + "attention.project"], project)
    qkv[2 * D :] /= v_scales[:, None]
    qkv_bias[2 * D :] /= v_scales
    qkv_scales = column_scales(ranges[prefix + "attention.qkv"], qkv)
    expand, expand_bias = weights["expand"]
    expand_scales = column_scales(ranges[prefix + "mlp.expand"], expand)
    contract, contract_bias = weights["contract"]
    columns, low, high = split_outlier_columns(*ranges[prefix + "mlp.contract"])
    hidden_scale = (high - low) / 255
    outliers = None
    if len(columns):
        is_gated = len(expand) == 2 * contract.shape[1]  # SwiGLU: a hidden column is made from two rows
        rows = torch.cat([columns, columns + contract.shape[1]]) if is_gated else columns
        outliers = expand[rows] * expand_scales, expand_bias[rows], contract[:, columns].T.contiguous()
        contract = contract.index_fill(1, columns, 0.0)
    return Int8Weights(
        norm1=_scaled_norm(block.norm1, qkv_scales),
        qkv=(qkv * qkv_scales, qkv_bias),
        project=(project * v_scales, project_bias),
        norm2=_scaled_norm(block.norm2, expand_scales),
        expand=(expand * expand_scales, expand_bias),
        contract=(contract, contract_bias),
        hidden_scale=hidden_scale,
        hidden_zero_point=round(-low / hidden_scale),
        outliers=outliers,
    )


def column_scales(low_high_2K: Tensor, weight_NK: Tensor) -> Tensor:
    """int8 scales (K,) of the columns of x. The rest of their differences moves into W, which has a scale per row."""
    max_abs_K = low_high_2K.abs().amax(dim=0).clamp_min(1e-5)
    smoothing_K = max_abs_K**SMOOTHING / weight_NK.abs().amax(dim=0).clamp_min(1e-5) ** (1 - SMOOTHING)
    return smoothing_K * (max_abs_K / smoothing_K).amax() / 127


def split_outlier_columns(low_F: Tensor, high_F: Tensor) -> tuple[Tensor, float, float]:
    """Indices of the hidden columns to keep out of int8, and the range that int8 covers for the others.

    After GELU a few columns can be thirty times as large as the others (arXiv 2402.17762); one scale for all would
    leave no precision for the rest.
    """
    descending = high_F.sort(descending=True).values
    count = min(MAX_OUTLIERS, len(high_F) - 1)
    outliers = (
        (high_F > descending[count]).nonzero().flatten()
        if descending[0] > OUTLIER_RATIO * descending[count]
        else high_F.new_empty(0)
    )
    outliers = outliers.long()
    is_int8 = torch.ones(len(high_F), dtype=torch.bool).index_fill(0, outliers, False)
    return outliers, min(float(low_F[is_int8].min()), -1e-6), max(float(high_F[is_int8].max()) * HIDDEN_CLIP, 1e-6)


def _scaled_norm(norm: nn.LayerNorm, scales_D: Tensor) -> Norm:
    return norm.weight.detach() / scales_D, norm.bias.detach() / scales_D, norm.eps
