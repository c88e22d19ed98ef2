"""Everything in a block after attention as one kernel, for narrow models; and the MLP's expansion with GELU in FP8.

A program holds the rows of BLOCK_ROWS tokens on chip while the weights stream through:

    attention output -> projection -> + residual -> norm2 -> expand -> GELU -> contract -> + residual -> norm1 -> qkv
                                                                                                  (of the next block)

Inference writes none of the intermediate activations; training writes those that the backward pass needs. Rows have
D1 + D2 columns, both powers of two because Triton's tiles are: 192 = 128 + 64. D2 may be 0; the second part of a row
then aliases the first and is not used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.fp8.kernel import scale_from_gemm_bound
from vitral.kernels.layernorm_gelu.gelu import gelu_and_slope, gelu_to_fp8


@triton.jit
def _load_weight_tile(
    ptr, first_row, first_col, STRIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):  # fmt: skip
    rows, cols = first_row + tl.arange(0, BLOCK_ROWS), first_col + tl.arange(0, BLOCK_COLS)
    return tl.load(ptr + rows[:, None] * STRIDE + cols[None, :])


@triton.jit
def _load_token_tile(ptr, rows, first_col, rows_left, STRIDE: tl.constexpr, BLOCK_COLS: tl.constexpr):
    ptrs = ptr + rows[:, None] * STRIDE + first_col + tl.arange(0, BLOCK_COLS)[None, :]
    return tl.load(ptrs, (rows < rows_left)[:, None], 0.0)


@triton.jit
def _linear(x1, x2, weight_ptr, first_row, D1: tl.constexpr, D2: tl.constexpr, BLOCK_N: tl.constexpr):
    """x·wᵀ for BLOCK_N rows of the weight matrix, fp32."""
    y = tl.dot(x1, tl.trans(_load_weight_tile(weight_ptr, first_row, 0, D1 + D2, BLOCK_N, D1)))
    if D2:
        y = tl.dot(x2, tl.trans(_load_weight_tile(weight_ptr, first_row, D1, D1 + D2, BLOCK_N, D2)), y)
    return y


@triton.jit
def _load_row_vector(ptr, start, BLOCK_COLS: tl.constexpr):
    return tl.load(ptr + start + tl.arange(0, BLOCK_COLS)).to(tl.float32)[None, :]


@triton.jit
def _layernorm(
    x1, x2, weight_ptr, bias_ptr, eps, stats_ptr, rows, rows_left, num_rows,
    D1: tl.constexpr, D2: tl.constexpr, STORE_STATS: tl.constexpr, dtype,
):  # fmt: skip
    mean = tl.sum(x1, axis=1)
    if D2:
        mean += tl.sum(x2, axis=1)
    mean /= D1 + D2
    x1 -= mean[:, None]
    sum_sq = tl.sum(x1 * x1, axis=1)
    if D2:
        x2 -= mean[:, None]
        sum_sq += tl.sum(x2 * x2, axis=1)
    rstd = tl.rsqrt(sum_sq / (D1 + D2) + eps)
    if STORE_STATS:
        tl.store(stats_ptr + rows, mean, rows < rows_left)
        tl.store(stats_ptr + num_rows + rows, rstd, rows < rows_left)
    y1 = (x1 * rstd[:, None] * _load_row_vector(weight_ptr, 0, D1) + _load_row_vector(bias_ptr, 0, D1)).to(dtype)
    y2 = y1
    if D2:
        y2 = (x2 * rstd[:, None] * _load_row_vector(weight_ptr, D1, D2) + _load_row_vector(bias_ptr, D1, D2)).to(dtype)
    return y1, y2


@triton.jit
def _store_tokens(ptr, x1, x2, rows, rows_left, D1: tl.constexpr, D2: tl.constexpr):
    mask = (rows < rows_left)[:, None]
    tl.store(ptr + rows[:, None] * (D1 + D2) + tl.arange(0, D1)[None, :], x1.to(ptr.dtype.element_ty), mask)
    if D2:
        tl.store(ptr + rows[:, None] * (D1 + D2) + D1 + tl.arange(0, D2)[None, :], x2.to(ptr.dtype.element_ty), mask)


@triton.jit
def post_attention_kernel(
    attn_out_ptr, x_ptr, out_ptr, qkv_ptr, project_weight_ptr, project_bias_ptr, norm2_weight_ptr, norm2_bias_ptr,
    expand_weight_ptr, expand_bias_ptr, contract_weight_ptr, contract_bias_ptr, norm1_weight_ptr, norm1_bias_ptr,
    qkv_weight_ptr, qkv_bias_ptr, mid_ptr, hidden_ptr, norm2_stats_ptr, norm1_stats_ptr, num_rows, norm2_eps, norm1_eps,
    D1: tl.constexpr, D2: tl.constexpr, HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, QKV_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, SAVE_FOR_BACKWARD: tl.constexpr,
):  # fmt: skip
    """mid = x + project(attn_out);  hidden = norm2(mid)·expandᵀ;  out = mid + contract(GELU(hidden + expand_bias));
    qkv = the next block's qkv(norm1(out)).

    Reads attn_out, x (num_rows, D) bf16, D = D1 + D2, and weights (out, in) bf16 with fp32 biases. Writes out
    (num_rows, D), which may be x, and qkv (num_rows, 3D). With SAVE_FOR_BACKWARD also mid (num_rows, D), hidden
    (num_rows, HIDDEN) before bias and GELU, and the stats (2, num_rows) fp32 of both norms. One program per BLOCK_ROWS
    tokens; BLOCK_N rows or columns of each weight matrix per step.
    """
    D: tl.constexpr = D1 + D2
    dtype = out_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS  # offsets below are relative to this row and fit into 32 bits
    attn_out_ptr += first * D
    x_ptr += first * D
    out_ptr += first * D
    qkv_ptr += first * (3 * D)
    rows_left = num_rows - tl.program_id(0) * BLOCK_ROWS
    if SAVE_FOR_BACKWARD:
        mid_ptr += first * D
        hidden_ptr += first * HIDDEN
        norm2_stats_ptr += first
        norm1_stats_ptr += first
    rows = tl.arange(0, BLOCK_ROWS)
    x1 = _load_token_tile(x_ptr, rows, 0, rows_left, D, D1).to(tl.float32) + _load_row_vector(project_bias_ptr, 0, D1)
    x2 = x1
    if D2:
        x2 = _load_token_tile(x_ptr, rows, D1, rows_left, D, D2).to(tl.float32)
        x2 += _load_row_vector(project_bias_ptr, D1, D2)
    for k in tl.range(0, D, BLOCK_N, num_stages=NUM_STAGES):
        attn_out = _load_token_tile(attn_out_ptr, rows, k, rows_left, D, BLOCK_N)
        x1 = tl.dot(attn_out, tl.trans(_load_weight_tile(project_weight_ptr, 0, k, D, D1, BLOCK_N)), x1)
        if D2:
            x2 = tl.dot(attn_out, tl.trans(_load_weight_tile(project_weight_ptr, D1, k, D, D2, BLOCK_N)), x2)
    x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
    if SAVE_FOR_BACKWARD:
        _store_tokens(mid_ptr, x1, x2, rows, rows_left, D1, D2)
    y1, y2 = _layernorm(
        x1, x2, norm2_weight_ptr, norm2_bias_ptr, norm2_eps, norm2_stats_ptr, rows, rows_left, num_rows, D1, D2,
        SAVE_FOR_BACKWARD, dtype,
    )  # fmt: skip
    x1 += _load_row_vector(contract_bias_ptr, 0, D1)
    if D2:
        x2 += _load_row_vector(contract_bias_ptr, D1, D2)
    mask = (rows < rows_left)[:, None]
    for n in tl.range(0, HIDDEN, BLOCK_N, num_stages=NUM_STAGES):
        hidden = _linear(y1, y2, expand_weight_ptr, n, D1, D2, BLOCK_N)
        if SAVE_FOR_BACKWARD:
            tl.store(hidden_ptr + rows[:, None] * HIDDEN + n + tl.arange(0, BLOCK_N)[None, :], hidden.to(dtype), mask)
        gelu = gelu_and_slope(hidden + _load_row_vector(expand_bias_ptr, n, BLOCK_N), ACTIVATION)[0].to(dtype)
        x1 = tl.dot(gelu, tl.trans(_load_weight_tile(contract_weight_ptr, 0, n, HIDDEN, D1, BLOCK_N)), x1)
        if D2:
            x2 = tl.dot(gelu, tl.trans(_load_weight_tile(contract_weight_ptr, D1, n, HIDDEN, D2, BLOCK_N)), x2)
    _store_tokens(out_ptr, x1, x2, rows, rows_left, D1, D2)
    x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
    y1, y2 = _layernorm(
        x1, x2, norm1_weight_ptr, norm1_bias_ptr, norm1_eps, norm1_stats_ptr, rows, rows_left, num_rows, D1, D2,
        SAVE_FOR_BACKWARD, dtype,
    )  # fmt: skip
    for n in tl.range(0, 3 * D, BLOCK_N, num_stages=NUM_STAGES):
        qkv = _linear(y1, y2, qkv_weight_ptr, n, D1, D2, BLOCK_N)
        if QKV_BIAS:
            qkv += _load_row_vector(qkv_bias_ptr, n, BLOCK_N)
        tl.store(qkv_ptr + rows[:, None] * (3 * D) + n + tl.arange(0, BLOCK_N)[None, :], qkv.to(dtype), mask)


@triton.jit
def _store_gelu_fp8(
    acc, first_col, bias_ptr, x_scale, weight_scale_ptr, inv_out_scale, out_ptr, rows, rows_left,
    HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    x = acc * x_scale * _load_row_vector(weight_scale_ptr, first_col, BLOCK_N)
    x += _load_row_vector(bias_ptr, first_col, BLOCK_N)
    ptrs = out_ptr + rows[:, None] * HIDDEN + first_col + tl.arange(0, BLOCK_N)[None, :]
    tl.store(ptrs, gelu_to_fp8(x, inv_out_scale, ACTIVATION), (rows < rows_left)[:, None])


@triton.jit
def expand_gelu_fp8_kernel(
    x_ptr, x_scale_ptr, row_norm_ptr, weight_ptr, weight_scale_ptr, weight_bound_ptr, bias_ptr, out_ptr, out_scale_ptr,
    num_rows,
    D1: tl.constexpr, D2: tl.constexpr, HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, COL_SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """out = fp8(GELU(x·Wᵀ + bias) / out_scale), with out_scale from the bound |x|·max|w| + max|bias|.

    Reads x (num_rows, D1 + D2) and W (HIDDEN, D1 + D2), both e4m3 with one scale per row; bias (HIDDEN,) fp32; row_norm
    (num_rows,) fp32; weight_bound (2,) fp32. Writes out (num_rows, HIDDEN) e4m3 and out_scale (num_rows,) fp32.
    A program owns BLOCK_ROWS tokens and one of COL_SPLITS ranges of columns. GELU of one block of BLOCK_N columns
    overlaps with the GEMM of the next.
    """
    D: tl.constexpr = D1 + D2
    COLS_PER_PROGRAM: tl.constexpr = HIDDEN // COL_SPLITS
    first = (tl.program_id(0) // COL_SPLITS).to(tl.int64) * BLOCK_ROWS
    first_col = tl.program_id(0) % COL_SPLITS * COLS_PER_PROGRAM
    x_ptr += first * D
    out_ptr += first * HIDDEN
    rows, rows_left = tl.arange(0, BLOCK_ROWS), num_rows - first
    mask = rows < rows_left
    x1 = _load_token_tile(x_ptr, rows, 0, rows_left, D, D1)
    x2 = x1
    if D2:
        x2 = _load_token_tile(x_ptr, rows, D1, rows_left, D, D2)
    x_scale = tl.load(x_scale_ptr + first + rows, mask, 0.0)[:, None]
    out_scale = scale_from_gemm_bound(row_norm_ptr + first + rows, mask, weight_bound_ptr)
    if first_col == 0:
        tl.store(out_scale_ptr + first + rows, out_scale, mask)
    inv_out_scale = (1.0 / out_scale)[:, None]
    acc = _linear(x1, x2, weight_ptr, first_col, D1, D2, BLOCK_N)
    for n in tl.range(first_col + BLOCK_N, first_col + COLS_PER_PROGRAM, BLOCK_N, num_stages=NUM_STAGES):
        next_acc = _linear(x1, x2, weight_ptr, n, D1, D2, BLOCK_N)
        _store_gelu_fp8(
            acc, n - BLOCK_N, bias_ptr, x_scale, weight_scale_ptr, inv_out_scale, out_ptr, rows, rows_left, HIDDEN,
            ACTIVATION, BLOCK_N,
        )  # fmt: skip
        acc = next_acc
    _store_gelu_fp8(
        acc, first_col + COLS_PER_PROGRAM - BLOCK_N, bias_ptr, x_scale, weight_scale_ptr, inv_out_scale, out_ptr, rows,
        rows_left, HIDDEN, ACTIVATION, BLOCK_N,
    )  # fmt: skip
