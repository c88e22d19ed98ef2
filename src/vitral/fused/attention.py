"""Attention of 65 to 256 tokens, forwards and backwards: Triton kernels for a GPU, one program for each head of an image.

Queries, keys and values are read where a product left them, token by token, and their gradients are written the same
way: nothing is brought into another order. Tokens are taken in pieces of a power of two, the last one as small as the
rest allows: 197 are 3·64 + 16, not 4·64. Of the softmax only the logarithm of its sum is kept, to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(start, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return (start + tl.arange(0, ROWS))[:, None] * stride + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _inside(start, T: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return ((start + tl.arange(0, ROWS)) < T)[:, None] & (tl.arange(0, COLUMNS) < d)[None, :]


@triton.jit
def _load(
    x, start, stride, T: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr
):
    """Rows of a head. Where all of them are known to be there, nothing is asked."""
    if WHOLE and d == COLUMNS:
        return tl.load(x + _place(start, stride, ROWS, COLUMNS))
    return tl.load(x + _place(start, stride, ROWS, COLUMNS), _inside(start, T, d, ROWS, COLUMNS), 0.0)


@triton.jit
def _store(
    x, y, start, stride, T: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    at = x + _place(start, stride, ROWS, COLUMNS)
    if WHOLE and d == COLUMNS:
        tl.store(at, y.to(x.dtype.element_ty))
    else:
        tl.store(at, y.to(x.dtype.element_ty), _inside(start, T, d, ROWS, COLUMNS))


@triton.jit
def _row(x, start, other, T: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    tokens = start + tl.arange(0, ROWS)
    if WHOLE:
        return tl.load(x + tokens)
    return tl.load(x + tokens, tokens < T, other)


@triton.jit
def _store_row(x, y, start, T: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    tokens = start + tl.arange(0, ROWS)
    if WHOLE:
        tl.store(x + tokens, y)
    else:
        tl.store(x + tokens, y, tokens < T)


@triton.jit
def _pieces(
    x, stride, T: tl.constexpr, d: tl.constexpr, ROWS: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr
):
    """All rows of a head, in pieces that products find in shared memory."""
    whole: tl.constexpr = T // ROWS
    pieces = ()
    for piece in tl.static_range(whole):
        pieces = pieces + (_load(x, piece * ROWS, stride, T, d, ROWS, COLUMNS, True),)
    if REST:
        pieces = pieces + (_load(x, whole * ROWS, stride, T, d, REST, COLUMNS, False),)
    return pieces


# Forwards


@triton.jit
def _forward_step(q, k, v, most, sums, o, start, scale, T: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    scores = tl.dot(q, tl.trans(k))
    if not WHOLE:
        scores = tl.where((start + tl.arange(0, N) < T)[None, :], scores, -float("inf"))
    now = tl.maximum(most, tl.max(scores, axis=1) * scale)
    shares = tl.exp2(scores * scale - now[:, None])
    shrink = tl.exp2(most - now)
    sums = sums * shrink + tl.sum(shares, axis=1)
    o = tl.dot(shares.to(v.dtype), v, o * shrink[:, None])
    return now, sums, o


@triton.jit
def _forward_rows(
    q, k, v, o, lse, start, scale, sq, sk, sv, so,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What some queries get, with keys and values as they pass by."""
    queries = _load(q, start, sq, T, d, M, COLUMNS, WHOLE)
    most = tl.full((M,), -float("inf"), tl.float32)
    sums = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, COLUMNS), tl.float32)
    for j in tl.range(0, T // N * N, N, num_stages=STAGES):
        keys = _load(k, j, sk, T, d, N, COLUMNS, True)
        values = _load(v, j, sv, T, d, N, COLUMNS, True)
        most, sums, out = _forward_step(queries, keys, values, most, sums, out, j, scale, T, N, True)
    if REST:
        last: tl.constexpr = T // N * N
        keys = _load(k, last, sk, T, d, REST, COLUMNS, False)
        values = _load(v, last, sv, T, d, REST, COLUMNS, False)
        most, sums, out = _forward_step(queries, keys, values, most, sums, out, last, scale, T, REST, False)
    _store(o, out / sums[:, None], start, so, T, d, M, COLUMNS, WHOLE)
    _store_row(lse, most + tl.log2(sums), start, T, M, WHOLE)


@triton.jit(do_not_specialize=["H"])
def forward_loops(
    q, k, v, o, lse, H, scale, sq, sk, sv, so,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program for some queries of a head; keys and values pass by."""
    cuts: tl.constexpr = (T + M - 1) // M
    which, cut = tl.program_id(0) // cuts, tl.program_id(0) % cuts
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    lse += which.to(tl.int64) * T
    if cut < T // M:
        _forward_rows(q, k, v, o, lse, cut * M, scale, sq, sk, sv, so, T, d, COLUMNS, M, N, REST, True, STAGES)
    elif LAST:
        _forward_rows(q, k, v, o, lse, T // M * M, scale, sq, sk, sv, so, T, d, COLUMNS, LAST, N, REST, False, STAGES)


@triton.jit
def _forward_whole(
    q, keys, values, o, lse, start, scale, sq, so,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    queries = _load(q, start, sq, T, d, M, COLUMNS, WHOLE)
    count: tl.constexpr = T // N
    scores = ()
    most = tl.full((M,), -float("inf"), tl.float32)
    for piece in tl.static_range(count + (REST > 0)):
        product = tl.dot(queries, tl.trans(keys[piece]))
        if piece == count:
            product = tl.where((count * N + tl.arange(0, REST) < T)[None, :], product, -float("inf"))
        most = tl.maximum(most, tl.max(product, axis=1))
        scores = scores + (product,)
    most *= scale
    sums = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, COLUMNS), tl.float32)
    for piece in tl.static_range(count + (REST > 0)):
        shares = tl.exp2(scores[piece] * scale - most[:, None])
        sums += tl.sum(shares, axis=1)
        out = tl.dot(shares.to(queries.dtype), values[piece], out)
    _store(o, out / sums[:, None], start, so, T, d, M, COLUMNS, WHOLE)
    _store_row(lse, most + tl.log2(sums), start, T, M, WHOLE)


@triton.jit(do_not_specialize=["H"])
def forward_kept(
    q, k, v, o, lse, H, scale, sq, sk, sv, so,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program for a head, whose keys and values stay in shared memory; queries pass by."""
    which = tl.program_id(0)
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    lse += which.to(tl.int64) * T
    keys = _pieces(k, sk, T, d, N, REST, COLUMNS)
    values = _pieces(v, sv, T, d, N, REST, COLUMNS)
    for i in tl.range(0, T // M * M, M, num_stages=STAGES):
        _forward_whole(q, keys, values, o, lse, i, scale, sq, so, T, d, COLUMNS, M, N, REST, True)
    if LAST:
        _forward_whole(q, keys, values, o, lse, T // M * M, scale, sq, so, T, d, COLUMNS, LAST, N, REST, False)


# Backwards. With p the shares, o = p·v and δ = Σ do·o over a token's columns:
# dv = pᵀ·do,  ds = p·(do·vᵀ − δ),  dq = ds·k,  dk = dsᵀ·q.


@triton.jit
def _queries_step(q, k, v, do, lse, delta, dq, start, scale, T: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    shares = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if not WHOLE:  # else 0·∞ might appear
        shares = tl.where((start + tl.arange(0, N) < T)[None, :], shares, 0.0)
    dscores = shares * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq)


@triton.jit
def _queries_of(
    q, o, do, lse, delta, start, sq, so,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Some queries, the gradients of what they got, the logarithms of their sums, and δ, which is kept too."""
    queries = _load(q, start, sq, T, d, M, COLUMNS, WHOLE)
    pulls = _load(do, start, so, T, d, M, COLUMNS, WHOLE)
    got = _load(o, start, so, T, d, M, COLUMNS, WHOLE)
    deltas = tl.sum(pulls.to(tl.float32) * got.to(tl.float32), axis=1)
    _store_row(delta, deltas, start, T, M, WHOLE)
    return queries, pulls, _row(lse, start, float("inf"), T, M, WHOLE), deltas


@triton.jit
def _queries_loops(
    q, k, v, o, do, lse, delta, dq, start, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    queries, pulls, sums, deltas = _queries_of(q, o, do, lse, delta, start, sq, so, T, d, COLUMNS, M, WHOLE)
    out = tl.zeros((M, COLUMNS), tl.float32)
    for j in tl.range(0, T // N * N, N, num_stages=STAGES):
        keys = _load(k, j, sk, T, d, N, COLUMNS, True)
        values = _load(v, j, sv, T, d, N, COLUMNS, True)
        out = _queries_step(queries, keys, values, pulls, sums, deltas, out, j, scale * LOG2E, T, N, True)
    if REST:
        last: tl.constexpr = T // N * N
        keys = _load(k, last, sk, T, d, REST, COLUMNS, False)
        values = _load(v, last, sv, T, d, REST, COLUMNS, False)
        out = _queries_step(queries, keys, values, pulls, sums, deltas, out, last, scale * LOG2E, T, REST, False)
    _store(dq, out * scale, start, sd, T, d, M, COLUMNS, WHOLE)


@triton.jit
def _keys_step(q, k, v, do, lse, delta, dk, dv, scale):
    """Across: keys are rows, queries columns. Those that are not there have an infinite sum, hence no share."""
    shares = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    dv = tl.dot(shares.to(k.dtype), do, dv)
    dscores = shares * (tl.dot(v, tl.trans(do)) - delta[None, :])
    return tl.dot(dscores.to(k.dtype), q, dk), dv


@triton.jit
def _keys_loops(
    q, k, v, do, lse, delta, dk, dv, start, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    keys = _load(k, start, sk, T, d, M, COLUMNS, WHOLE)
    values = _load(v, start, sv, T, d, M, COLUMNS, WHOLE)
    dkeys = tl.zeros((M, COLUMNS), tl.float32)
    dvalues = tl.zeros((M, COLUMNS), tl.float32)
    for i in tl.range(0, T // N * N, N, num_stages=STAGES):
        queries = _load(q, i, sq, T, d, N, COLUMNS, True)
        pulls = _load(do, i, so, T, d, N, COLUMNS, True)
        sums, deltas = _row(lse, i, 0.0, T, N, True), _row(delta, i, 0.0, T, N, True)
        dkeys, dvalues = _keys_step(queries, keys, values, pulls, sums, deltas, dkeys, dvalues, scale * LOG2E)
    if REST:
        last: tl.constexpr = T // N * N
        queries = _load(q, last, sq, T, d, REST, COLUMNS, False)
        pulls = _load(do, last, so, T, d, REST, COLUMNS, False)
        sums, deltas = _row(lse, last, float("inf"), T, REST, False), _row(delta, last, 0.0, T, REST, False)
        dkeys, dvalues = _keys_step(queries, keys, values, pulls, sums, deltas, dkeys, dvalues, scale * LOG2E)
    _store(dk, dkeys * scale, start, sd, T, d, M, COLUMNS, WHOLE)
    _store(dv, dvalues, start, sd, T, d, M, COLUMNS, WHOLE)


@triton.jit(do_not_specialize=["H"])
def back_queries(
    q, k, v, o, do, lse, delta, dq, H, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq and δ. A program for some queries of a head; keys and values pass by."""
    cuts: tl.constexpr = (T + M - 1) // M
    which, cut = tl.program_id(0) // cuts, tl.program_id(0) % cuts
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    do += image * T * so + head * d
    dq += image * T * sd + head * d
    lse += which.to(tl.int64) * T
    delta += which.to(tl.int64) * T
    if cut < T // M:
        _queries_loops(
            q, k, v, o, do, lse, delta, dq, cut * M, scale, sq, sk, sv, so, sd, T, d, COLUMNS, M, N, REST, True, STAGES
        )
    elif LAST:
        _queries_loops(
            q, k, v, o, do, lse, delta, dq, T // M * M, scale, sq, sk, sv, so, sd, T, d, COLUMNS, LAST, N, REST, False,
            STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H"])
def back_keys(
    q, k, v, do, lse, delta, dk, dv, H, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv, after `back_queries`. A program for some keys of a head; queries pass by."""
    cuts: tl.constexpr = (T + M - 1) // M
    which, cut = tl.program_id(0) // cuts, tl.program_id(0) % cuts
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    do += image * T * so + head * d
    dk += image * T * sd + head * d
    dv += image * T * sd + head * d
    lse += which.to(tl.int64) * T
    delta += which.to(tl.int64) * T
    if cut < T // M:
        _keys_loops(
            q, k, v, do, lse, delta, dk, dv, cut * M, scale, sq, sk, sv, so, sd, T, d, COLUMNS, M, N, REST, True, STAGES
        )
    elif LAST:
        _keys_loops(
            q, k, v, do, lse, delta, dk, dv, T // M * M, scale, sq, sk, sv, so, sd, T, d, COLUMNS, LAST, N, REST, False,
            STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H"])
def back_loops(
    q, k, v, o, do, lse, delta, dq, dk, dv, H, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both in turn, in one program for a head: seven products, of which no sum leaves the registers."""
    which = tl.program_id(0)
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    do += image * T * so + head * d
    dq += image * T * sd + head * d
    dk += image * T * sd + head * d
    dv += image * T * sd + head * d
    lse += which.to(tl.int64) * T
    delta += which.to(tl.int64) * T
    for i in range(0, T // M * M, M):
        _queries_loops(
            q, k, v, o, do, lse, delta, dq, i, scale, sq, sk, sv, so, sd, T, d, COLUMNS, M, N, REST, True, STAGES
        )
    if LAST:
        _queries_loops(
            q, k, v, o, do, lse, delta, dq, T // M * M, scale, sq, sk, sv, so, sd, T, d, COLUMNS, LAST, N, REST, False,
            STAGES,
        )  # fmt: skip
    tl.debug_barrier()  # δ was written by other threads
    for j in range(0, T // M * M, M):
        _keys_loops(
            q, k, v, do, lse, delta, dk, dv, j, scale, sq, sk, sv, so, sd, T, d, COLUMNS, M, N, REST, True, STAGES
        )
    if LAST:
        _keys_loops(
            q, k, v, do, lse, delta, dk, dv, T // M * M, scale, sq, sk, sv, so, sd, T, d, COLUMNS, LAST, N, REST, False,
            STAGES,
        )  # fmt: skip


@triton.jit
def _queries_kept(
    q, keys, values, o, do, lse, delta, dq, start, scale, sq, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    queries, pulls, sums, deltas = _queries_of(q, o, do, lse, delta, start, sq, so, T, d, COLUMNS, M, WHOLE)
    out = tl.zeros((M, COLUMNS), tl.float32)
    for j in tl.static_range(T // N):
        out = _queries_step(
            queries, keys[j], values[j], pulls, sums, deltas, out, j * N, scale * LOG2E, T, N, True
        )
    if REST:
        last: tl.constexpr = T // N
        out = _queries_step(
            queries, keys[last], values[last], pulls, sums, deltas, out, last * N, scale * LOG2E, T, REST, False
        )
    _store(dq, out * scale, start, sd, T, d, M, COLUMNS, WHOLE)


@triton.jit
def _keys_kept(
    queries, k, v, pulls, lse, delta, dk, dv, start, scale, sk, sv, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    keys = _load(k, start, sk, T, d, M, COLUMNS, WHOLE)
    values = _load(v, start, sv, T, d, M, COLUMNS, WHOLE)
    dkeys = tl.zeros((M, COLUMNS), tl.float32)
    dvalues = tl.zeros((M, COLUMNS), tl.float32)
    for i in tl.static_range(T // N):
        sums, deltas = _row(lse, i * N, 0.0, T, N, True), _row(delta, i * N, 0.0, T, N, True)
        dkeys, dvalues = _keys_step(queries[i], keys, values, pulls[i], sums, deltas, dkeys, dvalues, scale * LOG2E)
    if REST:
        last: tl.constexpr = T // N
        sums, deltas = _row(lse, last * N, float("inf"), T, REST, False), _row(delta, last * N, 0.0, T, REST, False)
        dkeys, dvalues = _keys_step(
            queries[last], keys, values, pulls[last], sums, deltas, dkeys, dvalues, scale * LOG2E
        )
    _store(dk, dkeys * scale, start, sd, T, d, M, COLUMNS, WHOLE)
    _store(dv, dvalues, start, sd, T, d, M, COLUMNS, WHOLE)


@triton.jit(do_not_specialize=["H"])
def back_kept(
    q, k, v, o, do, lse, delta, dq, dk, dv, H, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both in turn, and what each needs all of stays in shared memory: first keys and values, then queries and do."""
    which = tl.program_id(0)
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    do += image * T * so + head * d
    dq += image * T * sd + head * d
    dk += image * T * sd + head * d
    dv += image * T * sd + head * d
    lse += which.to(tl.int64) * T
    delta += which.to(tl.int64) * T
    keys = _pieces(k, sk, T, d, N, REST, COLUMNS)
    values = _pieces(v, sv, T, d, N, REST, COLUMNS)
    for i in tl.range(0, T // M * M, M, num_stages=STAGES):
        _queries_kept(
            q, keys, values, o, do, lse, delta, dq, i, scale, sq, so, sd, T, d, COLUMNS, M, N, REST, True
        )
    if LAST:
        _queries_kept(
            q, keys, values, o, do, lse, delta, dq, T // M * M, scale, sq, so, sd, T, d, COLUMNS, LAST, N, REST, False
        )
    tl.debug_barrier()  # δ was written by other threads
    queries = _pieces(q, sq, T, d, N, REST, COLUMNS)
    pulls = _pieces(do, so, T, d, N, REST, COLUMNS)
    for j in tl.range(0, T // M * M, M, num_stages=STAGES):
        _keys_kept(
            queries, k, v, pulls, lse, delta, dk, dv, j, scale, sk, sv, sd, T, d, COLUMNS, M, N, REST, True
        )
    if LAST:
        _keys_kept(
            queries, k, v, pulls, lse, delta, dk, dv, T // M * M, scale, sk, sv, sd, T, d, COLUMNS, LAST, N, REST, False
        )


@triton.jit
def _deltas(
    o, do, delta, so, T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, REST: tl.constexpr
):
    for i in range(0, T // N * N, N):
        got = _load(o, i, so, T, d, N, COLUMNS, True).to(tl.float32)
        pulls = _load(do, i, so, T, d, N, COLUMNS, True).to(tl.float32)
        _store_row(delta, tl.sum(got * pulls, axis=1), i, T, N, True)
    if REST:
        last: tl.constexpr = T // N * N
        got = _load(o, last, so, T, d, REST, COLUMNS, False).to(tl.float32)
        pulls = _load(do, last, so, T, d, REST, COLUMNS, False).to(tl.float32)
        _store_row(delta, tl.sum(got * pulls, axis=1), last, T, REST, False)
    tl.debug_barrier()


@triton.jit
def _both_step(q, k, v, do, lse, delta, dq, dk, dv, start, scale, T: tl.constexpr, M: tl.constexpr, WHOLE: tl.constexpr):
    shares = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    if not WHOLE:  # else 0·∞ might appear in dq
        shares = tl.where((start + tl.arange(0, M) < T)[:, None], shares, 0.0)
    dv = tl.dot(shares.to(k.dtype), do, dv)
    dscores = (shares * (tl.dot(v, tl.trans(do)) - delta[None, :])).to(k.dtype)
    return tl.dot(tl.trans(dscores), k, dq), tl.dot(dscores, q, dk), dv


@triton.jit
def _both_kept(
    queries, k, v, pulls, lse, delta, dqs, dk, dv, start, scale, sk, sv, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    keys = _load(k, start, sk, T, d, M, COLUMNS, WHOLE)
    values = _load(v, start, sv, T, d, M, COLUMNS, WHOLE)
    dkeys = tl.zeros((M, COLUMNS), tl.float32)
    dvalues = tl.zeros((M, COLUMNS), tl.float32)
    out = ()
    for i in tl.static_range(T // N):
        sums, deltas = _row(lse, i * N, 0.0, T, N, True), _row(delta, i * N, 0.0, T, N, True)
        dq, dkeys, dvalues = _both_step(
            queries[i], keys, values, pulls[i], sums, deltas, dqs[i], dkeys, dvalues, start, scale * LOG2E, T, M, WHOLE
        )
        out = out + (dq,)
    if REST:
        last: tl.constexpr = T // N
        sums, deltas = _row(lse, last * N, float("inf"), T, REST, False), _row(delta, last * N, 0.0, T, REST, False)
        less, dkeys, dvalues = _both_step(
            queries[last], keys, values, pulls[last], sums, deltas, dqs[last], dkeys, dvalues, start, scale * LOG2E,
            T, M, WHOLE,
        )  # fmt: skip
        out = out + (less,)
    _store(dk, dkeys * scale, start, sd, T, d, M, COLUMNS, WHOLE)
    _store(dv, dvalues, start, sd, T, d, M, COLUMNS, WHOLE)
    return out


@triton.jit(do_not_specialize=["H"])
def back_once(
    q, k, v, o, do, lse, delta, dq, dk, dv, H, scale, sq, sk, sv, so, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Five products: dq of all queries stays in registers while keys pass by."""
    which = tl.program_id(0)
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    do += image * T * so + head * d
    dq += image * T * sd + head * d
    dk += image * T * sd + head * d
    dv += image * T * sd + head * d
    lse += which.to(tl.int64) * T
    delta += which.to(tl.int64) * T
    _deltas(o, do, delta, so, T, d, COLUMNS, N, REST)
    queries = _pieces(q, sq, T, d, N, REST, COLUMNS)
    pulls = _pieces(do, so, T, d, N, REST, COLUMNS)
    dqs = ()
    for _ in tl.static_range(T // N):
        dqs = dqs + (tl.zeros((N, COLUMNS), tl.float32),)
    if REST:
        dqs = dqs + (tl.zeros((REST, COLUMNS), tl.float32),)
    for j in tl.range(0, T // M * M, M, num_stages=STAGES):
        dqs = _both_kept(
            queries, k, v, pulls, lse, delta, dqs, dk, dv, j, scale, sk, sv, sd, T, d, COLUMNS, M, N, REST, True
        )
    if LAST:
        dqs = _both_kept(
            queries, k, v, pulls, lse, delta, dqs, dk, dv, T // M * M, scale, sk, sv, sd, T, d, COLUMNS, LAST, N, REST,
            False,
        )  # fmt: skip
    for i in tl.static_range(T // N):
        _store(dq, dqs[i] * scale, i * N, sd, T, d, N, COLUMNS, True)
    if REST:
        _store(dq, dqs[T // N] * scale, T // N * N, sd, T, d, REST, COLUMNS, False)


@triton.jit
def _both_piece(
    q, k, v, do, lse, delta, part, dq, dkeys, dvalues, keys, values, i, start, scale, sq, so, sp, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr,
    HERE: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    queries = _load(q, i, sq, T, d, N, COLUMNS, HERE)
    pulls = _load(do, i, so, T, d, N, COLUMNS, HERE)
    sums, deltas = _row(lse, i, float("inf"), T, N, HERE), _row(delta, i, 0.0, T, N, HERE)
    before = tl.zeros((N, COLUMNS), tl.float32)
    if not FIRST:
        before = _load(part, i, sp, T, d, N, COLUMNS, HERE).to(tl.float32)
    new, dkeys, dvalues = _both_step(
        queries, keys, values, pulls, sums, deltas, tl.zeros((N, COLUMNS), tl.float32), dkeys, dvalues, start,
        scale * LOG2E, T, M, WHOLE,
    )  # fmt: skip
    if END:
        _store(dq, (new + before) * scale, i, sd, T, d, N, COLUMNS, HERE)
    else:
        _store(part, new + before, i, sp, T, d, N, COLUMNS, HERE)
    return dkeys, dvalues


@triton.jit
def _both_loops(
    q, k, v, do, lse, delta, part, dq, dk, dv, start, scale, sq, sk, sv, so, sp, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, REST: tl.constexpr,
    WHOLE: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tl.debug_barrier()  # sums of dq were written by other threads
    keys = _load(k, start, sk, T, d, M, COLUMNS, WHOLE)
    values = _load(v, start, sv, T, d, M, COLUMNS, WHOLE)
    dkeys = tl.zeros((M, COLUMNS), tl.float32)
    dvalues = tl.zeros((M, COLUMNS), tl.float32)
    for i in tl.range(0, T // N * N, N, num_stages=STAGES):
        dkeys, dvalues = _both_piece(
            q, k, v, do, lse, delta, part, dq, dkeys, dvalues, keys, values, i, start, scale, sq, so, sp, sd,
            T, d, COLUMNS, M, N, WHOLE, True, FIRST, END,
        )  # fmt: skip
    if REST:
        dkeys, dvalues = _both_piece(
            q, k, v, do, lse, delta, part, dq, dkeys, dvalues, keys, values, T // N * N, start, scale, sq, so, sp, sd,
            T, d, COLUMNS, M, REST, WHOLE, False, FIRST, END,
        )  # fmt: skip
    _store(dk, dkeys * scale, start, sd, T, d, M, COLUMNS, WHOLE)
    _store(dv, dvalues, start, sd, T, d, M, COLUMNS, WHOLE)


@triton.jit(do_not_specialize=["H"])
def back_parts(
    q, k, v, o, do, lse, delta, part, dq, dk, dv, H, scale, sq, sk, sv, so, sp, sd,
    T: tl.constexpr, d: tl.constexpr, COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    REST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Five products: dq is added up in memory, by the program that owns it. For blocks of keys that are two at most."""
    which = tl.program_id(0)
    image, head = (which // H).to(tl.int64), which % H
    q += image * T * sq + head * d
    k += image * T * sk + head * d
    v += image * T * sv + head * d
    o += image * T * so + head * d
    do += image * T * so + head * d
    part += image * T * sp + head * d
    dq += image * T * sd + head * d
    dk += image * T * sd + head * d
    dv += image * T * sd + head * d
    lse += which.to(tl.int64) * T
    delta += which.to(tl.int64) * T
    _deltas(o, do, delta, so, T, d, COLUMNS, N, REST)
    blocks: tl.constexpr = T // M + (LAST > 0)
    for j in tl.static_range(blocks):
        if j < T // M:
            _both_loops(
                q, k, v, do, lse, delta, part, dq, dk, dv, j * M, scale, sq, sk, sv, so, sp, sd,
                T, d, COLUMNS, M, N, REST, True, j == 0, j == blocks - 1, STAGES,
            )  # fmt: skip
        else:
            _both_loops(
                q, k, v, do, lse, delta, part, dq, dk, dv, j * M, scale, sq, sk, sv, so, sp, sd,
                T, d, COLUMNS, LAST, N, REST, False, j == 0, j == blocks - 1, STAGES,
            )  # fmt: skip


# The gradient of qkv once more


@triton.jit
def cast(
    x, small, scales, sums, M,
    N: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows as FP8, each with its scale, and the sums over rows. A row is PIECES of COLUMNS."""
    columns = tl.arange(0, COLUMNS)
    totals = ()
    for _ in tl.static_range(PIECES):
        totals = totals + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < M)[:, None]
        at = rows[:, None] * N + columns[None, :]
        most = tl.full((ROWS,), 1e-12, tl.float32)
        read = ()
        new = ()
        for piece in tl.static_range(PIECES):
            y = tl.load(x + at + piece * COLUMNS, inside, 0.0)
            read = read + (y,)
        for piece in tl.static_range(PIECES):
            y = read[piece].to(tl.float32)
            if FP8:
                most = tl.maximum(most, tl.max(tl.abs(y), axis=1))
            new = new + (totals[piece] + y,)
        totals = new
        if FP8:
            scale = most / 448.0
            tl.store(scales + rows, scale, rows < M)
            grow = (1.0 / scale)[:, None]
            for piece in tl.static_range(PIECES):
                y = read[piece].to(tl.float32)
                tl.store(small + at + piece * COLUMNS, (y * grow).to(tl.float8e4nv), inside)
    for piece in tl.static_range(PIECES):
        tl.store(sums + tl.program_id(0) * N + piece * COLUMNS + columns, tl.sum(totals[piece], axis=0))
