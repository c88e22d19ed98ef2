"""Attention over at most `MAX_SHORT_TOKENS` tokens, with QK-norm and RoPE, forward and backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vitral.kernels.precompile import launch
from vitral.kernels.qk_norm_rope.op import NO_NORM, QkNormParams
from vitral.kernels.short_attention import kernel as kernels

MAX_SHORT_TOKENS = 64  # the whole attention matrix of a head fits into the registers of one program


def short_attention(
    qkv: Tensor, num_heads: int, tokens_per_image: int, qk_norm: QkNormParams | None, rope: Tensor | None
) -> Tensor:
    """softmax(q·kᵀ/√d)·v, (M, hd), with q and k after QK-norm and RoPE, from qkv (M, 3hd)."""
    M, head_dim = qkv.shape[0], qkv.shape[1] // 3 // num_heads
    out = qkv.new_empty(M, num_heads * head_dim)
    *norm_params, eps = qk_norm or NO_NORM
    launch(kernels.short_attention_kernel, (M // tokens_per_image * num_heads,))(
        qkv, *norm_params, rope, out, tokens_per_image, eps, head_dim**-0.5,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, QK_NORM=qk_norm is not None, ROPE=rope is not None,
        **token_blocks(tokens_per_image, head_dim),
    )  # fmt: skip
    return out


def short_attention_backward(
    qkv: Tensor, grad_out: Tensor, num_heads: int, tokens_per_image: int, qk_norm: QkNormParams | None,
    rope: Tensor | None,
) -> Tensor:  # fmt: skip
    """Gradients of normed and rotated q and k, and of v, side by side (M, 3hd), for `qk_norm_rope_backward`."""
    M, head_dim = qkv.shape[0], qkv.shape[1] // 3 // num_heads
    grad_qkv = torch.empty_like(qkv)
    *norm_params, eps = qk_norm or NO_NORM
    launch(kernels.short_attention_backward_kernel, (M // tokens_per_image * num_heads,))(
        qkv, grad_out, *norm_params, rope, grad_qkv, tokens_per_image, eps, head_dim**-0.5,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, QK_NORM=qk_norm is not None, ROPE=rope is not None,
        **token_blocks(tokens_per_image, head_dim),
    )  # fmt: skip
    return grad_qkv


def token_blocks(tokens_per_image: int, head_dim: int) -> dict[str, int]:
    """Launch parameters: tl.dot needs at least 16 rows and columns."""
    block_tokens = max(16, triton.next_power_of_2(tokens_per_image))
    return {"BLOCK_TOKENS": block_tokens, "BLOCK_HALF": max(16, triton.next_power_of_2(head_dim // 2)), "num_warps": 4}
