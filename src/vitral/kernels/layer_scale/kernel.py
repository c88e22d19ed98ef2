"""Gradients of layer scale, from those of the weight and bias that it was multiplied into."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layer_scale_backward_kernel(
    grad_ptr, weight_ptr, scale_ptr, bias_ptr, grad_bias_ptr, grad_scale_ptr, num_rows, num_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """With W' = diag(γ)·W and b' = γ·b: grad_W = diag(γ)·grad_W', grad_b = γ·grad_b', grad_γ = Σ W·grad_W' + b·grad_b'.

    Reads W (num_rows, num_cols), γ (num_rows,) and b (num_rows,) fp32. Replaces grad (num_rows, num_cols) and
    grad_bias (num_rows,) fp32 by the gradients of W and b, and writes grad_scale (num_rows,) fp32.
    One program per BLOCK_ROWS rows.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    scale = tl.load(scale_ptr + rows, row_mask, 0.0)
    grad_bias = tl.load(grad_bias_ptr + rows, row_mask, 0.0)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, num_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = row_mask[:, None] & (cols < num_cols)[None, :]
        offsets = rows[:, None] * num_cols + cols[None, :]
        grad = tl.load(grad_ptr + offsets, mask, 0.0)
        acc += grad * tl.load(weight_ptr + offsets, mask, 0.0)
        tl.store(grad_ptr + offsets, grad * scale[:, None], mask)
    grad_scale = tl.sum(acc, axis=1) + grad_bias * tl.load(bias_ptr + rows, row_mask, 0.0)
    tl.store(grad_scale_ptr + rows, grad_scale, row_mask)
    tl.store(grad_bias_ptr + rows, grad_bias * scale, row_mask)
