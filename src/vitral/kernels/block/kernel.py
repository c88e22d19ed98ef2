"""All of a block that looks at one token alone, and what the next one asks, as one kernel: for narrow ViTs.

A program has some tokens, whose rows fit a core, and weights pass by:

    what attention gave ─▶ projection ─▶ + tokens ─▶ norm ─▶ expand ─▶ GELU ─▶ contract ─▶ + tokens ─▶ norm ─▶ qkv

Of what lies between, answers write nothing to memory: neither the hidden numbers, four times as wide as a token, nor
norms. Training keeps of it what the way back needs. Rows have A + B columns, powers of two, as Triton's tiles have: 192
are 128 + 64. In FP8, one kernel has the expansion and GELU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.layernorm_gelu.gelu import _gelu, _gelu_small
from vitral.kernels.layernorm_gelu.kernel import _bounded


@triton.jit
def _tile(matrix, row, column, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    return tl.load(matrix + rows[:, None] * STEP + columns[None, :])


@triton.jit
def _tokens(x, rows, column, left, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(x + rows[:, None] * STEP + column + tl.arange(0, COLUMNS)[None, :], (rows < left)[:, None], 0.0)


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
def _normed(
    xa, xb, gain, shift, eps, stats, at, left, M, A: tl.constexpr, B: tl.constexpr, KEEP: tl.constexpr, number
):  # fmt: skip
    mean = tl.sum(xa, axis=1)
    if B:
        mean += tl.sum(xb, axis=1)
    mean /= A + B
    xa -= mean[:, None]
    squares = tl.sum(xa * xa, axis=1)
    if B:
        xb -= mean[:, None]
        squares += tl.sum(xb * xb, axis=1)
    spread = tl.rsqrt(squares / (A + B) + eps)
    if KEEP:
        tl.store(stats + at, mean, at < left)
        tl.store(stats + M + at, spread, at < left)
    ya = (xa * spread[:, None] * _vector(gain, 0, A) + _vector(shift, 0, A)).to(number)
    yb = ya
    if B:
        yb = (xb * spread[:, None] * _vector(gain, A, B) + _vector(shift, A, B)).to(number)
    return ya, yb


@triton.jit
def _store(x, xa, xb, at, left, A: tl.constexpr, B: tl.constexpr):
    here = (at < left)[:, None]
    tl.store(x + at[:, None] * (A + B) + tl.arange(0, A)[None, :], xa.to(x.dtype.element_ty), here)
    if B:
        tl.store(x + at[:, None] * (A + B) + A + tl.arange(0, B)[None, :], xb.to(x.dtype.element_ty), here)


@triton.jit
def rows(
    o, z, out, qkv, project, project_bias, gain2, shift2, expand, expand_bias, contract, contract_bias, gain1, shift1,
    ask, ask_bias, middle, hidden, stats2, stats1, M, eps2, eps1,
    A: tl.constexpr, B: tl.constexpr, H: tl.constexpr, TANH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = A + B
    number = out.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * ROWS  # from here on, places are counted from this row, in 32 bits
    o += first * D
    z += first * D
    out += first * D
    qkv += first * (3 * D)
    left = M - tl.program_id(0) * ROWS
    if KEEP:
        middle += first * D
        hidden += first * H
        stats2 += first
        stats1 += first
    at = tl.arange(0, ROWS)
    xa = _tokens(z, at, 0, left, D, A).to(tl.float32) + _vector(project_bias, 0, A)
    xb = xa
    if B:
        xb = _tokens(z, at, A, left, D, B).to(tl.float32) + _vector(project_bias, A, B)
    for j in tl.range(0, D, N, num_stages=STAGES):
        given = _tokens(o, at, j, left, D, N)
        xa = tl.dot(given, tl.trans(_tile(project, 0, j, D, A, N)), xa)
        if B:
            xb = tl.dot(given, tl.trans(_tile(project, A, j, D, B, N)), xb)
    xa, xb = xa.to(number).to(tl.float32), xb.to(number).to(tl.float32)
    if KEEP:
        _store(middle, xa, xb, at, left, A, B)
    ya, yb = _normed(xa, xb, gain2, shift2, eps2, stats2, at, left, M, A, B, KEEP, number)
    xa += _vector(contract_bias, 0, A)
    if B:
        xb += _vector(contract_bias, A, B)
    here = (at < left)[:, None]
    for j in tl.range(0, H, N, num_stages=STAGES):
        h = _product(ya, yb, expand, j, A, B, N)
        if KEEP:
            tl.store(hidden + at[:, None] * H + j + tl.arange(0, N)[None, :], h.to(number), here)
        g = _gelu(h + _vector(expand_bias, j, N), TANH)[0].to(number)
        xa = tl.dot(g, tl.trans(_tile(contract, 0, j, H, A, N)), xa)
        if B:
            xb = tl.dot(g, tl.trans(_tile(contract, A, j, H, B, N)), xb)
    _store(out, xa, xb, at, left, A, B)
    xa, xb = xa.to(number).to(tl.float32), xb.to(number).to(tl.float32)
    ya, yb = _normed(xa, xb, gain1, shift1, eps1, stats1, at, left, M, A, B, KEEP, number)
    for j in tl.range(0, 3 * D, N, num_stages=STAGES):
        asked = _product(ya, yb, ask, j, A, B, N)
        if BIAS:
            asked += _vector(ask_bias, j, N)
        tl.store(qkv + at[:, None] * (3 * D) + j + tl.arange(0, N)[None, :], asked.to(number), here)


@triton.jit
def _hidden(
    product, j, bias, scale, scales, factor, out, at, left, H: tl.constexpr, TANH: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    x = product * scale * _vector(scales, j, N) + _vector(bias, j, N)
    place = out + at[:, None] * H + j + tl.arange(0, N)[None, :]
    tl.store(place, _gelu_small(x, factor, TANH), (at < left)[:, None])


@triton.jit
def expand(
    x, x_scales, norms, weight, weight_scales, most, bias, out, out_scales, M,
    A: tl.constexpr, B: tl.constexpr, H: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    CUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GELU(x·wᵀ + bias) of FP8 numbers, as such. A program has some tokens and one of CUTS parts of the columns; N at a
    time, GELU of which is computed while the next are multiplied."""
    D: tl.constexpr = A + B
    EACH: tl.constexpr = H // CUTS
    first = (tl.program_id(0) // CUTS).to(tl.int64) * ROWS
    begin = tl.program_id(0) % CUTS * EACH
    x += first * D
    out += first * H
    at, left = tl.arange(0, ROWS), M - first
    here = at < left
    xa = _tokens(x, at, 0, left, D, A)
    xb = xa
    if B:
        xb = _tokens(x, at, A, left, D, B)
    scale = tl.load(x_scales + first + at, here, 0.0)[:, None]
    own = _bounded(norms + first + at, here, most)
    if begin == 0:
        tl.store(out_scales + first + at, own, here)
    factor = (1.0 / own)[:, None]
    product = _product(xa, xb, weight, begin, A, B, N)
    for j in tl.range(begin + N, begin + EACH, N, num_stages=STAGES):
        ahead = _product(xa, xb, weight, j, A, B, N)
        _hidden(product, j - N, bias, scale, weight_scales, factor, out, at, left, H, TANH, N)
        product = ahead
    _hidden(product, begin + EACH - N, bias, scale, weight_scales, factor, out, at, left, H, TANH, N)
