"""Elementwise kernels between the encoder's GEMMs: residual + bias + LayerNorm, and bias + GELU.

Each is one pass over the tokens. The residual addition, the branch's bias, dropout, stochastic depth and LayerNorm are
one kernel forward and one backward. The backward kernels also sum the gradients of biases and norm parameters. An FP8
copy of a result is written while the result is in registers.

Rows are tokens: matrices are (num_rows, NUM_COLS), contiguous, bf16 (fp32 in tests). Arithmetic is fp32, except for
GELU with an FP8 result (see gelu.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.dropout.kernel import dropout_factor
from vitral.kernels.fp8.kernel import FP8_MAX, scale_from_gemm_bound, store_rows_fp8
from vitral.kernels.layernorm_gelu.gelu import gelu_and_slope, gelu_to_fp8

GELU_MAX_SLOPE = tl.constexpr(1.13)  # maximum of |GELU'|


@triton.jit
def add_layernorm_kernel(
    x_ptr, branch_ptr, branch_bias_ptr, branch_scale_ptr, weight_ptr, bias_ptr, sum_ptr, normed_ptr, stats_ptr,
    fp8_ptr, fp8_scale_ptr, row_norm_ptr, seed_ptr, dropout_p, num_rows, tokens_per_image, eps,
    NUM_COLS: tl.constexpr, ADD: tl.constexpr, DROP_PATH: tl.constexpr, DROPOUT: tl.constexpr,
    STORE_NORMED: tl.constexpr, FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """sum = x + branch_scale·dropout(branch + branch_bias);  normed = LayerNorm(sum)·weight + bias.

    Reads x, branch (num_rows, NUM_COLS); branch_scale (images,) fp32 is 0 or 1/(1 - drop_path); seed (2,) int32 of the
    dropout mask. Without ADD the sum is x and is not written; x and sum may be the same tensor. Writes sum, normed
    (num_rows, NUM_COLS), stats (2, num_rows) fp32 = mean and rstd, and the FP8 form of normed with its scales and row
    norms. One program per BLOCK_ROWS rows.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    mask = (rows < num_rows)[:, None] & (cols < NUM_COLS)[None, :]
    offsets = rows[:, None] * NUM_COLS + cols[None, :]
    x = tl.load(x_ptr + offsets, mask, 0.0).to(tl.float32)
    if ADD:
        branch = tl.load(branch_ptr + offsets, mask, 0.0).to(tl.float32)
        branch += tl.load(branch_bias_ptr + cols, cols < NUM_COLS, 0.0)[None, :]
        if DROPOUT:
            branch *= dropout_factor(seed_ptr, offsets, dropout_p)
        if DROP_PATH:
            branch *= tl.load(branch_scale_ptr + rows // tokens_per_image, rows < num_rows, 0.0)[:, None]
        rounded = (x + branch).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=1) / NUM_COLS
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / NUM_COLS + eps)
    tl.store(stats_ptr + rows, mean, rows < num_rows)
    tl.store(stats_ptr + num_rows + rows, rstd, rows < num_rows)
    weight, bias = tl.load(weight_ptr + cols, cols < NUM_COLS, 0.0), tl.load(bias_ptr + cols, cols < NUM_COLS, 0.0)
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    if STORE_NORMED:
        tl.store(normed_ptr + offsets, y.to(normed_ptr.dtype.element_ty), mask)
    if FP8:
        store_rows_fp8(fp8_ptr, fp8_scale_ptr, row_norm_ptr, offsets, rows, mask, y, num_rows)


@triton.jit
def add_layernorm_backward_kernel(
    sum_ptr, stats_ptr, grad_normed_ptr, grad_residual_ptr, branch_scale_ptr, weight_ptr, bias_ptr, grad_x_ptr,
    grad_branch_ptr, normed_ptr, fp8_ptr, fp8_scale_ptr, row_norm_ptr, partial_sum_ptr, seed_ptr, dropout_p, num_rows,
    tokens_per_image,
    NUM_COLS: tl.constexpr, ADD_RESIDUAL: tl.constexpr, DROP_PATH: tl.constexpr, DROPOUT: tl.constexpr,
    RECOMPUTE: tl.constexpr, FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """grad_x = dLayerNorm(sum)ᵀ·grad_normed + grad_residual;  grad_branch = branch_scale·dropout(grad_x).

    Reads sum (the forward kernel's), stats (2, num_rows), grad_normed and grad_residual (num_rows, NUM_COLS), the
    gradient that bypasses the norm. Writes grad_x, grad_branch (with DROP_PATH or DROPOUT; otherwise it is grad_x),
    normed again if RECOMPUTE, grad_branch in FP8 if FP8, and partial_sum (num_programs, 3, NUM_COLS) fp32: the
    gradients of the norm's weight and bias and of the branch bias, summed over this program's rows.
    """
    cols = tl.arange(0, BLOCK_COLS)
    col_mask = cols < NUM_COLS
    weight = tl.load(weight_ptr + cols, col_mask, 0.0)
    grad_weight = tl.zeros((BLOCK_COLS,), tl.float32)
    grad_bias = tl.zeros((BLOCK_COLS,), tl.float32)
    grad_branch_bias = tl.zeros((BLOCK_COLS,), tl.float32)
    for row_block in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=3):
        rows = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & col_mask[None, :]
        offsets = rows[:, None] * NUM_COLS + cols[None, :]
        x = tl.load(sum_ptr + offsets, mask, 0.0).to(tl.float32)
        grad_normed = tl.load(grad_normed_ptr + offsets, mask, 0.0).to(tl.float32)
        mean = tl.load(stats_ptr + rows, rows < num_rows, 0.0)
        rstd = tl.load(stats_ptr + num_rows + rows, rows < num_rows, 0.0)
        x_hat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        if RECOMPUTE:
            bias = tl.load(bias_ptr + cols, col_mask, 0.0)
            normed_ptrs = normed_ptr + offsets
            tl.store(normed_ptrs, (x_hat * weight[None, :] + bias[None, :]).to(normed_ptr.dtype.element_ty), mask)
        grad_x_hat = grad_normed * weight[None, :]
        projection = tl.sum(grad_x_hat * x_hat, axis=1) / NUM_COLS
        mean = tl.sum(grad_x_hat, axis=1) / NUM_COLS
        grad = tl.where(mask, rstd[:, None] * (grad_x_hat - mean[:, None] - x_hat * projection[:, None]), 0.0)
        if ADD_RESIDUAL:
            grad += tl.load(grad_residual_ptr + offsets, mask, 0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad.to(grad_x_ptr.dtype.element_ty), mask)
        if DROPOUT:
            grad *= dropout_factor(seed_ptr, offsets, dropout_p)
        if DROP_PATH:
            grad *= tl.load(branch_scale_ptr + rows // tokens_per_image, rows < num_rows, 0.0)[:, None]
        if DROP_PATH or DROPOUT:
            tl.store(grad_branch_ptr + offsets, grad.to(grad_branch_ptr.dtype.element_ty), mask)
        if FP8:
            store_rows_fp8(fp8_ptr, fp8_scale_ptr, row_norm_ptr, offsets, rows, mask, grad, num_rows)
        grad_weight += tl.sum(grad_normed * x_hat, axis=0)
        grad_bias += tl.sum(grad_normed, axis=0)
        grad_branch_bias += tl.sum(grad, axis=0)
    partial_sum_ptrs = partial_sum_ptr + tl.program_id(0) * 3 * NUM_COLS + cols
    tl.store(partial_sum_ptrs, grad_weight, col_mask)
    tl.store(partial_sum_ptrs + NUM_COLS, grad_bias, col_mask)
    tl.store(partial_sum_ptrs + 2 * NUM_COLS, grad_branch_bias, col_mask)


@triton.jit
def bias_gelu_kernel(
    h_ptr, bias_ptr, out_ptr, fp8_ptr, fp8_scale_ptr, row_norm_ptr, weight_bound_ptr, seed_ptr, dropout_p, num_rows,
    NUM_COLS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = dropout(GELU(h + bias)), in bf16 or, if FP8, as e4m3 scaled by the bound of the GEMM h = x·Wᵀ.

    Reads h (num_rows, NUM_COLS), bias (NUM_COLS,), seed (2,) of the dropout mask; if FP8 also row_norm (num_rows,)
    = |x| and weight_bound (2,). Writes out (may be h) or fp8 (num_rows, NUM_COLS) and fp8_scale (num_rows,).
    Grid: (row blocks, column blocks).
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < num_rows)[:, None] & (cols < NUM_COLS)[None, :]
    offsets = rows[:, None] * NUM_COLS + cols[None, :]
    x = tl.load(h_ptr + offsets, mask, 0.0).to(tl.float32) + tl.load(bias_ptr + cols, cols < NUM_COLS, 0.0)[None, :]
    if FP8:
        scale = scale_from_gemm_bound(row_norm_ptr + rows, rows < num_rows, weight_bound_ptr)
        factor = (1.0 / scale)[:, None]
        if DROPOUT:  # the scale grows with the values that are kept
            scale *= 1.0 / (1.0 - dropout_p)
            factor *= (1.0 - dropout_p) * dropout_factor(seed_ptr, offsets, dropout_p)
        if tl.program_id(1) == 0:
            tl.store(fp8_scale_ptr + rows, scale, rows < num_rows)
        tl.store(fp8_ptr + offsets, gelu_to_fp8(x, factor, ACTIVATION), mask)
    else:
        gelu = gelu_and_slope(x, ACTIVATION)[0]
        if DROPOUT:
            gelu *= dropout_factor(seed_ptr, offsets, dropout_p)
        tl.store(out_ptr + offsets, gelu.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def bias_gelu_backward_kernel(
    h_ptr, bias_ptr, grad_out_ptr, gelu_ptr, grad_h_ptr, fp8_ptr, fp8_scale_ptr, row_norm_ptr, weight_bound_ptr,
    partial_sum_ptr, seed_ptr, dropout_p, num_rows,
    NUM_COLS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, RECOMPUTE: tl.constexpr,
    FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """grad_h = dropout(grad_out)·GELU'(h + bias), and dropout(GELU(h + bias)) again if RECOMPUTE.

    Reads h, grad_out (num_rows, NUM_COLS), bias (NUM_COLS,), seed (2,) of the dropout mask. Writes grad_h (may be
    grad_out), gelu (may be h), partial_sum (programs, NUM_COLS) fp32 = the bias gradient summed over this program's
    rows, and, if FP8, grad_h as e4m3 scaled by the bound of the GEMM grad_out = grad·W. Grid: (partial sums,
    column blocks).
    """
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = cols < NUM_COLS
    bias = tl.load(bias_ptr + cols, col_mask, 0.0)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for row_block in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & col_mask[None, :]
        offsets = rows[:, None] * NUM_COLS + cols[None, :]
        gelu, slope = gelu_and_slope(tl.load(h_ptr + offsets, mask, 0.0).to(tl.float32) + bias[None, :], ACTIVATION)
        if DROPOUT:
            factor = dropout_factor(seed_ptr, offsets, dropout_p)
            gelu *= factor
            slope *= factor
        grad_h = tl.load(grad_out_ptr + offsets, mask, 0.0).to(tl.float32) * slope
        if RECOMPUTE:
            tl.store(gelu_ptr + offsets, gelu.to(gelu_ptr.dtype.element_ty), mask)
        tl.store(grad_h_ptr + offsets, grad_h.to(grad_h_ptr.dtype.element_ty), mask)
        if FP8:
            bound = tl.load(row_norm_ptr + rows, rows < num_rows, 1.0) * tl.load(weight_bound_ptr) * GELU_MAX_SLOPE
            if DROPOUT:
                bound *= 1.0 / (1.0 - dropout_p)
            scale = tl.maximum(bound, 1e-12) / FP8_MAX
            if tl.program_id(1) == 0:
                tl.store(fp8_scale_ptr + rows, scale, rows < num_rows)
            tl.store(fp8_ptr + offsets, (grad_h * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask)
        acc += grad_h
    tl.store(partial_sum_ptr + tl.program_id(0) * NUM_COLS + cols, tl.sum(acc, axis=0), col_mask)
