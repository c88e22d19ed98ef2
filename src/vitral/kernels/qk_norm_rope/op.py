"""QK-norm and RoPE as functions of tensors, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.precompile import launch
from vitral.kernels.qk_norm_rope import kernel as kernels
from vitral.kernels.reduce.op import ColumnSums, num_partial_sums


class QkNormParams(NamedTuple):
    """LayerNorm parameters of queries and keys, each (d,)."""

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    eps: float = 0.0


NO_NORM = QkNormParams()


def half_blocks(head_dim: int, block_size: int = 1024) -> dict[str, int]:
    """Launch parameters for blocks of half head vectors."""
    block_half = triton.next_power_of_2(head_dim // 2)
    return {"BLOCK_ROWS": max(1, block_size // block_half), "BLOCK_HALF": block_half, "num_warps": 2}


def qk_norm_rope(
    qkv: Tensor, num_heads: int, tokens_per_image: int, qk_norm: QkNormParams | None, rope: Tensor | None
) -> Tensor:
    """Normed and rotated queries and keys, (2, M, h, d), from qkv (M, 3hd)."""
    M, head_dim = qkv.shape[0], qkv.shape[1] // 3 // num_heads
    out = qkv.new_empty(2, M, num_heads, head_dim)
    blocks = half_blocks(head_dim)
    *norm_params, eps = qk_norm or NO_NORM
    launch(kernels.qk_norm_rope_kernel, (triton.cdiv(M * num_heads, blocks["BLOCK_ROWS"]), 2))(
        qkv, *norm_params, rope, out, M, tokens_per_image, eps,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, QK_NORM=qk_norm is not None, ROPE=rope is not None, **blocks,
    )  # fmt: skip
    return out


class QkNormRopeGrads(NamedTuple):
    qkv: Tensor  # (M, 3hd)
    norm_params: Tensor | None  # (2, 2, d): weight and bias of the q norm and the k norm
    qkv_bias: Tensor | None  # (3hd,)


def qk_norm_rope_backward(
    qkv: Tensor, grads_BhTd: tuple[Tensor, Tensor, Tensor], qk_norm: QkNormParams | None, rope: Tensor | None,
    has_bias: bool, sums: ColumnSums, out: Tensor | None = None,
) -> QkNormRopeGrads:  # fmt: skip
    """Gradient of qkv from those of normed and rotated q and k, and of v.

    With `out` (M, 3hd), the three gradients are views of it and are replaced in place.
    """
    _, num_heads, tokens_per_image, head_dim = grads_BhTd[0].shape
    M, in_place, out = qkv.shape[0], out is not None, torch.empty_like(qkv) if out is None else out
    blocks = half_blocks(head_dim, 512)
    num_programs = num_partial_sums(M, blocks["BLOCK_ROWS"], 3 * num_heads)
    q_weight, k_weight, _, _, eps = qk_norm or NO_NORM
    norm_sums = qkv.new_empty(num_programs * num_heads, 2, 2, head_dim, dtype=torch.float32) if qk_norm else None
    bias_sums = qkv.new_empty(num_programs, 3 * num_heads * head_dim, dtype=torch.float32) if has_bias else None
    launch(kernels.qk_norm_rope_backward_kernel, (num_programs, 3 * num_heads))(
        qkv, *grads_BhTd, q_weight, k_weight, rope, out, norm_sums, bias_sums, M, tokens_per_image, eps,
        *image_token_head_strides(grads_BhTd),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, QK_NORM=qk_norm is not None, ROPE=rope is not None, QKV_BIAS=has_bias,
        IN_PLACE=in_place, **blocks,
    )  # fmt: skip
    return QkNormRopeGrads(
        out,
        None if norm_sums is None else sums.add(norm_sums),
        None if bias_sums is None else sums.add(bias_sums),
    )


def image_token_head_strides(tensors_BhTd: tuple[Tensor, ...]) -> list[int]:
    for tensor in tensors_BhTd:
        assert tensor.stride(3) == 1
    return [tensor.stride(axis) for tensor in tensors_BhTd for axis in (0, 2, 1)]
