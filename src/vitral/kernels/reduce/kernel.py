"""Column sums of several matrices in one launch: the second stage of every reduction over tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def select_from_tuple(values, index, COUNT: tl.constexpr):
    """values[index], for an index that is known only at run time."""
    selected = values[0]
    for n in tl.static_range(1, COUNT):
        selected = tl.where(index == n, values[n], selected)
    return selected


@triton.jit
def column_sums_kernel(
    matrix_ptrs, out_ptrs, num_rows, num_cols,
    COUNT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out[n] = matrix[n].sum(0) for each of COUNT matrices, always added in the same order.

    Reads matrix[n] (num_rows[n], num_cols[n]) fp32, contiguous; writes out[n] (num_cols[n],) fp32.
    The tuple num_rows holds floats: Triton would specialise integers on divisibility by 16 and compile again.
    Grid: (column blocks of the widest matrix, COUNT).
    """
    n = tl.program_id(1)
    rows_end = select_from_tuple(num_rows, n, COUNT).to(tl.int32)
    cols_end = select_from_tuple(num_cols, n, COUNT)
    matrix_ptr = select_from_tuple(matrix_ptrs, n, COUNT)
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    if tl.program_id(0) * BLOCK_COLS < cols_end:
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for start in range(0, rows_end, BLOCK_ROWS):
            rows = start + tl.arange(0, BLOCK_ROWS)
            mask = (rows < rows_end)[:, None] & (cols < cols_end)[None, :]
            acc += tl.load(matrix_ptr + rows[:, None] * cols_end + cols[None, :], mask, 0.0)
        tl.store(select_from_tuple(out_ptrs, n, COUNT) + cols, tl.sum(acc, axis=0), cols < cols_end)
