"""All of a block that looks at one token alone, and what the next one asks, as one kernel: for narrow ViTs' answers.

A program has some tokens, whose rows fit a core, and weights pass by:

    what attention gave ─▶ projection ─▶ + tokens ─▶ norm ─▶ expand ─▶ GELU ─▶ contract ─▶ + tokens ─▶ norm ─▶ qkv

Nothing between these is written to memory: neither the hidden numbers, four times as wide as a token, nor norms. Rows
have A + B columns, powers of two, as Triton's tiles have: 192 are 128 + 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.fused.kernels import _gelu


@triton.jit
def _tile(matrix, row, column, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    return tl.load(matrix + rows[:, None] * STEP + columns[None, :])


@triton.jit
def _tokens(x, rows, column, M, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(x + rows[:, None] * STEP + column + tl.arange(0, COLUMNS)[None, :], (rows < M)[:, None], 0.0)


@triton.jit
def _product(xa, xb, weight, j, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """With N rows of a matrix of weights."""
    y = tl.dot(xa, tl.trans(_tile(weight, j, 0, A + B, N, A)))
    if B:
        y = tl.dot(xb, tl.trans(_tile(weight, j, A, A + B, N, B)), y)
    return y


@triton.jit
def _vector(x, start, COUNT: tl.constexpr):
    return tl.load(x + start + tl.arange(0, COUNT)).to(tl.float32)[None, :]


@triton.jit
def _normed(xa, xb, gain, shift, eps, A: tl.constexpr, B: tl.constexpr, number):
    total = tl.sum(xa, axis=1)
    if B:
        total += tl.sum(xb, axis=1)
    xa -= (total / (A + B))[:, None]
    squares = tl.sum(xa * xa, axis=1)
    if B:
        xb -= (total / (A + B))[:, None]
        squares += tl.sum(xb * xb, axis=1)
    spread = tl.rsqrt(squares / (A + B) + eps)[:, None]
    ya = (xa * spread * _vector(gain, 0, A) + _vector(shift, 0, A)).to(number)
    yb = ya
    if B:
        yb = (xb * spread * _vector(gain, A, B) + _vector(shift, A, B)).to(number)
    return ya, yb


@triton.jit
def rows(
    o, z, out, qkv, project, project_bias, gain2, shift2, expand, expand_bias, contract, contract_bias, gain1, shift1,
    ask, ask_bias, M, eps2, eps1,
    A: tl.constexpr, B: tl.constexpr, H: tl.constexpr, TANH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = A + B
    number = out.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    xa = _tokens(z, at, 0, M, D, A).to(tl.float32) + _vector(project_bias, 0, A)
    xb = xa
    if B:
        xb = _tokens(z, at, A, M, D, B).to(tl.float32) + _vector(project_bias, A, B)
    for j in tl.range(0, D, N, num_stages=STAGES):
        given = _tokens(o, at, j, M, D, N)
        xa = tl.dot(given, tl.trans(_tile(project, 0, j, D, A, N)), xa)
        if B:
            xb = tl.dot(given, tl.trans(_tile(project, A, j, D, B, N)), xb)
    xa, xb = xa.to(number).to(tl.float32), xb.to(number).to(tl.float32)
    ya, yb = _normed(xa, xb, gain2, shift2, eps2, A, B, number)
    xa += _vector(contract_bias, 0, A)
    if B:
        xb += _vector(contract_bias, A, B)
    for j in tl.range(0, H, N, num_stages=STAGES):
        h = _product(ya, yb, expand, j, A, B, N) + _vector(expand_bias, j, N)
        g = _gelu(h, TANH)[0].to(number)
        xa = tl.dot(g, tl.trans(_tile(contract, 0, j, H, A, N)), xa)
        if B:
            xb = tl.dot(g, tl.trans(_tile(contract, A, j, H, B, N)), xb)
    here = (at < M)[:, None]
    left = at[:, None] * D + tl.arange(0, A)[None, :]
    tl.store(out + left, xa.to(number), here)
    if B:
        tl.store(out + at[:, None] * D + A + tl.arange(0, B)[None, :], xb.to(number), here)
    xa, xb = xa.to(number).to(tl.float32), xb.to(number).to(tl.float32)
    ya, yb = _normed(xa, xb, gain1, shift1, eps1, A, B, number)
    for j in tl.range(0, 3 * D, N, num_stages=STAGES):
        asked = _product(ya, yb, ask, j, A, B, N)
        if BIAS:
            asked += _vector(ask_bias, j, N)
        tl.store(qkv + at[:, None] * (3 * D) + j + tl.arange(0, N)[None, :], asked.to(number), here)
