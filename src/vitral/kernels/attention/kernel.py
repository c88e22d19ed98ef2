"""Flash attention for 65 to 640 tokens, forward and backward.

A program owns BLOCK_M = 64 queries of one head and iterates over blocks of BLOCK_N keys and values. Backward, one
kernel owns queries (for grad_q) and another owns keys (for grad_k and grad_v): two GEMMs more than a combined kernel,
but no atomics. q, k and v are read where the qkv GEMM wrote them, (tokens, 3, heads, head dim), and gradients are
written in the same layout. The last block of keys is as small a power of two as the tail allows: 197 tokens are
6·32 + 16.

Shapes are compile-time constants. With FULL_BLOCK a block is completely inside the sequence and needs no masks.
Softmax works in base 2; only lse = log2(Σ exp2(qk)) is saved for the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.fp8.kernel import FP8_MAX

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(
    ptr, start, STRIDE: tl.constexpr, NUM_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, FULL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows start ... start + BLOCK_ROWS of one head, (BLOCK_ROWS, BLOCK_D)."""
    rows, cols = start + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    ptrs = ptr + rows[:, None] * STRIDE + cols[None, :]
    if FULL_BLOCK and HEAD_DIM == BLOCK_D:
        return tl.load(ptrs)
    return tl.load(ptrs, (rows < NUM_TOKENS)[:, None] & (cols < HEAD_DIM)[None, :], 0.0)


@triton.jit
def _store_rows(
    ptr, x, start, STRIDE: tl.constexpr, NUM_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, FULL_BLOCK: tl.constexpr,
):  # fmt: skip
    rows, cols = start + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    ptrs = ptr + rows[:, None] * STRIDE + cols[None, :]
    if FULL_BLOCK and HEAD_DIM == BLOCK_D:
        tl.store(ptrs, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptrs, x.to(ptr.dtype.element_ty), (rows < NUM_TOKENS)[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit
def _load_vector(ptr, start, other, NUM_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, FULL_BLOCK: tl.constexpr):
    """One value per token, (BLOCK_ROWS,); `other` beyond the last token."""
    tokens = start + tl.arange(0, BLOCK_ROWS)
    if FULL_BLOCK:
        return tl.load(ptr + tokens)
    return tl.load(ptr + tokens, tokens < NUM_TOKENS, other)


@triton.jit
def _store_vector(ptr, x, start, NUM_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, FULL_BLOCK: tl.constexpr):
    tokens = start + tl.arange(0, BLOCK_ROWS)
    if FULL_BLOCK:
        tl.store(ptr + tokens, x)
    else:
        tl.store(ptr + tokens, x, tokens < NUM_TOKENS)


@triton.jit
def _program_position(NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """image·NUM_HEADS + head, image, head, and the first token of this program's block."""
    blocks: tl.constexpr = (NUM_TOKENS + BLOCK_M - 1) // BLOCK_M
    image_head = tl.program_id(0) // blocks
    return (
        image_head.to(tl.int64),
        (image_head // NUM_HEADS).to(tl.int64),
        image_head % NUM_HEADS,
        tl.program_id(0) % blocks * BLOCK_M,
    )


@triton.jit
def _online_softmax_step(
    q, k, v, key_bias_ptr, row_max, row_sum, acc, start, scale,
    NUM_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, FULL_BLOCK: tl.constexpr, KEY_BIAS: tl.constexpr,
):  # fmt: skip
    """Add one block of keys and values to the running maximum, sum and output."""
    qk = tl.dot(q, tl.trans(k))
    if KEY_BIAS:
        qk += _load_vector(key_bias_ptr, start, 0.0, NUM_TOKENS, BLOCK_N, FULL_BLOCK)[None, :]
    if not FULL_BLOCK:
        qk = tl.where((start + tl.arange(0, BLOCK_N) < NUM_TOKENS)[None, :], qk, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(qk, axis=1) * scale)
    p = tl.exp2(qk * scale - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    row_sum = row_sum * alpha + tl.sum(p, axis=1)
    return new_max, row_sum, tl.dot(p.to(v.dtype), v, acc * alpha[:, None])


@triton.jit
def _attention_forward(
    q_ptr, k_ptr, v_ptr, key_bias_ptr, out_ptr, lse_ptr, scale_ptr, row_norm_ptr, weight_bound_ptr, softmax_scale,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, FP8: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEY_BIAS: tl.constexpr,
    FULL_BLOCK: tl.constexpr,
):  # fmt: skip
    """The body of `attention_forward_kernel`, with or without masks (FULL_BLOCK)."""
    image_head, image, head, start = _program_position(NUM_TOKENS, NUM_HEADS, BLOCK_M)
    q_ptr += image * NUM_TOKENS * STRIDE_QK + head * HEAD_DIM
    k_ptr += image * NUM_TOKENS * STRIDE_QK + head * HEAD_DIM
    v_ptr += image * NUM_TOKENS * 3 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    out_ptr += image * NUM_TOKENS * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    if KEY_BIAS:
        key_bias_ptr += image * NUM_TOKENS
    STRIDE_V: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    STRIDE_OUT: tl.constexpr = NUM_HEADS * HEAD_DIM
    softmax_scale *= LOG2E
    q = _load_rows(q_ptr, start, STRIDE_QK, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in tl.range(0, NUM_TOKENS // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=NUM_STAGES):
        k = _load_rows(k_ptr, n, STRIDE_QK, NUM_TOKENS, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        v = _load_rows(v_ptr, n, STRIDE_V, NUM_TOKENS, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        row_max, row_sum, acc = _online_softmax_step(
            q, k, v, key_bias_ptr, row_max, row_sum, acc, n, softmax_scale, NUM_TOKENS, BLOCK_N, True, KEY_BIAS
        )
    if TAIL_N:
        tail: tl.constexpr = NUM_TOKENS // BLOCK_N * BLOCK_N
        k = _load_rows(k_ptr, tail, STRIDE_QK, NUM_TOKENS, HEAD_DIM, TAIL_N, BLOCK_D, False)
        v = _load_rows(v_ptr, tail, STRIDE_V, NUM_TOKENS, HEAD_DIM, TAIL_N, BLOCK_D, False)
        row_max, row_sum, acc = _online_softmax_step(
            q, k, v, key_bias_ptr, row_max, row_sum, acc, tail, softmax_scale, NUM_TOKENS, TAIL_N, False, KEY_BIAS
        )
    if FP8:  # a weighted mean of values is bounded by the largest value, which is bounded by the GEMM bound of v
        tokens = tl.arange(0, BLOCK_TOKENS)
        max_norm = tl.max(tl.load(row_norm_ptr + image * NUM_TOKENS + tokens, tokens < NUM_TOKENS, 0.0), axis=0)
        fp8_scale = tl.maximum(max_norm * tl.load(weight_bound_ptr) + tl.load(weight_bound_ptr + 1), 1e-12) / FP8_MAX
        row_sum *= fp8_scale
        if head == 0:
            scale_ptr += image * NUM_TOKENS
            _store_vector(
                scale_ptr, tl.zeros((BLOCK_M,), tl.float32) + fp8_scale, start, NUM_TOKENS, BLOCK_M, FULL_BLOCK
            )
    else:
        lse_ptr += image_head * NUM_TOKENS
        _store_vector(lse_ptr, row_max + tl.log2(row_sum), start, NUM_TOKENS, BLOCK_M, FULL_BLOCK)
    _store_rows(out_ptr, acc / row_sum[:, None], start, STRIDE_OUT, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, key_bias_ptr, out_ptr, lse_ptr, scale_ptr, row_norm_ptr, weight_bound_ptr, softmax_scale,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, FP8: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KEY_BIAS: tl.constexpr,
):  # fmt: skip
    """out = softmax((q·kᵀ + key_bias)·softmax_scale)·v for BLOCK_M queries of one head of one image.

    Reads q, k with row stride STRIDE_QK, v with row stride 3·NUM_HEADS·HEAD_DIM and, if KEY_BIAS, key_bias
    (num_tokens,) fp32. Writes out (num_tokens, NUM_HEADS, HEAD_DIM) in bf16 with lse (images·NUM_HEADS, NUM_TOKENS)
    fp32; or, if FP8, out as e4m3 with one scale per image, repeated per token, scale (num_tokens,) fp32, from the bound
    of the GEMM that computed v: row_norm (num_tokens,) and weight_bound (2,).
    """
    if tl.program_id(0) % ((NUM_TOKENS + BLOCK_M - 1) // BLOCK_M) < NUM_TOKENS // BLOCK_M:
        _attention_forward(
            q_ptr, k_ptr, v_ptr, key_bias_ptr, out_ptr, lse_ptr, scale_ptr, row_norm_ptr, weight_bound_ptr,
            softmax_scale, NUM_TOKENS, NUM_HEADS, HEAD_DIM, STRIDE_QK, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, NUM_STAGES,
            FP8, BLOCK_TOKENS, KEY_BIAS, FULL_BLOCK=True,
        )  # fmt: skip
    elif NUM_TOKENS % BLOCK_M:
        _attention_forward(
            q_ptr, k_ptr, v_ptr, key_bias_ptr, out_ptr, lse_ptr, scale_ptr, row_norm_ptr, weight_bound_ptr,
            softmax_scale, NUM_TOKENS, NUM_HEADS, HEAD_DIM, STRIDE_QK, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, NUM_STAGES,
            FP8, BLOCK_TOKENS, KEY_BIAS, FULL_BLOCK=False,
        )  # fmt: skip


# Backward. With p = softmax(q·kᵀ/√d), out = p·v and delta = Σ grad_out·out over the head dimension:
#   grad_v = pᵀ·grad_out,  grad_qk = p·(grad_out·vᵀ - delta),  grad_q = grad_qk·k/√d,  grad_k = grad_qkᵀ·q/√d


@triton.jit
def _grad_q_step(
    q, k, v, grad_out, lse, delta, grad_q, start, scale,
    NUM_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, FULL_BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if not FULL_BLOCK:  # avoid 0·inf
        p = tl.where((start + tl.arange(0, BLOCK_N) < NUM_TOKENS)[None, :], p, 0.0)
    grad_qk = p * (tl.dot(grad_out, tl.trans(v)) - delta[:, None])
    return tl.dot(grad_qk.to(k.dtype), k, grad_q)


@triton.jit
def _attention_grad_q(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, FULL_BLOCK: tl.constexpr,
):  # fmt: skip
    """The body of `attention_grad_q_kernel`, with or without masks (FULL_BLOCK)."""
    image_head, image, head, start = _program_position(NUM_TOKENS, NUM_HEADS, BLOCK_M)
    q_ptr += image * NUM_TOKENS * STRIDE_QK + head * HEAD_DIM
    k_ptr += image * NUM_TOKENS * STRIDE_QK + head * HEAD_DIM
    v_ptr += image * NUM_TOKENS * 3 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    out_ptr += image * NUM_TOKENS * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    grad_out_ptr += image * NUM_TOKENS * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    STRIDE_V: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    STRIDE_OUT: tl.constexpr = NUM_HEADS * HEAD_DIM
    q = _load_rows(q_ptr, start, STRIDE_QK, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    grad_out = _load_rows(grad_out_ptr, start, STRIDE_OUT, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    out = _load_rows(out_ptr, start, STRIDE_OUT, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), axis=1)
    _store_vector(delta_ptr + image_head * NUM_TOKENS, delta, start, NUM_TOKENS, BLOCK_M, FULL_BLOCK)
    lse = _load_vector(lse_ptr + image_head * NUM_TOKENS, start, float("inf"), NUM_TOKENS, BLOCK_M, FULL_BLOCK)
    grad_q = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in tl.range(0, NUM_TOKENS // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=NUM_STAGES):
        k = _load_rows(k_ptr, n, STRIDE_QK, NUM_TOKENS, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        v = _load_rows(v_ptr, n, STRIDE_V, NUM_TOKENS, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        grad_q = _grad_q_step(
            q, k, v, grad_out, lse, delta, grad_q, n, softmax_scale * LOG2E, NUM_TOKENS, BLOCK_N, True
        )
    if TAIL_N:
        tail: tl.constexpr = NUM_TOKENS // BLOCK_N * BLOCK_N
        k = _load_rows(k_ptr, tail, STRIDE_QK, NUM_TOKENS, HEAD_DIM, TAIL_N, BLOCK_D, False)
        v = _load_rows(v_ptr, tail, STRIDE_V, NUM_TOKENS, HEAD_DIM, TAIL_N, BLOCK_D, False)
        grad_q = _grad_q_step(
            q, k, v, grad_out, lse, delta, grad_q, tail, softmax_scale * LOG2E, NUM_TOKENS, TAIL_N, False
        )
    grad_q_ptr = grad_qkv_ptr + image * NUM_TOKENS * 3 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    _store_rows(grad_q_ptr, grad_q * softmax_scale, start, STRIDE_V, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)


@triton.jit
def attention_grad_q_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """grad_q = Σ_n grad_qk·k·softmax_scale and delta = Σ grad_out·out for BLOCK_M queries of one head of one image.

    Reads q, k, v as the forward kernel does; out, grad_out (num_tokens, NUM_HEADS, HEAD_DIM) bf16; lse. Writes the q
    part of grad_qkv (num_tokens, 3, NUM_HEADS, HEAD_DIM) bf16 and delta (images·NUM_HEADS, NUM_TOKENS) fp32.
    """
    if tl.program_id(0) % ((NUM_TOKENS + BLOCK_M - 1) // BLOCK_M) < NUM_TOKENS // BLOCK_M:
        _attention_grad_q(
            q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
            NUM_TOKENS, NUM_HEADS, HEAD_DIM, STRIDE_QK, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, NUM_STAGES, FULL_BLOCK=True,
        )  # fmt: skip
    elif NUM_TOKENS % BLOCK_M:
        _attention_grad_q(
            q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
            NUM_TOKENS, NUM_HEADS, HEAD_DIM, STRIDE_QK, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, NUM_STAGES, FULL_BLOCK=False,
        )  # fmt: skip


@triton.jit
def _grad_kv_step(q, k, v, grad_out, lse, delta, grad_k, grad_v, scale):
    """Transposed: keys are rows, queries are columns. Queries beyond the sequence have lse = inf, hence p = 0."""
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    grad_v = tl.dot(p.to(k.dtype), grad_out, grad_v)
    grad_qk = p * (tl.dot(v, tl.trans(grad_out)) - delta[None, :])
    return tl.dot(grad_qk.to(k.dtype), q, grad_k), grad_v


@triton.jit
def _attention_grad_kv(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, FULL_BLOCK: tl.constexpr,
):  # fmt: skip
    """The body of `attention_grad_kv_kernel`, with or without masks (FULL_BLOCK)."""
    image_head, image, head, start = _program_position(NUM_TOKENS, NUM_HEADS, BLOCK_M)
    q_ptr += image * NUM_TOKENS * STRIDE_QK + head * HEAD_DIM
    k_ptr += image * NUM_TOKENS * STRIDE_QK + head * HEAD_DIM
    v_ptr += image * NUM_TOKENS * 3 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    grad_out_ptr += image * NUM_TOKENS * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    grad_qkv_ptr += image * NUM_TOKENS * 3 * NUM_HEADS * HEAD_DIM + head * HEAD_DIM
    lse_ptr += image_head * NUM_TOKENS
    delta_ptr += image_head * NUM_TOKENS
    STRIDE_V: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    STRIDE_OUT: tl.constexpr = NUM_HEADS * HEAD_DIM
    k = _load_rows(k_ptr, start, STRIDE_QK, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    v = _load_rows(v_ptr, start, STRIDE_V, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    grad_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for m in tl.range(0, NUM_TOKENS // BLOCK_N * BLOCK_N, BLOCK_N, num_stages=NUM_STAGES):
        q = _load_rows(q_ptr, m, STRIDE_QK, NUM_TOKENS, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        grad_out = _load_rows(grad_out_ptr, m, STRIDE_OUT, NUM_TOKENS, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        lse = _load_vector(lse_ptr, m, 0.0, NUM_TOKENS, BLOCK_N, True)
        delta = _load_vector(delta_ptr, m, 0.0, NUM_TOKENS, BLOCK_N, True)
        grad_k, grad_v = _grad_kv_step(q, k, v, grad_out, lse, delta, grad_k, grad_v, softmax_scale * LOG2E)
    if TAIL_N:
        tail: tl.constexpr = NUM_TOKENS // BLOCK_N * BLOCK_N
        q = _load_rows(q_ptr, tail, STRIDE_QK, NUM_TOKENS, HEAD_DIM, TAIL_N, BLOCK_D, False)
        grad_out = _load_rows(grad_out_ptr, tail, STRIDE_OUT, NUM_TOKENS, HEAD_DIM, TAIL_N, BLOCK_D, False)
        lse = _load_vector(lse_ptr, tail, float("inf"), NUM_TOKENS, TAIL_N, False)
        delta = _load_vector(delta_ptr, tail, 0.0, NUM_TOKENS, TAIL_N, False)
        grad_k, grad_v = _grad_kv_step(q, k, v, grad_out, lse, delta, grad_k, grad_v, softmax_scale * LOG2E)
    grad_k_ptr = grad_qkv_ptr + NUM_HEADS * HEAD_DIM
    _store_rows(grad_k_ptr, grad_k * softmax_scale, start, STRIDE_V, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)
    grad_v_ptr = grad_qkv_ptr + 2 * NUM_HEADS * HEAD_DIM
    _store_rows(grad_v_ptr, grad_v, start, STRIDE_V, NUM_TOKENS, HEAD_DIM, BLOCK_M, BLOCK_D, FULL_BLOCK)


@triton.jit
def attention_grad_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STRIDE_QK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """grad_v = Σ_m pᵀ·grad_out and grad_k = Σ_m grad_qkᵀ·q·softmax_scale for BLOCK_M keys of one head of one image.

    Runs after `attention_grad_q_kernel`, whose delta it reads. Writes the k and v parts of grad_qkv
    (num_tokens, 3, NUM_HEADS, HEAD_DIM) bf16. BLOCK_N and TAIL_N are blocks of queries here.
    """
    if tl.program_id(0) % ((NUM_TOKENS + BLOCK_M - 1) // BLOCK_M) < NUM_TOKENS // BLOCK_M:
        _attention_grad_kv(
            q_ptr, k_ptr, v_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
            NUM_TOKENS, NUM_HEADS, HEAD_DIM, STRIDE_QK, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, NUM_STAGES, FULL_BLOCK=True,
        )  # fmt: skip
    elif NUM_TOKENS % BLOCK_M:
        _attention_grad_kv(
            q_ptr, k_ptr, v_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, softmax_scale,
            NUM_TOKENS, NUM_HEADS, HEAD_DIM, STRIDE_QK, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, NUM_STAGES, FULL_BLOCK=False,
        )  # fmt: skip
