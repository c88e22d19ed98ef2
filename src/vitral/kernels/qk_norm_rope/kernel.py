"""QK-norm and RoPE of queries and keys, forward and backward.

Head vectors are handled as two halves (a, b) of HEAD_DIM/2 columns, because RoPE rotates the pairs (a_i, b_i). The
RoPE table is (2, tokens_per_image, HEAD_DIM/2) fp32: cos, then sin. Arithmetic is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_halves(ptr, offsets, mask, HEAD_DIM: tl.constexpr):
    """Both halves of head vectors, as fp32."""
    return (
        tl.load(ptr + offsets, mask, 0.0).to(tl.float32),
        tl.load(ptr + offsets + HEAD_DIM // 2, mask, 0.0).to(tl.float32),
    )


@triton.jit
def store_halves(ptr, offsets, mask, a, b, HEAD_DIM: tl.constexpr):
    tl.store(ptr + offsets, a.to(ptr.dtype.element_ty), mask)
    tl.store(ptr + offsets + HEAD_DIM // 2, b.to(ptr.dtype.element_ty), mask)


@triton.jit
def _standardize(a, b, mask, HEAD_DIM: tl.constexpr, eps):
    """Rows (a, b) with mean 0 and variance 1, and their rstd."""
    mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) / HEAD_DIM
    a = tl.where(mask, a - mean[:, None], 0.0)
    b = tl.where(mask, b - mean[:, None], 0.0)
    rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
    return a * rstd, b * rstd, rstd


@triton.jit
def _layernorm_backward(grad_a, grad_b, a_hat, b_hat, rstd, weight_ptr, cols, HEAD_DIM: tl.constexpr):
    """Input gradient of a LayerNorm over head vectors, from the standardised rows (a_hat, b_hat)."""
    col_mask = cols < HEAD_DIM // 2
    grad_a *= tl.load(weight_ptr + cols, col_mask, 0.0)[None, :]
    grad_b *= tl.load(weight_ptr + HEAD_DIM // 2 + cols, col_mask, 0.0)[None, :]
    projection = ((tl.sum(grad_a * a_hat, axis=1) + tl.sum(grad_b * b_hat, axis=1)) / HEAD_DIM)[:, None]
    mean = ((tl.sum(grad_a, axis=1) + tl.sum(grad_b, axis=1)) / HEAD_DIM)[:, None]
    return rstd * (grad_a - mean - a_hat * projection), rstd * (grad_b - mean - b_hat * projection)


@triton.jit
def load_cos_sin(rope_ptr, tokens, cols, mask, tokens_per_image, HEAD_DIM: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin of the rotation angles of these tokens; the identity rotation without ROPE."""
    cos, sin = 1.0, 0.0
    if ROPE:
        offsets = tokens[:, None] * (HEAD_DIM // 2) + cols[None, :]
        cos = tl.load(rope_ptr + offsets, mask, 0.0)
        sin = tl.load(rope_ptr + tokens_per_image * (HEAD_DIM // 2) + offsets, mask, 0.0)
    return cos, sin


@triton.jit
def load_normed_rotated(
    qkv_ptr, offsets, mask, cols, weight_ptr, bias_ptr, cos, sin, eps,
    HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Queries or keys of one head after QK-norm and RoPE, as two halves in the dtype of qkv."""
    col_mask = cols < HEAD_DIM // 2
    a, b = load_halves(qkv_ptr, offsets, mask, HEAD_DIM)
    if QK_NORM:
        a, b, _ = _standardize(a, b, mask, HEAD_DIM, eps)
        weight_ptr += cols
        bias_ptr += cols
        a = a * tl.load(weight_ptr, col_mask, 0.0)[None, :] + tl.load(bias_ptr, col_mask, 0.0)[None, :]
        b = (
            b * tl.load(weight_ptr + HEAD_DIM // 2, col_mask, 0.0)[None, :]
            + tl.load(bias_ptr + HEAD_DIM // 2, col_mask, 0.0)[None, :]
        )
    if ROPE:
        a, b = a * cos - b * sin, a * sin + b * cos
    dtype = qkv_ptr.dtype.element_ty
    return a.to(dtype), b.to(dtype)


@triton.jit
def qk_norm_rope_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, rope_ptr, out_ptr, num_tokens, tokens_per_image, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """out = RoPE(LayerNorm(q)), RoPE(LayerNorm(k)), the norm over each head vector.

    Reads the q and k parts of qkv (num_tokens, 3, NUM_HEADS, HEAD_DIM). Writes out
    (2, num_tokens, NUM_HEADS, HEAD_DIM), same dtype. Grid: (blocks of head vectors, 2: q and k).
    """
    is_key = tl.program_id(1)  # 0: queries, 1: keys
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # token * NUM_HEADS + head
    tokens = rows // NUM_HEADS
    cols = tl.arange(0, BLOCK_HALF)
    mask = (rows < num_tokens * NUM_HEADS)[:, None] & (cols < HEAD_DIM // 2)[None, :]
    row_offsets = tokens * 3 * NUM_HEADS * HEAD_DIM + is_key * NUM_HEADS * HEAD_DIM + (rows % NUM_HEADS) * HEAD_DIM
    offsets = row_offsets[:, None] + cols[None, :]
    weight_ptr, bias_ptr = q_weight_ptr, q_bias_ptr
    if QK_NORM:  # noqa: SIM102  (QK_NORM is a compile-time condition, is_key is not)
        if is_key == 1:
            weight_ptr, bias_ptr = k_weight_ptr, k_bias_ptr
    cos, sin = load_cos_sin(rope_ptr, tokens % tokens_per_image, cols, mask, tokens_per_image, HEAD_DIM, ROPE)
    a, b = load_normed_rotated(
        qkv_ptr, offsets, mask, cols, weight_ptr, bias_ptr, cos, sin, eps, HEAD_DIM, QK_NORM, ROPE
    )
    out_ptr += is_key * num_tokens * NUM_HEADS * HEAD_DIM
    store_halves(out_ptr, (rows * HEAD_DIM)[:, None] + cols[None, :], mask, a, b, HEAD_DIM)


@triton.jit
def qk_norm_rope_backward_kernel(
    qkv_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, q_weight_ptr, k_weight_ptr, rope_ptr, grad_qkv_ptr,
    norm_partial_sum_ptr, bias_partial_sum_ptr, num_tokens, tokens_per_image, eps,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
    QKV_BIAS: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """grad_qkv from the gradients of normed and rotated q and k, and of v; one of q, k, v of one head per program.

    Reads grad_q, grad_k, grad_v (B, NUM_HEADS, T, HEAD_DIM) by strides of image, token and head; with QK_NORM also q
    and k of qkv. Writes grad_qkv (num_tokens, 3, NUM_HEADS, HEAD_DIM); IN_PLACE: grad_v is already there. Also writes
    fp32 sums over this program's tokens: norm_partial_sum (P, NUM_HEADS, 2, 2, HEAD_DIM) for (weight, bias) of
    (q_norm, k_norm), bias_partial_sum (P, 3, NUM_HEADS, HEAD_DIM) for the qkv bias. Grid: (P, 3·NUM_HEADS).
    """
    part, head = tl.program_id(1) // NUM_HEADS, tl.program_id(1) % NUM_HEADS  # part 0: q, 1: k, 2: v
    cols = tl.arange(0, BLOCK_HALF)
    col_mask = cols < HEAD_DIM // 2
    grad_ptr, stride_b, stride_t, stride_h, weight_ptr = grad_v_ptr, stride_vb, stride_vt, stride_vh, q_weight_ptr
    if part == 0:
        grad_ptr, stride_b, stride_t, stride_h = grad_q_ptr, stride_qb, stride_qt, stride_qh
    if part == 1:
        grad_ptr, stride_b, stride_t, stride_h, weight_ptr = grad_k_ptr, stride_kb, stride_kt, stride_kh, k_weight_ptr
    grad_weight_a = tl.zeros((BLOCK_ROWS, BLOCK_HALF), tl.float32)
    grad_weight_b = tl.zeros((BLOCK_ROWS, BLOCK_HALF), tl.float32)
    grad_bias_a = tl.zeros((BLOCK_ROWS, BLOCK_HALF), tl.float32)
    grad_bias_b = tl.zeros((BLOCK_ROWS, BLOCK_HALF), tl.float32)
    grad_qkv_bias_a = tl.zeros((BLOCK_ROWS, BLOCK_HALF), tl.float32)
    grad_qkv_bias_b = tl.zeros((BLOCK_ROWS, BLOCK_HALF), tl.float32)
    for row_block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_ROWS), tl.num_programs(0)):
        rows = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (rows < num_tokens)[:, None] & col_mask[None, :]
        grad_offsets = ((rows // tokens_per_image) * stride_b + (rows % tokens_per_image) * stride_t + head * stride_h)[
            :, None
        ] + cols[None, :]
        a, b = load_halves(grad_ptr, grad_offsets, mask, HEAD_DIM)
        offsets = (rows * 3 * NUM_HEADS * HEAD_DIM + tl.program_id(1) * HEAD_DIM)[:, None] + cols[None, :]
        if part < 2:
            if ROPE:  # the inverse rotation
                cos, sin = load_cos_sin(rope_ptr, rows % tokens_per_image, cols, mask, tokens_per_image, HEAD_DIM, ROPE)
                a, b = a * cos + b * sin, b * cos - a * sin
            if QK_NORM:
                a_hat, b_hat = load_halves(qkv_ptr, offsets, mask, HEAD_DIM)
                a_hat, b_hat, rstd = _standardize(a_hat, b_hat, mask, HEAD_DIM, eps)
                grad_weight_a += a * a_hat
                grad_weight_b += b * b_hat
                grad_bias_a += a
                grad_bias_b += b
                a, b = _layernorm_backward(a, b, a_hat, b_hat, rstd, weight_ptr, cols, HEAD_DIM)
            store_halves(grad_qkv_ptr, offsets, mask, a, b, HEAD_DIM)
        elif not IN_PLACE:
            store_halves(grad_qkv_ptr, offsets, mask, a, b, HEAD_DIM)
        if QKV_BIAS:
            grad_qkv_bias_a += a
            grad_qkv_bias_b += b
    if QK_NORM:  # noqa: SIM102  (QK_NORM is a compile-time condition, part is not)
        if part < 2:
            out_ptrs = (
                norm_partial_sum_ptr + (tl.program_id(0) * NUM_HEADS + head) * 4 * HEAD_DIM + part * HEAD_DIM + cols
            )
            tl.store(out_ptrs, tl.sum(grad_weight_a, axis=0), col_mask)
            tl.store(out_ptrs + HEAD_DIM // 2, tl.sum(grad_weight_b, axis=0), col_mask)
            tl.store(out_ptrs + 2 * HEAD_DIM, tl.sum(grad_bias_a, axis=0), col_mask)
            tl.store(out_ptrs + 2 * HEAD_DIM + HEAD_DIM // 2, tl.sum(grad_bias_b, axis=0), col_mask)
    if QKV_BIAS:
        out_ptrs = bias_partial_sum_ptr + (tl.program_id(0) * 3 * NUM_HEADS + tl.program_id(1)) * HEAD_DIM + cols
        tl.store(out_ptrs, tl.sum(grad_qkv_bias_a, axis=0), col_mask)
        tl.store(out_ptrs + HEAD_DIM // 2, tl.sum(grad_qkv_bias_b, axis=0), col_mask)
