"""Flash attention for up to `MAX_TOKENS` tokens as functions of tensors, forward and backward.

q, k, v are (M, hd) matrices: v is a slice of qkv (M, 3hd); q and k are slices of it too, or the output of
`qk_norm_rope`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vitral.kernels.attention import kernel as kernels
from vitral.kernels.fp8.op import Fp8Tensor, GemmBound, empty_fp8
from vitral.kernels.precompile import launch

MAX_TOKENS, MAX_HEAD_DIM = 640, 64  # beyond these, PyTorch's scaled_dot_product_attention is used
BLOCK_M = 64  # rows that a program owns
FEW_TOKENS = 256  # up to here, other blocks and pipeline depths are faster


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, num_tokens: int, sizes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√d)·v, (M, hd), and the log2-sum-exp2 of its rows, (Bh, T).

    sizes: (M,) fp32; a token of size s counts as s equal tokens, softmax(q·kᵀ/√d + log s)·v. Forward only.
    """
    out, lse = q.new_empty(q.shape), q.new_empty(len(q) // num_tokens * num_heads, num_tokens, dtype=torch.float32)
    _launch_forward(q, k, v, num_heads, num_tokens, out, lse, None, None, sizes)
    return out, lse


def attention_forward_fp8(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, num_tokens: int, v_bound: GemmBound, sizes: Tensor | None = None
) -> Fp8Tensor:
    """softmax(q·kᵀ/√d)·v in FP8, with one scale per image from the bound of the GEMM that computed v.

    The row norms of the result are not set. sizes: as for `attention_forward`.
    """
    out = empty_fp8(v)
    _launch_forward(q, k, v, num_heads, num_tokens, out.data, None, out.scales, v_bound, sizes)
    return out


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, num_tokens: int, out: Tensor, lse: Tensor | None,
    scales: Tensor | None, v_bound: GemmBound | None, sizes: Tensor | None,
) -> None:  # fmt: skip
    M, D = q.shape
    softmax_scale = (D // num_heads) ** -0.5
    key_bias = None if sizes is None else sizes.log() / softmax_scale
    launch(kernels.attention_forward_kernel, (M // num_tokens * num_heads * triton.cdiv(num_tokens, BLOCK_M),))(
        q, k, v, key_bias, out, lse, scales, *(v_bound or (None, None)), softmax_scale,
        STRIDE_QK=q.stride(0), FP8=scales is not None, BLOCK_TOKENS=triton.next_power_of_2(num_tokens),
        KEY_BIAS=sizes is not None,
        **attention_blocks(num_tokens, num_heads, D // num_heads, 32 if num_tokens <= FEW_TOKENS else 64, num_stages=3),
    )  # fmt: skip


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, num_heads: int, num_tokens: int
) -> Tensor:
    """Gradients of q, k and v side by side, (M, 3hd)."""
    M, D = q.shape
    grad_qkv, delta, softmax_scale = q.new_empty(M, 3 * D), torch.empty_like(lse), (D // num_heads) ** -0.5
    grid = (M // num_tokens * num_heads * triton.cdiv(num_tokens, BLOCK_M),)
    launch(kernels.attention_grad_q_kernel, grid)(
        q, k, v, out, grad_out, lse, delta, grad_qkv, softmax_scale, STRIDE_QK=q.stride(0),
        **attention_blocks(num_tokens, num_heads, D // num_heads, 64, num_stages=2 if num_tokens <= FEW_TOKENS else 3),
    )  # fmt: skip
    launch(kernels.attention_grad_kv_kernel, grid)(
        q, k, v, grad_out, lse, delta, grad_qkv, softmax_scale, STRIDE_QK=q.stride(0),
        maxnreg=128,  # spills a few registers, but a fourth program fits on the SM
        **attention_blocks(num_tokens, num_heads, D // num_heads, block_n=32, num_stages=3),
    )  # fmt: skip
    return grad_qkv


def attention_blocks(num_tokens: int, num_heads: int, head_dim: int, block_n: int, num_stages: int) -> dict[str, int]:
    """Launch parameters. TAIL_N: size of the last, partial block; 0 if there is none."""
    tail = num_tokens % block_n
    return {
        "NUM_TOKENS": num_tokens, "NUM_HEADS": num_heads, "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "BLOCK_M": BLOCK_M, "BLOCK_N": block_n,
        "TAIL_N": max(16, triton.next_power_of_2(tail)) if tail else 0, "NUM_STAGES": num_stages, "num_warps": 4,
    }  # fmt: skip


def split_heads(qkv: Tensor, num_heads: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v, each (B, h, T, d), of qkv (M, 3hd)."""
    q, k, v = qkv.view(len(qkv) // num_tokens, num_tokens, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def merge_heads(x_BhTd: Tensor) -> Tensor:
    """(B, h, T, d) -> (M, hd), without a copy if the tokens are the rows in memory."""
    return x_BhTd.transpose(1, 2).reshape(-1, x_BhTd.shape[1] * x_BhTd.shape[3])
