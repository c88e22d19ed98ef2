"""Attention over at most 64 tokens, with QK-norm and RoPE: one program holds one head of one image in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.qk_norm_rope.kernel import load_cos_sin, load_normed_rotated, store_halves


@triton.jit
def _attention_probs(
    qkv_ptr, offsets, mask, tokens, cols, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, cos, sin,
    tokens_per_image, eps, softmax_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one head as two halves each, and softmax(q·kᵀ·softmax_scale) in fp32."""
    q_a, q_b = load_normed_rotated(
        qkv_ptr, offsets, mask, cols, q_weight_ptr, q_bias_ptr, cos, sin, eps, HEAD_DIM, QK_NORM, ROPE
    )
    k_a, k_b = load_normed_rotated(
        qkv_ptr, offsets + NUM_HEADS * HEAD_DIM, mask, cols, k_weight_ptr, k_bias_ptr, cos, sin, eps, HEAD_DIM, QK_NORM,
        ROPE,
    )  # fmt: skip
    qk = (tl.dot(q_a, tl.trans(k_a)) + tl.dot(q_b, tl.trans(k_b))) * (softmax_scale * 1.4426950408889634)  # log2(e)
    qk = tl.where((tokens < tokens_per_image)[None, :], qk, -1e30)
    probs = tl.exp2(qk - tl.max(qk, axis=1)[:, None])
    return q_a, q_b, k_a, k_b, probs * (1.0 / tl.sum(probs, axis=1))[:, None]


@triton.jit
def short_attention_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, rope_ptr, out_ptr, tokens_per_image, eps,
    softmax_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """out = softmax(q·kᵀ·softmax_scale)·v, with q and k after QK-norm and RoPE.

    Reads qkv (num_tokens, 3, NUM_HEADS, HEAD_DIM), writes out (num_tokens, NUM_HEADS, HEAD_DIM).
    One program per image and head.
    """
    image, head = (tl.program_id(0) // NUM_HEADS).to(tl.int64), tl.program_id(0) % NUM_HEADS
    tokens, cols = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_HALF)
    mask = (tokens < tokens_per_image)[:, None] & (cols < HEAD_DIM // 2)[None, :]
    offsets = (
        image * tokens_per_image * 3 * NUM_HEADS * HEAD_DIM
        + head * HEAD_DIM
        + tokens[:, None] * 3 * NUM_HEADS * HEAD_DIM
        + cols[None, :]
    )
    cos, sin = load_cos_sin(rope_ptr, tokens, cols, mask, tokens_per_image, HEAD_DIM, ROPE)
    q_a, _, _, _, probs = _attention_probs(
        qkv_ptr, offsets, mask, tokens, cols, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, cos, sin,
        tokens_per_image, eps, softmax_scale, NUM_HEADS, HEAD_DIM, QK_NORM, ROPE,
    )  # fmt: skip
    probs = probs.to(q_a.dtype)
    v_a = tl.load(qkv_ptr + offsets + 2 * NUM_HEADS * HEAD_DIM, mask, 0.0)
    v_b = tl.load(qkv_ptr + offsets + 2 * NUM_HEADS * HEAD_DIM + HEAD_DIM // 2, mask, 0.0)
    out_offsets = (
        image * tokens_per_image * NUM_HEADS * HEAD_DIM
        + head * HEAD_DIM
        + tokens[:, None] * NUM_HEADS * HEAD_DIM
        + cols[None, :]
    )
    store_halves(out_ptr, out_offsets, mask, tl.dot(probs, v_a), tl.dot(probs, v_b), HEAD_DIM)


@triton.jit
def short_attention_backward_kernel(
    qkv_ptr, grad_out_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, rope_ptr, grad_qkv_ptr,
    tokens_per_image, eps, softmax_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """grad_v = pᵀ·grad_out;  grad_qk = p·(grad_p - Σ grad_p·p)·scale;  grad_q = grad_qk·k;  grad_k = grad_qkᵀ·q.

    Here p are the attention probabilities, computed again, and grad_p = grad_out·vᵀ. grad_q and grad_k are those of
    the normed and rotated q and k; `qk_norm_rope_backward_kernel` continues from there.
    Reads qkv (num_tokens, 3, NUM_HEADS, HEAD_DIM) and grad_out (num_tokens, NUM_HEADS, HEAD_DIM), writes grad_qkv
    like qkv. One program per image and head.
    """
    image, head = (tl.program_id(0) // NUM_HEADS).to(tl.int64), tl.program_id(0) % NUM_HEADS
    tokens, cols = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_HALF)
    mask = (tokens < tokens_per_image)[:, None] & (cols < HEAD_DIM // 2)[None, :]
    offsets = (
        image * tokens_per_image * 3 * NUM_HEADS * HEAD_DIM
        + head * HEAD_DIM
        + tokens[:, None] * 3 * NUM_HEADS * HEAD_DIM
        + cols[None, :]
    )
    cos, sin = load_cos_sin(rope_ptr, tokens, cols, mask, tokens_per_image, HEAD_DIM, ROPE)
    q_a, q_b, k_a, k_b, probs = _attention_probs(
        qkv_ptr, offsets, mask, tokens, cols, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, cos, sin,
        tokens_per_image, eps, softmax_scale, NUM_HEADS, HEAD_DIM, QK_NORM, ROPE,
    )  # fmt: skip
    out_offsets = (
        image * tokens_per_image * NUM_HEADS * HEAD_DIM
        + head * HEAD_DIM
        + tokens[:, None] * NUM_HEADS * HEAD_DIM
        + cols[None, :]
    )
    grad_out_a = tl.load(grad_out_ptr + out_offsets, mask, 0.0)
    grad_out_b = tl.load(grad_out_ptr + out_offsets + HEAD_DIM // 2, mask, 0.0)
    probs_t = tl.trans(probs.to(q_a.dtype))
    v_offsets = offsets + 2 * NUM_HEADS * HEAD_DIM
    store_halves(grad_qkv_ptr, v_offsets, mask, tl.dot(probs_t, grad_out_a), tl.dot(probs_t, grad_out_b), HEAD_DIM)
    v_a = tl.load(qkv_ptr + offsets + 2 * NUM_HEADS * HEAD_DIM, mask, 0.0)
    v_b = tl.load(qkv_ptr + offsets + 2 * NUM_HEADS * HEAD_DIM + HEAD_DIM // 2, mask, 0.0)
    grad_probs = tl.dot(grad_out_a, tl.trans(v_a)) + tl.dot(grad_out_b, tl.trans(v_b))
    grad_qk = (probs * (grad_probs - tl.sum(grad_probs * probs, axis=1)[:, None]) * softmax_scale).to(q_a.dtype)
    store_halves(grad_qkv_ptr, offsets, mask, tl.dot(grad_qk, k_a), tl.dot(grad_qk, k_b), HEAD_DIM)
    grad_qk = tl.trans(grad_qk)
    k_offsets = offsets + NUM_HEADS * HEAD_DIM
    store_halves(grad_qkv_ptr, k_offsets, mask, tl.dot(grad_qk, q_a), tl.dot(grad_qk, q_b), HEAD_DIM)
