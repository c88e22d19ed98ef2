"""Attention of 65 to 256 tokens, forwards and backwards: Triton kernels for a GPU.

A program has 64 queries of a head, and its keys and values pass by; backwards another has 64 keys, and the queries pass
by: two products more than if both were one, but no sum leaves the registers. Queries, keys and values are read where
a product left them, token by token, and their gradients are written the same way. What passes by does so in pieces of
a power of two, the last one as small as the rest allows: 197 are 6·32 + 16. Of the softmax only the logarithm of its
sum is kept, to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.layernorm_gelu.kernel import TOP

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(
    x, start, STEP: tl.constexpr, T: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows of a head, STEP apart. Where all of them are known to be there, nothing is asked."""
    rows, columns = start + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = x + rows[:, None] * STEP + columns[None, :]
    if WHOLE and d == COLUMNS:
        return tl.load(at)
    return tl.load(at, (rows < T)[:, None] & (columns < d)[None, :], 0.0)


@triton.jit
def _store(
    x, y, start, STEP: tl.constexpr, T: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    rows, columns = start + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = x + rows[:, None] * STEP + columns[None, :]
    if WHOLE and d == COLUMNS:
        tl.store(at, y.to(x.dtype.element_ty))
    else:
        tl.store(at, y.to(x.dtype.element_ty), (rows < T)[:, None] & (columns < d)[None, :])


@triton.jit
def _load_each(x, start, other, T: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """A number for each token."""
    tokens = start + tl.arange(0, ROWS)
    if WHOLE:
        return tl.load(x + tokens)
    return tl.load(x + tokens, tokens < T, other)


@triton.jit
def _store_each(x, y, start, T: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    tokens = start + tl.arange(0, ROWS)
    if WHOLE:
        tl.store(x + tokens, y)
    else:
        tl.store(x + tokens, y, tokens < T)


@triton.jit
def _place(T: tl.constexpr, H: tl.constexpr, M: tl.constexpr):
    """Of this program: which head of all, its image, its place there, and the first of its tokens."""
    cuts: tl.constexpr = (T + M - 1) // M
    which = tl.program_id(0) // cuts
    return which.to(tl.int64), (which // H).to(tl.int64), which % H, tl.program_id(0) % cuts * M


@triton.jit
def _attend_step(q, k, v, most, sums, o, start, scale, T: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if not WHOLE:
        scores = tl.where((start + tl.arange(0, N) < T)[None, :], scores, -float("inf"))
    now = tl.maximum(most, tl.max(scores, axis=1) * scale)
    shares = tl.exp2(scores * scale - now[:, None])
    shrink = tl.exp2(most - now)
    sums = sums * shrink + tl.sum(shares, axis=1)
    return now, sums, tl.dot(shares.to(v.dtype), v, o * shrink[:, None])


@triton.jit
def _attend(
    q, k, v, o, lse, scales, norms, bound, scale,
    T: tl.constexpr, H: tl.constexpr, d: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    which, image, head, start = _place(T, H, M)
    q += image * T * STEP + head * d
    k += image * T * STEP + head * d
    v += image * T * 3 * H * d + head * d
    o += image * T * H * d + head * d
    scale *= LOG2E
    queries = _load(q, start, STEP, T, d, M, COLUMNS, WHOLE)
    most = tl.full((M,), -float("inf"), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, COLUMNS), tl.float32)
    for j in tl.range(0, T // N * N, N, num_stages=STAGES):
        keys = _load(k, j, STEP, T, d, N, COLUMNS, True)
        values = _load(v, j, 3 * H * d, T, d, N, COLUMNS, True)
        most, sums, out = _attend_step(queries, keys, values, most, sums, out, j, scale, T, N, True)
    if REST:
        last: tl.constexpr = T // N * N
        keys = _load(k, last, STEP, T, d, REST, COLUMNS, False)
        values = _load(v, last, 3 * H * d, T, d, REST, COLUMNS, False)
        most, sums, out = _attend_step(queries, keys, values, most, sums, out, last, scale, T, REST, False)
    if FP8:  # a mean of values is no larger than the largest of them, and that than the bound of an image's values
        tokens = tl.arange(0, TOKENS)
        longest = tl.max(tl.load(norms + image * T + tokens, tokens < T, 0.0), axis=0)
        unit = tl.maximum(longest * tl.load(bound) + tl.load(bound + 1), 1e-12) / TOP
        sums *= unit
        if head == 0:
            _store_each(scales + image * T, tl.zeros((M,), tl.float32) + unit, start, T, M, WHOLE)
    else:
        _store_each(lse + which * T, most + tl.log2(sums), start, T, M, WHOLE)
    _store(o, out / sums[:, None], start, H * d, T, d, M, COLUMNS, WHOLE)


@triton.jit
def attend(
    q, k, v, o, lse, scales, norms, bound, scale,
    T: tl.constexpr, H: tl.constexpr, d: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What M queries of a head get, and the logarithms of their sums; or the first as FP8, with one scale an image."""
    if tl.program_id(0) % ((T + M - 1) // M) < T // M:
        _attend(
            q, k, v, o, lse, scales, norms, bound, scale,
            T, H, d, STEP, COLUMNS, M, N, REST, STAGES, FP8, TOKENS, True,
        )  # fmt: skip
    elif T % M:
        _attend(
            q, k, v, o, lse, scales, norms, bound, scale,
            T, H, d, STEP, COLUMNS, M, N, REST, STAGES, FP8, TOKENS, False,
        )  # fmt: skip


# Backwards. With p the shares, o = p·v and δ = Σ do·o over a token's columns:
# dv = pᵀ·do,  ds = p·(do·vᵀ − δ),  dq = ds·k/√d,  dk = dsᵀ·q/√d.


@triton.jit
def _queries_step(q, k, v, do, lse, delta, dq, start, scale, T: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    shares = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if not WHOLE:  # else 0·∞ might appear
        shares = tl.where((start + tl.arange(0, N) < T)[None, :], shares, 0.0)
    dscores = shares * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq)


@triton.jit
def _queries_back(
    q, k, v, o, do, lse, delta, dqkv, scale,
    T: tl.constexpr, H: tl.constexpr, d: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    which, image, head, start = _place(T, H, M)
    q += image * T * STEP + head * d
    k += image * T * STEP + head * d
    v += image * T * 3 * H * d + head * d
    o += image * T * H * d + head * d
    do += image * T * H * d + head * d
    queries = _load(q, start, STEP, T, d, M, COLUMNS, WHOLE)
    pulls = _load(do, start, H * d, T, d, M, COLUMNS, WHOLE)
    got = _load(o, start, H * d, T, d, M, COLUMNS, WHOLE)
    deltas = tl.sum(pulls.to(tl.float32) * got.to(tl.float32), axis=1)
    _store_each(delta + which * T, deltas, start, T, M, WHOLE)
    sums = _load_each(lse + which * T, start, float("inf"), T, M, WHOLE)
    out = tl.zeros((M, COLUMNS), tl.float32)
    for j in tl.range(0, T // N * N, N, num_stages=STAGES):
        keys = _load(k, j, STEP, T, d, N, COLUMNS, True)
        values = _load(v, j, 3 * H * d, T, d, N, COLUMNS, True)
        out = _queries_step(queries, keys, values, pulls, sums, deltas, out, j, scale * LOG2E, T, N, True)
    if REST:
        last: tl.constexpr = T // N * N
        keys = _load(k, last, STEP, T, d, REST, COLUMNS, False)
        values = _load(v, last, 3 * H * d, T, d, REST, COLUMNS, False)
        out = _queries_step(queries, keys, values, pulls, sums, deltas, out, last, scale * LOG2E, T, REST, False)
    _store(dqkv + image * T * 3 * H * d + head * d, out * scale, start, 3 * H * d, T, d, M, COLUMNS, WHOLE)


@triton.jit
def queries_back(
    q, k, v, o, do, lse, delta, dqkv, scale,
    T: tl.constexpr, H: tl.constexpr, d: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of M queries of a head, and their δ."""
    if tl.program_id(0) % ((T + M - 1) // M) < T // M:
        _queries_back(q, k, v, o, do, lse, delta, dqkv, scale, T, H, d, STEP, COLUMNS, M, N, REST, STAGES, True)
    elif T % M:
        _queries_back(q, k, v, o, do, lse, delta, dqkv, scale, T, H, d, STEP, COLUMNS, M, N, REST, STAGES, False)


@triton.jit
def _keys_step(q, k, v, do, lse, delta, dk, dv, scale):
    """Across: keys are rows, queries columns. Those that are not there have an infinite sum, hence no share."""
    shares = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    dv = tl.dot(shares.to(k.dtype), do, dv)
    dscores = shares * (tl.dot(v, tl.trans(do)) - delta[None, :])
    return tl.dot(dscores.to(k.dtype), q, dk), dv


@triton.jit
def _keys_back(
    q, k, v, do, lse, delta, dqkv, scale,
    T: tl.constexpr, H: tl.constexpr, d: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    which, image, head, start = _place(T, H, M)
    q += image * T * STEP + head * d
    k += image * T * STEP + head * d
    v += image * T * 3 * H * d + head * d
    do += image * T * H * d + head * d
    dqkv += image * T * 3 * H * d + head * d
    lse += which * T
    delta += which * T
    keys = _load(k, start, STEP, T, d, M, COLUMNS, WHOLE)
    values = _load(v, start, 3 * H * d, T, d, M, COLUMNS, WHOLE)
    dkeys = tl.zeros((M, COLUMNS), tl.float32)
    dvalues = tl.zeros((M, COLUMNS), tl.float32)
    for i in tl.range(0, T // N * N, N, num_stages=STAGES):
        queries = _load(q, i, STEP, T, d, N, COLUMNS, True)
        pulls = _load(do, i, H * d, T, d, N, COLUMNS, True)
        sums, deltas = _load_each(lse, i, 0.0, T, N, True), _load_each(delta, i, 0.0, T, N, True)
        dkeys, dvalues = _keys_step(queries, keys, values, pulls, sums, deltas, dkeys, dvalues, scale * LOG2E)
    if REST:
        last: tl.constexpr = T // N * N
        queries = _load(q, last, STEP, T, d, REST, COLUMNS, False)
        pulls = _load(do, last, H * d, T, d, REST, COLUMNS, False)
        sums, deltas = _load_each(lse, last, float("inf"), T, REST, False), _load_each(delta, last, 0.0, T, REST, False)
        dkeys, dvalues = _keys_step(queries, keys, values, pulls, sums, deltas, dkeys, dvalues, scale * LOG2E)
    _store(dqkv + H * d, dkeys * scale, start, 3 * H * d, T, d, M, COLUMNS, WHOLE)
    _store(dqkv + 2 * H * d, dvalues, start, 3 * H * d, T, d, M, COLUMNS, WHOLE)


@triton.jit
def keys_back(
    q, k, v, do, lse, delta, dqkv, scale,
    T: tl.constexpr, H: tl.constexpr, d: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of M keys of a head and of their values, after `queries_back`."""
    if tl.program_id(0) % ((T + M - 1) // M) < T // M:
        _keys_back(q, k, v, do, lse, delta, dqkv, scale, T, H, d, STEP, COLUMNS, M, N, REST, STAGES, True)
    elif T % M:
        _keys_back(q, k, v, do, lse, delta, dqkv, scale, T, H, d, STEP, COLUMNS, M, N, REST, STAGES, False)


@triton.jit
def cast(
    x, small, scales, sums, M,
    N: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Rows as FP8, each with its scale, and the sums over rows. A row is read once, as PIECES of COLUMNS.

    The scale is from the row's length, which no number of it exceeds: its range is FP8's to lose.
    """
    columns = tl.arange(0, COLUMNS)
    totals = ()
    for _ in tl.static_range(PIECES):
        totals += (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = rows[:, None] * N + columns[None, :]
        read = ()
        for piece in tl.static_range(PIECES):
            inside = (rows < M)[:, None] & (piece * COLUMNS + columns < N)[None, :]
            read += (tl.load(x + at + piece * COLUMNS, inside, 0.0),)
        if SUMS:
            added = ()
            for piece in tl.static_range(PIECES):
                added += (totals[piece] + read[piece].to(tl.float32),)
            totals = added
        if FP8:
            squares = tl.zeros((ROWS, COLUMNS), tl.float32)
            for piece in tl.static_range(PIECES):
                y = read[piece].to(tl.float32)
                squares += y * y
            scale = tl.maximum(tl.sqrt(tl.sum(squares, axis=1)), 1e-12) / TOP
            tl.store(scales + rows, scale, rows < M)
            grow = (1.0 / scale)[:, None]
            for piece in tl.static_range(PIECES):
                inside = (rows < M)[:, None] & (piece * COLUMNS + columns < N)[None, :]
                y = (read[piece].to(tl.float32) * grow).to(tl.float8e4nv)
                tl.store(small + at + piece * COLUMNS, y, inside)
    if SUMS:
        for piece in tl.static_range(PIECES):
            place = piece * COLUMNS + columns
            tl.store(sums + tl.program_id(0) * N + place, tl.sum(totals[piece], axis=0), place < N)
