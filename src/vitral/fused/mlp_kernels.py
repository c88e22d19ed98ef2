"""The MLP's products with GELU at their end, while the numbers are still in registers: Triton kernels for a GPU.

A product of our own computes more slowly than a library's; where rows are short, writing takes longer than computing.
Rows are tokens. ROWS × COLUMNS of the result are one program's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.fused.kernels import _gelu


@triton.jit
def _product(
    a, b, rows, columns, M, across, down,
    K: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """a·b of these rows and columns: a is M×K, b has `down` numbers from row to row, `across` from column to column."""
    deep = tl.arange(0, DEEP)
    left = a + rows[:, None] * K + deep[None, :]
    right = b + deep[:, None] * down + columns[None, :] * across
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, K, DEEP):
        total = tl.dot(tl.load(left, (rows < M)[:, None], 0.0), tl.load(right), total)
        left += DEEP
        right += DEEP * down
    return total


@triton.jit
def expand(
    x, w, bias, h, g, M,
    N: tl.constexpr, K: tl.constexpr, TANH: tl.constexpr, KEEP: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """h = x·wᵀ, where it is to be kept, and GELU(h + bias)."""
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rounded = _product(x, w, rows, columns, M, K, 1, K, DEEP, ROWS, COLUMNS).to(g.dtype.element_ty)
    at, inside = rows[:, None] * N + columns[None, :], (rows < M)[:, None]
    if KEEP:
        tl.store(h + at, rounded, inside)
    y, _ = _gelu(rounded.to(tl.float32) + tl.load(bias + columns)[None, :], TANH)
    tl.store(g + at, y.to(g.dtype.element_ty), inside)


@triton.jit
def contract_back(
    df, w, bias, h, g, dh, sums, M,
    N: tl.constexpr, K: tl.constexpr, TANH: tl.constexpr, AGAIN: tl.constexpr, DEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of h, from that of GELU(h + bias)·wᵀ; these rows' sums of it; and GELU AGAIN, if it was not kept."""
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dg = _product(df, w, rows, columns, M, 1, N, K, DEEP, ROWS, COLUMNS)
    at, inside = rows[:, None] * N + columns[None, :], (rows < M)[:, None]
    y, slope = _gelu(tl.load(h + at, inside, 0.0).to(tl.float32) + tl.load(bias + columns)[None, :], TANH)
    if AGAIN:
        tl.store(g + at, y.to(g.dtype.element_ty), inside)
    d = dg * slope
    tl.store(dh + at, d.to(dh.dtype.element_ty), inside)
    tl.store(sums + tl.program_id(1) * N + columns, tl.sum(d, axis=0))
