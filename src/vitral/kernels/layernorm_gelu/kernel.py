"""What stands between the encoder's matrix products, each as one pass over the tokens: Triton kernels for a GPU.

PyTorch's compiler makes such kernels too. These know more: a block's residual, bias and layer norm are one pass, so are
a norm's gradient and the residual's; sums over tokens are taken where the numbers are read anyway; and a result may be
written as FP8 besides, each row with its own scale, while it is still in registers.

Rows are tokens: tensors are M×D, contiguous. Everything is computed in fp32 and stored as bf16, but GELU that becomes
FP8 in 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.layernorm_gelu.gelu import _gelu, _gelu_small

TOP = tl.constexpr(448.0)  # the largest number of FP8 (e4m3)
STEEPEST = tl.constexpr(1.13)  # GELU's slope


@triton.jit
def _store_small(small, scales, norms, at, rows, inside, y, M):
    """y as FP8, each row divided by its scale; and the rows' lengths, from which those of products can be bounded.

    No number is larger than the length of its row, so the scale comes from that, without a maximum.
    """
    length = tl.sqrt(tl.sum(y * y, axis=1)) + 1e-12
    tl.store(norms + rows, length, rows < M)
    scale = length / TOP
    tl.store(scales + rows, scale, rows < M)
    tl.store(small + at, (y * (1.0 / scale)[:, None]).to(tl.float8e4nv), inside)


@triton.jit
def norm(
    z, f, bias, kept, weight, shift, out, normed, stats, small, scales, norms, M, T, eps,
    D: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, PLAIN: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < D)[None, :]
    at = rows[:, None] * D + columns[None, :]
    x = tl.load(z + at, inside, 0.0).to(tl.float32)
    if ADD:
        branch = tl.load(f + at, inside, 0.0).to(tl.float32) + tl.load(bias + columns, columns < D, 0.0)[None, :]
        if DROP:
            branch *= tl.load(kept + rows // T, rows < M, 0.0)[:, None]
        rounded = (x + branch).to(out.dtype.element_ty)
        tl.store(out + at, rounded, inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)
    tl.store(stats + rows, mean, rows < M)
    tl.store(stats + M + rows, spread, rows < M)
    gain, offset = tl.load(weight + columns, columns < D, 0.0), tl.load(shift + columns, columns < D, 0.0)
    y = centred * spread[:, None] * gain[None, :] + offset[None, :]
    if PLAIN:
        tl.store(normed + at, y.to(normed.dtype.element_ty), inside)
    if FP8:
        _store_small(small, scales, norms, at, rows, inside, y, M)


@triton.jit
def norm_back(
    x_at, stats, dy_at, dz_at, kept, weight, shift, dx, df, normed, small, scales, norms, sums, M, T,
    D: tl.constexpr, PASSED: tl.constexpr, DROP: tl.constexpr, AGAIN: tl.constexpr, FP8: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    known = columns < D
    gain = tl.load(weight + columns, known, 0.0)
    dgain = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=3):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < M)[:, None] & known[None, :]
        at = rows[:, None] * D + columns[None, :]
        x = tl.load(x_at + at, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_at + at, inside, 0.0).to(tl.float32)
        mean, spread = tl.load(stats + rows, rows < M, 0.0), tl.load(stats + M + rows, rows < M, 0.0)
        unit = tl.where(inside, (x - mean[:, None]) * spread[:, None], 0.0)
        if AGAIN:
            offset = tl.load(shift + columns, known, 0.0)
            tl.store(normed + at, (unit * gain[None, :] + offset[None, :]).to(normed.dtype.element_ty), inside)
        pull = dy * gain[None, :]
        along = tl.sum(pull * unit, axis=1) / D
        mean = tl.sum(pull, axis=1) / D
        d = tl.where(inside, spread[:, None] * (pull - mean[:, None] - unit * along[:, None]), 0.0)
        if PASSED:
            d += tl.load(dz_at + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), inside)
        if DROP:
            d *= tl.load(kept + rows // T, rows < M, 0.0)[:, None]
            tl.store(df + at, d.to(df.dtype.element_ty), inside)
        if FP8:
            _store_small(small, scales, norms, at, rows, inside, d, M)
        dgain += tl.sum(dy * unit, axis=0)
        dshift += tl.sum(dy, axis=0)
        dbias += tl.sum(d, axis=0)
    place = sums + tl.program_id(0) * 3 * D + columns
    tl.store(place, dgain, known)
    tl.store(place + D, dshift, known)
    tl.store(place + 2 * D, dbias, known)


@triton.jit
def _bounded(norms, there, most):
    """The scale of rows that are GELU of a product and a bias, from the lengths of what it is of."""
    bound = tl.load(norms, there, 1.0) * tl.load(most) + tl.load(most + 1)
    return tl.maximum(bound, 1e-12) / TOP  # weights may all be zero at first


@triton.jit
def act(
    h, bias, g, small, scales, norms, most, M,
    N: tl.constexpr, TANH: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(h + at, inside, 0.0).to(tl.float32) + tl.load(bias + columns, columns < N, 0.0)[None, :]
    if FP8:
        scale = _bounded(norms + rows, rows < M, most)
        if tl.program_id(1) == 0:
            tl.store(scales + rows, scale, rows < M)
        tl.store(small + at, _gelu_small(x, (1.0 / scale)[:, None], TANH), inside)
    else:
        tl.store(g + at, _gelu(x, TANH)[0].to(g.dtype.element_ty), inside)


@triton.jit
def act_back(
    h, bias, dg, g, dh, small, scales, norms, most, sums, M,
    N: tl.constexpr, TANH: tl.constexpr, AGAIN: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = columns < N
    offset = tl.load(bias + columns, known, 0.0)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < M)[:, None] & known[None, :]
        at = rows[:, None] * N + columns[None, :]
        y, slope = _gelu(tl.load(h + at, inside, 0.0).to(tl.float32) + offset[None, :], TANH)
        d = tl.load(dg + at, inside, 0.0).to(tl.float32) * slope
        if AGAIN:
            tl.store(g + at, y.to(g.dtype.element_ty), inside)
        tl.store(dh + at, d.to(dh.dtype.element_ty), inside)
        if FP8:
            bound = tl.load(norms + rows, rows < M, 1.0) * tl.load(most) * STEEPEST
            scale = tl.maximum(bound, 1e-12) / TOP
            if tl.program_id(1) == 0:
                tl.store(scales + rows, scale, rows < M)
            tl.store(small + at, (d * (1.0 / scale)[:, None]).to(tl.float8e4nv), inside)
        total += d
    tl.store(sums + tl.program_id(0) * N + columns, tl.sum(total, axis=0), known)


@triton.jit
def _halves(x, at, inside, d: tl.constexpr):
    return tl.load(x + at, inside, 0.0).to(tl.float32), tl.load(x + at + d // 2, inside, 0.0).to(tl.float32)


@triton.jit
def _units(a, b, inside, d: tl.constexpr, eps):
    """Rows, in two halves, with mean 0 and variance 1; and what they were multiplied by."""
    mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) / d
    a = tl.where(inside, a - mean[:, None], 0.0)
    b = tl.where(inside, b - mean[:, None], 0.0)
    spread = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / d + eps)[:, None]
    return a * spread, b * spread, spread


@triton.jit
def _units_back(da, db, a, b, spread, gain, columns, d: tl.constexpr):
    """The gradient of rows that were made units, a and b, and multiplied by a gain."""
    known = columns < d // 2
    da *= tl.load(gain + columns, known, 0.0)[None, :]
    db *= tl.load(gain + d // 2 + columns, known, 0.0)[None, :]
    along = ((tl.sum(da * a, axis=1) + tl.sum(db * b, axis=1)) / d)[:, None]
    mean = ((tl.sum(da, axis=1) + tl.sum(db, axis=1)) / d)[:, None]
    return spread * (da - mean - a * along), spread * (db - mean - b * along)


@triton.jit
def _angles(waves, tokens, columns, inside, T, d: tl.constexpr, ROTARY: tl.constexpr):
    """Cosines and sines of the tokens' places; of no turn, where there is none."""
    cos, sin = 1.0, 0.0
    if ROTARY:
        wave = tokens[:, None] * (d // 2) + columns[None, :]
        cos, sin = tl.load(waves + wave, inside, 0.0), tl.load(waves + T * (d // 2) + wave, inside, 0.0)
    return cos, sin


@triton.jit
def _store_halves(out, at, inside, a, b, d: tl.constexpr):
    tl.store(out + at, a.to(out.dtype.element_ty), inside)
    tl.store(out + at + d // 2, b.to(out.dtype.element_ty), inside)


@triton.jit
def _ready(
    qkv, at, inside, columns, gain, shift, cos, sin, eps, d: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """Queries or keys of one head, normed and turned, in two halves."""
    known = columns < d // 2
    a, b = _halves(qkv, at, inside, d)
    if NORM:
        a, b, _ = _units(a, b, inside, d, eps)
        gain += columns
        shift += columns
        a = a * tl.load(gain, known, 0.0)[None, :] + tl.load(shift, known, 0.0)[None, :]
        b = b * tl.load(gain + d // 2, known, 0.0)[None, :] + tl.load(shift + d // 2, known, 0.0)[None, :]
    if ROTARY:
        a, b = a * cos - b * sin, a * sin + b * cos
    number = qkv.dtype.element_ty
    return a.to(number), b.to(number)


@triton.jit
def turn(
    qkv, gain_q, gain_k, shift_q, shift_k, waves, out, M, T, eps,
    H: tl.constexpr, d: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)  # 0: queries, 1: keys
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # token · H + head
    token = places // H
    columns = tl.arange(0, HALF)
    inside = (places < M * H)[:, None] & (columns < d // 2)[None, :]
    at = (token * 3 * H * d + which * H * d + (places % H) * d)[:, None] + columns[None, :]
    gain, shift = gain_q, shift_q
    if NORM:  # noqa: SIM102  (known when compiled, the other is not)
        if which == 1:
            gain, shift = gain_k, shift_k
    cos, sin = _angles(waves, token % T, columns, inside, T, d, ROTARY)
    a, b = _ready(qkv, at, inside, columns, gain, shift, cos, sin, eps, d, NORM, ROTARY)
    _store_halves(out + which * M * H * d, (places * d)[:, None] + columns[None, :], inside, a, b, d)


@triton.jit
def turn_back(
    qkv, dq, dk, dv, gain_q, gain_k, waves, out, sums, totals, M, T, eps,
    qb, qt, qh, kb, kt, kh, vb, vt, vh,
    H: tl.constexpr, d: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, BIAS: tl.constexpr,
    PLACED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The way back of `turn` for one head's queries or keys; values are put in their place, unless PLACED already."""
    which, head = tl.program_id(1) // H, tl.program_id(1) % H  # 0: queries, 1: keys, 2: values
    columns = tl.arange(0, HALF)
    known = columns < d // 2
    given, sb, st, sh, gain = dv, vb, vt, vh, gain_q
    if which == 0:
        given, sb, st, sh = dq, qb, qt, qh
    if which == 1:
        given, sb, st, sh, gain = dk, kb, kt, kh, gain_k
    dgain_a = tl.zeros((ROWS, HALF), tl.float32)
    dgain_b = tl.zeros((ROWS, HALF), tl.float32)
    dshift_a = tl.zeros((ROWS, HALF), tl.float32)
    dshift_b = tl.zeros((ROWS, HALF), tl.float32)
    dbias_a = tl.zeros((ROWS, HALF), tl.float32)
    dbias_b = tl.zeros((ROWS, HALF), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < M)[:, None] & known[None, :]
        there = ((rows // T) * sb + (rows % T) * st + head * sh)[:, None] + columns[None, :]
        a, b = _halves(given, there, inside, d)
        at = (rows * 3 * H * d + tl.program_id(1) * d)[:, None] + columns[None, :]
        if which < 2:
            if ROTARY:
                cos, sin = _angles(waves, rows % T, columns, inside, T, d, ROTARY)
                a, b = a * cos + b * sin, b * cos - a * sin
            if NORM:
                p, q = _halves(qkv, at, inside, d)
                p, q, spread = _units(p, q, inside, d, eps)
                dgain_a += a * p
                dgain_b += b * q
                dshift_a += a
                dshift_b += b
                a, b = _units_back(a, b, p, q, spread, gain, columns, d)
            _store_halves(out, at, inside, a, b, d)
        elif not PLACED:
            _store_halves(out, at, inside, a, b, d)
        if BIAS:
            dbias_a += a
            dbias_b += b
    if NORM:  # noqa: SIM102  (known when compiled, the other is not)
        if which < 2:
            place = sums + (tl.program_id(0) * H + head) * 4 * d + which * d + columns
            tl.store(place, tl.sum(dgain_a, axis=0), known)
            tl.store(place + d // 2, tl.sum(dgain_b, axis=0), known)
            tl.store(place + 2 * d, tl.sum(dshift_a, axis=0), known)
            tl.store(place + 2 * d + d // 2, tl.sum(dshift_b, axis=0), known)
    if BIAS:
        place = totals + (tl.program_id(0) * 3 * H + tl.program_id(1)) * d + columns
        tl.store(place, tl.sum(dbias_a, axis=0), known)
        tl.store(place + d // 2, tl.sum(dbias_b, axis=0), known)


@triton.jit
def _shares(
    qkv, at, inside, tokens, columns, gain_q, gain_k, shift_q, shift_k, cos, sin, T, eps, scale,
    H: tl.constexpr, d: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one head of one image, in two halves, and softmax(q·kᵀ/√d)."""
    qa, qb = _ready(qkv, at, inside, columns, gain_q, shift_q, cos, sin, eps, d, NORM, ROTARY)
    ka, kb = _ready(qkv, at + H * d, inside, columns, gain_k, shift_k, cos, sin, eps, d, NORM, ROTARY)
    scores = (tl.dot(qa, tl.trans(ka)) + tl.dot(qb, tl.trans(kb))) * (scale * 1.4426950408889634)  # for powers of two
    scores = tl.where((tokens < T)[None, :], scores, -1e30)
    shares = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    return qa, qb, ka, kb, shares * (1.0 / tl.sum(shares, axis=1))[:, None]


@triton.jit
def short(
    qkv, gain_q, gain_k, shift_q, shift_k, waves, o, T, eps, scale,
    H: tl.constexpr, d: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Attention of one head of one image, when all of it fits a core at once."""
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, HALF)
    inside = (tokens < T)[:, None] & (columns < d // 2)[None, :]
    at = image * T * 3 * H * d + head * d + tokens[:, None] * 3 * H * d + columns[None, :]
    cos, sin = _angles(waves, tokens, columns, inside, T, d, ROTARY)
    qa, _, _, _, shares = _shares(
        qkv, at, inside, tokens, columns, gain_q, gain_k, shift_q, shift_k, cos, sin, T, eps, scale, H, d, NORM, ROTARY
    )
    shares = shares.to(qa.dtype)
    va = tl.load(qkv + at + 2 * H * d, inside, 0.0)
    vb = tl.load(qkv + at + 2 * H * d + d // 2, inside, 0.0)
    to = image * T * H * d + head * d + tokens[:, None] * H * d + columns[None, :]
    _store_halves(o, to, inside, tl.dot(shares, va), tl.dot(shares, vb), d)


@triton.jit
def short_back(
    qkv, do, gain_q, gain_k, shift_q, shift_k, waves, out, T, eps, scale,
    H: tl.constexpr, d: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and keys as they are after norm and turn, whose way back is `turn_back`."""
    image, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, HALF)
    inside = (tokens < T)[:, None] & (columns < d // 2)[None, :]
    at = image * T * 3 * H * d + head * d + tokens[:, None] * 3 * H * d + columns[None, :]
    cos, sin = _angles(waves, tokens, columns, inside, T, d, ROTARY)
    qa, qb, ka, kb, shares = _shares(
        qkv, at, inside, tokens, columns, gain_q, gain_k, shift_q, shift_k, cos, sin, T, eps, scale, H, d, NORM, ROTARY
    )
    from_o = image * T * H * d + head * d + tokens[:, None] * H * d + columns[None, :]
    doa, dob = tl.load(do + from_o, inside, 0.0), tl.load(do + from_o + d // 2, inside, 0.0)
    across = tl.trans(shares.to(qa.dtype))
    _store_halves(out, at + 2 * H * d, inside, tl.dot(across, doa), tl.dot(across, dob), d)
    va = tl.load(qkv + at + 2 * H * d, inside, 0.0)
    vb = tl.load(qkv + at + 2 * H * d + d // 2, inside, 0.0)
    dshares = tl.dot(doa, tl.trans(va)) + tl.dot(dob, tl.trans(vb))
    dscores = (shares * (dshares - tl.sum(dshares * shares, axis=1)[:, None]) * scale).to(qa.dtype)
    _store_halves(out, at, inside, tl.dot(dscores, ka), tl.dot(dscores, kb), d)
    dscores = tl.trans(dscores)
    _store_halves(out, at + H * d, inside, tl.dot(dscores, qa), tl.dot(dscores, qb), d)


@triton.jit
def nth(values, n, COUNT: tl.constexpr):
    """Of a tuple, by a number that is not known when it is compiled."""
    found = values[0]
    for index in tl.static_range(1, COUNT):
        found = tl.where(n == index, values[index], found)
    return found


@triton.jit
def totals(parts, outs, rows, columns, COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over rows of so many matrices."""
    n = tl.program_id(1)
    G, C, given = nth(rows, n, COUNT).to(tl.int32), nth(columns, n, COUNT), nth(parts, n, COUNT)
    across = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < C:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, G, ROWS):
            down = start + tl.arange(0, ROWS)
            inside = (down < G)[:, None] & (across < C)[None, :]
            total += tl.load(given + down[:, None] * C + across[None, :], inside, 0.0)
        tl.store(nth(outs, n, COUNT) + across, tl.sum(total, axis=0), across < C)


@triton.jit
def shrink(w, bias, small, scales, most, N, K, sn, sk, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A matrix, or its transpose by its strides, as FP8: N×K, each row with its scale.

    And two numbers into `most`, which are zero before: the longest row's length, and the largest number of the bias.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    top = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        x = tl.load(w + rows[:, None] * sn + columns[None, :] * sk, inside, 0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(x), axis=1))
        square += tl.sum(x * x, axis=1)
    tl.atomic_max(most, tl.sqrt(tl.max(square, axis=0)))
    if BIAS:
        tl.atomic_max(most + 1, tl.max(tl.abs(tl.load(bias + rows, rows < N, 0.0)), axis=0))
    scale = tl.maximum(top, 1e-12) / TOP
    tl.store(scales + rows, scale, rows < N)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        x = tl.load(w + rows[:, None] * sn + columns[None, :] * sk, inside, 0.0).to(tl.float32)
        tl.store(small + rows[:, None] * K + columns[None, :], (x * (1.0 / scale)[:, None]).to(tl.float8e4nv), inside)
