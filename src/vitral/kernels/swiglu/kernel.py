"""SwiGLU between the GEMMs of the MLP, silu(gate)·value, with biases, dropout and an FP8 copy.

A program holds whole rows, so that FP8 scales come from the rows themselves: a bound for the product of gate and value
would be far above it. Arithmetic is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.dropout.kernel import dropout_factor
from vitral.kernels.fp8.kernel import FP8_MAX


@triton.jit
def _load_gate_value(h_ptr, bias_ptr, rows, cols, mask, NUM_COLS: tl.constexpr):
    offsets = rows[:, None] * (2 * NUM_COLS) + cols[None, :]
    gate = tl.load(h_ptr + offsets, mask, 0.0).to(tl.float32)
    value = tl.load(h_ptr + offsets + NUM_COLS, mask, 0.0).to(tl.float32)
    gate += tl.load(bias_ptr + cols, cols < NUM_COLS, 0.0)[None, :]
    value += tl.load(bias_ptr + NUM_COLS + cols, cols < NUM_COLS, 0.0)[None, :]
    return gate, value, 1.0 / (1.0 + tl.exp2(gate * -1.4426950408889634))


@triton.jit
def swiglu_kernel(
    h_ptr, bias_ptr, out_ptr, fp8_ptr, fp8_scale_ptr, seed_ptr, dropout_p, num_rows,
    NUM_COLS: tl.constexpr, DROPOUT: tl.constexpr, FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = dropout(silu(gate)·value) with (gate, value) = h + bias, in bf16 or, if FP8, as e4m3 with row scales.

    Reads h (num_rows, 2·NUM_COLS), bias (2·NUM_COLS,), seed (2,) of the dropout mask. Writes out or fp8
    (num_rows, NUM_COLS) and fp8_scale (num_rows,). One program per BLOCK_ROWS rows.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    mask = (rows < num_rows)[:, None] & (cols < NUM_COLS)[None, :]
    offsets = rows[:, None] * NUM_COLS + cols[None, :]
    gate, value, sigmoid = _load_gate_value(h_ptr, bias_ptr, rows, cols, mask, NUM_COLS)
    y = tl.where(mask, gate * sigmoid * value, 0.0)
    if DROPOUT:
        y *= dropout_factor(seed_ptr, offsets, dropout_p)
    if FP8:
        scale = tl.maximum(tl.max(tl.abs(y), axis=1), 1e-12) / FP8_MAX
        tl.store(fp8_scale_ptr + rows, scale, rows < num_rows)
        tl.store(fp8_ptr + offsets, (y * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask)
    else:
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def swiglu_backward_kernel(
    h_ptr, bias_ptr, grad_out_ptr, out_ptr, grad_h_ptr, fp8_ptr, fp8_scale_ptr, partial_sum_ptr, seed_ptr, dropout_p,
    num_rows,
    NUM_COLS: tl.constexpr, DROPOUT: tl.constexpr, RECOMPUTE: tl.constexpr, FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """grad_h of `swiglu_kernel`, and its out again if RECOMPUTE.

    Reads h (num_rows, 2·NUM_COLS), bias, grad_out (num_rows, NUM_COLS). Writes grad_h (may be h), out (may be
    grad_out), partial_sum (programs, 2·NUM_COLS) fp32 = the bias gradient summed over this program's rows, and, if FP8,
    grad_h as e4m3 with one scale per row.
    """
    cols = tl.arange(0, BLOCK_COLS)
    col_mask = cols < NUM_COLS
    gate_sum = tl.zeros((BLOCK_COLS,), tl.float32)
    value_sum = tl.zeros((BLOCK_COLS,), tl.float32)
    for row_block in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & col_mask[None, :]
        offsets = rows[:, None] * NUM_COLS + cols[None, :]
        gate, value, sigmoid = _load_gate_value(h_ptr, bias_ptr, rows, cols, mask, NUM_COLS)
        grad = tl.load(grad_out_ptr + offsets, mask, 0.0).to(tl.float32)
        silu = gate * sigmoid
        y = silu * value
        if DROPOUT:
            factor = dropout_factor(seed_ptr, offsets, dropout_p)
            y *= factor
            grad *= factor
        if RECOMPUTE:
            tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask)
        grad_value = tl.where(mask, grad * silu, 0.0)
        grad_gate = tl.where(mask, grad * value * (sigmoid + silu * (1.0 - sigmoid)), 0.0)
        wide_offsets = rows[:, None] * (2 * NUM_COLS) + cols[None, :]
        tl.store(grad_h_ptr + wide_offsets, grad_gate.to(grad_h_ptr.dtype.element_ty), mask)
        tl.store(grad_h_ptr + wide_offsets + NUM_COLS, grad_value.to(grad_h_ptr.dtype.element_ty), mask)
        if FP8:
            abs_max = tl.maximum(tl.max(tl.abs(grad_gate), axis=1), tl.max(tl.abs(grad_value), axis=1))
            scale = tl.maximum(abs_max, 1e-12) / FP8_MAX
            tl.store(fp8_scale_ptr + rows, scale, rows < num_rows)
            inv_scale = (1.0 / scale)[:, None]
            tl.store(fp8_ptr + wide_offsets, (grad_gate * inv_scale).to(tl.float8e4nv), mask)
            tl.store(fp8_ptr + wide_offsets + NUM_COLS, (grad_value * inv_scale).to(tl.float8e4nv), mask)
        gate_sum += tl.sum(grad_gate, axis=0)
        value_sum += tl.sum(grad_value, axis=0)
    partial_sum_ptrs = partial_sum_ptr + tl.program_id(0) * (2 * NUM_COLS) + cols
    tl.store(partial_sum_ptrs, gate_sum, col_mask)
    tl.store(partial_sum_ptrs + NUM_COLS, value_sum, col_mask)
