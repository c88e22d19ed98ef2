"""FP8 (e4m3) quantization: one scale per row, chosen from a bound so that no value overflows.

Activations are scaled by the Euclidean norm of their row, which bounds every value of the row and needs no maximum.
The norm also bounds the rows of a later GEMM: |x·w| <= |x|·|w|.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)  # largest finite e4m3 value


@triton.jit
def store_rows_fp8(out_ptr, scale_ptr, row_norm_ptr, offsets, rows, mask, y, num_rows):
    """Store the rows of y as FP8 with their scales |y|/448, and the norms |y| that bound later GEMMs."""
    row_norm = tl.sqrt(tl.sum(y * y, axis=1)) + 1e-12
    tl.store(row_norm_ptr + rows, row_norm, rows < num_rows)
    scale = row_norm / FP8_MAX
    tl.store(scale_ptr + rows, scale, rows < num_rows)
    tl.store(out_ptr + offsets, (y * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask)


@triton.jit
def scale_from_gemm_bound(row_norm_ptrs, mask, weight_bound_ptr):
    """Scale for rows of GELU(x·Wᵀ + bias): |x|·max|w| + max|bias|, over 448.

    weight_bound_ptr points to two values: the largest row norm of W and the largest |bias|.
    """
    bound = tl.load(row_norm_ptrs, mask, 1.0) * tl.load(weight_bound_ptr) + tl.load(weight_bound_ptr + 1)
    return tl.maximum(bound, 1e-12) / FP8_MAX  # weights may be initialised to zero


@triton.jit
def quantize_weight_kernel(
    weight_ptr, bias_ptr, out_ptr, scale_ptr, bound_ptr, num_rows, num_cols, stride_wn, stride_wk,
    HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = fp8(W / scale) with scale = max|row| / 448, for W or, through its strides, the transpose of W.

    Reads W (num_rows, num_cols) fp32 or bf16 twice and bias (num_rows,) once. Writes out (num_rows, num_cols) e4m3,
    scale (num_rows,) fp32 and, by atomic maximum into two zeros, bound = (largest row norm, largest |bias|) fp32.
    One program per BLOCK_ROWS rows.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    abs_max = tl.zeros((BLOCK_ROWS,), tl.float32)
    sum_sq = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, num_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        w = tl.load(weight_ptr + rows[:, None] * stride_wn + cols[None, :] * stride_wk, mask, 0.0).to(tl.float32)
        abs_max = tl.maximum(abs_max, tl.max(tl.abs(w), axis=1))
        sum_sq += tl.sum(w * w, axis=1)
    tl.atomic_max(bound_ptr, tl.sqrt(tl.max(sum_sq, axis=0)))
    if HAS_BIAS:
        tl.atomic_max(bound_ptr + 1, tl.max(tl.abs(tl.load(bias_ptr + rows, rows < num_rows, 0.0)), axis=0))
    scale = tl.maximum(abs_max, 1e-12) / FP8_MAX
    tl.store(scale_ptr + rows, scale, rows < num_rows)
    for start in range(0, num_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        w = tl.load(weight_ptr + rows[:, None] * stride_wn + cols[None, :] * stride_wk, mask, 0.0).to(tl.float32)
        out_ptrs = out_ptr + rows[:, None] * num_cols + cols[None, :]
        tl.store(out_ptrs, (w * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask)


@triton.jit
def quantize_with_scales_kernel(
    weight_ptr, scale_ptr, out_ptr, num_rows, num_cols, stride_wn, stride_wk,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = fp8(W / scale) with given scales of the rows, for W or, through its strides, the transpose of W.

    Reads W (num_rows, num_cols) fp32 and scale (num_rows,) fp32 once. Writes out (num_rows, num_cols) e4m3. One program
    per BLOCK_ROWS rows.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    scale = tl.load(scale_ptr + rows, rows < num_rows, 1.0)
    for start in range(0, num_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        w = tl.load(weight_ptr + rows[:, None] * stride_wn + cols[None, :] * stride_wk, mask, 0.0).to(tl.float32)
        out_ptrs = out_ptr + rows[:, None] * num_cols + cols[None, :]
        tl.store(out_ptrs, (w * (1.0 / scale)[:, None]).to(tl.float8e4nv), mask)


@triton.jit
def quantize_and_sum_kernel(
    x_ptrs, out_ptr, scale_ptr, partial_sum_ptr, num_rows,
    NUM_COLS: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SUM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """out = fp8(x / scale) with scale = |row| / 448, and partial_sum = sum of x over this program's rows.

    x (num_rows, NUM_COLS) bf16 consists of matrices of equal width side by side, x_ptrs. It is read once, as NUM_BLOCKS
    blocks of columns held in registers. Writes out (num_rows, NUM_COLS) e4m3 and scale (num_rows,) fp32 if FP8,
    partial_sum (num_programs, NUM_COLS) fp32 if SUM.
    """
    NUM_PARTS: tl.constexpr = len(x_ptrs)
    PART_COLS: tl.constexpr = NUM_COLS // NUM_PARTS
    BLOCKS_PER_PART: tl.constexpr = NUM_BLOCKS // NUM_PARTS
    cols = tl.arange(0, BLOCK_COLS)
    acc = ()
    for _ in tl.static_range(NUM_BLOCKS):
        acc += (tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32),)
    for row_block in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = (row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        x = ()
        for block in tl.static_range(NUM_BLOCKS):
            part_cols = block % BLOCKS_PER_PART * BLOCK_COLS + cols
            mask = (rows < num_rows)[:, None] & (part_cols < PART_COLS)[None, :]
            x += (
                tl.load(x_ptrs[block // BLOCKS_PER_PART] + rows[:, None] * PART_COLS + part_cols[None, :], mask, 0.0),
            )
        if SUM:
            new_acc = ()
            for block in tl.static_range(NUM_BLOCKS):
                new_acc += (acc[block] + x[block].to(tl.float32),)
            acc = new_acc
        if FP8:
            squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
            for block in tl.static_range(NUM_BLOCKS):
                y = x[block].to(tl.float32)
                squares += y * y
            scale = tl.maximum(tl.sqrt(tl.sum(squares, axis=1)), 1e-12) / FP8_MAX
            tl.store(scale_ptr + rows, scale, rows < num_rows)
            inv_scale = (1.0 / scale)[:, None]
            offsets = rows[:, None] * NUM_COLS + cols[None, :]
            for block in tl.static_range(NUM_BLOCKS):
                mask = (rows < num_rows)[:, None] & (block * BLOCK_COLS + cols < NUM_COLS)[None, :]
                y = (x[block].to(tl.float32) * inv_scale).to(tl.float8e4nv)
                tl.store(out_ptr + offsets + block * BLOCK_COLS, y, mask)
    if SUM:
        for block in tl.static_range(NUM_BLOCKS):
            out_cols = block * BLOCK_COLS + cols
            out_ptrs = partial_sum_ptr + tl.program_id(0) * NUM_COLS + out_cols
            tl.store(out_ptrs, tl.sum(acc[block], axis=0), out_cols < NUM_COLS)
