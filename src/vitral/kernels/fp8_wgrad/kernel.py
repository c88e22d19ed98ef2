"""Tokens' numbers column by column, as FP8: what the gradients of weights are products of. Triton kernels.

A product of 8-bit numbers sums along what lies side by side; a weight's gradient sums over tokens, which lie one below
the other. So the matrices are written once more, turned: N×M, four tokens of a column as one word.

In such a sum tokens cannot have scales of their own. That of a token's gradient, as a share of the largest, goes into
what the gradient is multiplied with, or half of it into each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.layernorm_gelu.gelu import INTERPRETED, _gelu


@triton.jit
def shares(scales, top, out, M, BLOCK: tl.constexpr):
    """Of the rows' scales in the largest; a power of two about its root, which rounds nothing; and the rest."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(scales + rows, rows < M, 1.0) / tl.load(top)
    root = tl.minimum(tl.exp2(tl.ceil(0.5 * tl.log2(tl.maximum(share, 1e-30)))), 1.0)  # x / x may be more than 1
    tl.store(out + rows, share, rows < M)
    tl.store(out + M + rows, root, rows < M)
    tl.store(out + 2 * M + rows, share / root, rows < M)


@triton.jit
def _word(a, b, c, d):
    """Four numbers as FP8, the first in the lowest byte.

    In assembler: two instructions, and Triton's own way, byte by byte, gave wrong words on a GPU for numbers that are
    stored as FP8 besides, although the assembler that it had written was right.
    """
    if INTERPRETED:
        return _byte(a, 0) | _byte(b, 1) | _byte(c, 2) | _byte(d, 3)
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
             cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
             cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
             mov.b32 $0, {low, high}; }""",
        "=r,r,r,r,r", (a, b, c, d), tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _byte(x, n: tl.constexpr):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * n)


@triton.jit
def _store_columns(out, word, first, begin, M, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of words whose first column and first four tokens these are."""
    columns, fours = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    inside = (first + columns < N)[:, None] & (begin + fours < M // 4)[None, :]
    place = out + first.to(tl.int64) * (M // 4) + begin
    tl.store(place + columns[:, None] * (M // 4) + fours[None, :], tl.trans(word), inside)


@triton.jit
def turned(x, root, out, M, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """FP8, each row times a power of two, if there is one."""
    begin, first = tl.program_id(0) * ROWS, tl.program_id(1) * BLOCK
    rows, columns = 4 * (begin + tl.arange(0, ROWS)), first + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    four = ()
    for n in tl.static_range(4):
        y = tl.load(x + at + n * N, inside, 0.0).to(tl.float32)
        four += (y if root is None else y * tl.load(root + rows + n, rows < M, 0.0)[:, None],)
    _store_columns(out, _word(*four), first, begin, M, N, ROWS, BLOCK)


@triton.jit
def normed(
    x, stats, weight, shift, share, scale, out, M,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A layer norm once more, each row times its share."""
    begin, first = tl.program_id(0) * ROWS, tl.program_id(1) * BLOCK
    rows, columns = 4 * (begin + tl.arange(0, ROWS)), first + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    grow = 1.0 / tl.load(scale)
    gain = tl.load(weight + columns, columns < N, 0.0)[None, :]
    offset = tl.load(shift + columns, columns < N, 0.0)[None, :]
    four = ()
    for n in tl.static_range(4):
        mean = tl.load(stats + rows + n, rows < M, 0.0)[:, None]
        spread = tl.load(stats + M + rows + n, rows < M, 0.0)[:, None]
        times = (tl.load(share + rows + n, rows < M, 0.0) * grow)[:, None]
        y = (tl.load(x + at + n * N, inside, 0.0).to(tl.float32) - mean) * spread * gain + offset
        four += (y * times,)
    _store_columns(out, _word(*four), first, begin, M, N, ROWS, BLOCK)


@triton.jit
def gelu_back(
    h, bias, dg, given, steep, rest, scale, small, scales, dh_columns, g_columns, sums, M,
    N: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`kernels.act_back` with what it gives as FP8 alone: the gradient of h both ways, GELU by columns.

    A row of `dg` is a product of a row whose scale is `given`; its gradient's is that times `steep`.
    """
    first = tl.program_id(1) * BLOCK
    across, down = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    known = first + across < N
    offset = tl.load(bias + first + across, known, 0.0)
    wider, grow = tl.load(steep), 1.0 / tl.load(scale)
    place = down[:, None] * (4 * N) + across[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M // 4, ROWS), tl.num_programs(0)):
        begin = tile * ROWS
        there = begin + down < M // 4
        inside = there[:, None] & known[None, :]
        at = (4 * begin).to(tl.int64) * N + first
        read = ()
        for n in tl.static_range(4):  # all at once: behind a store, none would be fetched ahead
            read += (tl.load(h + at + n * N + place, inside, 0.0), tl.load(dg + at + n * N + place, inside, 0.0))
        dh = ()
        g = ()
        for n in tl.static_range(4):
            rows = 4 * (begin + down) + n
            y, slope = _gelu(read[2 * n].to(tl.float32) + offset[None, :], TANH)
            d = read[2 * n + 1].to(tl.float32) * slope
            total += d
            own = tl.maximum(tl.load(given + rows, there, 1.0) * wider, 1e-30)
            if tl.program_id(1) == 0:
                tl.store(scales + rows, own, there)
            d *= (1.0 / own)[:, None]
            tl.store(small + at + n * N + place, d.to(tl.float8e4nv), inside)
            times = tl.load(rest + rows, there, 0.0) * grow
            dh += (d,)
            g += (y * times[:, None],)
        _store_columns(dh_columns, _word(*dh), first, begin, M, N, ROWS, BLOCK)
        _store_columns(g_columns, _word(*g), first, begin, M, N, ROWS, BLOCK)
    tl.store(sums + tl.program_id(0) * N + first + across, tl.sum(total, axis=0), known)
