"""The kernels as functions of tensors: what to allocate, and how the work is cut into programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.attention import kernel as attention
from vitral.kernels.block import kernel as rows_kernels
from vitral.kernels.layernorm_gelu import kernel as kernels
from vitral.kernels.precompile import launcher

PROGRAMS = 1056  # that share the rows where sums over all of them are taken: eight for each of a large GPU's 132 cores
SHORT = 64  # tokens whose attention fits a core at once
LONG, WIDE = 256, 64  # tokens and a head's columns up to which ours is the quicker one; beyond, it is PyTorch's
CUT = 64  # of those tokens, how many a program has
NARROW, NARROWER, MANY = 256, 192, 6144  # columns up to which, in learning too, and tokens from which on `rows` pays
AT_ONCE, PIECE = 64, 32  # its tokens, and numbers that pass by
EXPANDED, ENOUGH = 384, 16384  # columns up to which, and tokens from which on, `expand` pays
CUTS = 2  # into how many parts it cuts the hidden numbers


class Small(NamedTuple):
    """A matrix as FP8."""

    numbers: Tensor
    scales: Tensor  # of each row: N 1
    norms: Tensor  # the length of each row; of a matrix of weights, what `shrink` says


Norm = tuple[Tensor, Tensor, float]  # weight, shift, and what keeps it from dividing by zero
Norms = tuple[Tensor, Tensor, Tensor, Tensor, float]  # of queries and keys: weights, shifts, and the same


def tile(columns: int, numbers: int = 1024) -> dict[str, int]:
    """Whole rows, about so many numbers at once; one warp, if it can hold them: then nothing waits for another."""
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "ROWS": max(1, numbers // block), "num_warps": max(1, block // 1024)}


def blocks(columns: int, block: int, rows: int) -> tuple[dict[str, int], int]:
    """How the MLP's hidden numbers are cut, and into how many pieces a row."""
    block = min(block, triton.next_power_of_2(columns))
    return {"BLOCK": block, "ROWS": rows, "num_warps": 4}, triton.cdiv(columns, block)


def shares(rows: int, each: int, beside: int = 1) -> int:
    return max(1, min(PROGRAMS // beside, triton.cdiv(rows, each)))


def small_like(x: Tensor, columns: int | None = None) -> Small:
    M, D = x.shape
    scales = x.new_empty(2, 4 * triton.cdiv(M, 4), 1, dtype=torch.float32)  # both begin at multiples of 16 bytes
    return Small(x.new_empty(M, columns or D, dtype=torch.float8_e4m3fn), *scales[:, :M])


class Sums:
    """Sums over the first axes of tensors, all in one launch: fp32, and always in the same order."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Tensor]] = []

    def of(self, parts: Tensor) -> Tensor:
        """Whose numbers are there after `take`."""
        self.asked.append((parts, torch.empty_like(parts[0])))
        return self.asked[-1][1]

    def take(self) -> None:
        parts, outs = zip(*self.asked, strict=True)
        rows = tuple(float(len(part)) for part in parts)  # of whole numbers, Triton compiles anew for multiples of 16
        columns = tuple(out.numel() for out in outs)
        launcher(kernels.totals, (triton.cdiv(max(columns), 8), len(outs)))(
            parts, outs, rows, columns, COUNT=len(outs), ROWS=512, BLOCK=8, num_warps=8
        )
        self.asked.clear()


def total(parts: Tensor) -> Tensor:
    sums = Sums()
    out = sums.of(parts)
    sums.take()
    return out


class Normed(NamedTuple):
    """A sum of tokens and its layer norm."""

    x: Tensor
    stats: Tensor  # means and what the distances from them were multiplied by: 2 M
    plain: Tensor | None
    small: Small | None = None  # as FP8


def add_norm(
    z: Tensor, f: Tensor | None, bias: Tensor | None, kept: Tensor | None, norm: Norm, fp8: bool, plain: bool = True,
    in_place: bool = False,
) -> Normed:  # fmt: skip
    """z + kept·(f + bias), perhaps in z's place, and its layer norm. `kept` has a number for each image."""
    (M, D), (weight, shift, eps) = z.shape, norm
    out = z if f is None or in_place else torch.empty_like(z)
    normed = torch.empty_like(z) if plain else None
    stats, small = z.new_empty(2, M, dtype=torch.float32), small_like(z) if fp8 else None
    how = tile(D)
    launcher(kernels.norm, (triton.cdiv(M, how["ROWS"]),))(
        z, f, bias, kept, weight, shift, out, normed, stats, *(small or (None, None, None)), M, tokens_each(M, kept),
        eps, D=D, ADD=f is not None, DROP=kept is not None, PLAIN=plain, FP8=fp8, **how,
    )  # fmt: skip
    return Normed(out, stats, normed, small)


class NormGradients(NamedTuple):
    z: Tensor
    f: Tensor
    f_small: Small | None  # as FP8
    sums: Tensor  # for the norm's weight, its shift and the bias: 3 D
    normed: Tensor | None  # what `add_norm` gave: as it was kept, or computed again if that is asked for


def add_norm_back(
    was: Normed, dy: Tensor, dz: Tensor | None, kept: Tensor | None, norm: Norm, later: Sums, fp8: bool = False,
    again: bool = True,
) -> NormGradients:  # fmt: skip
    """From the gradient of the norm, and that which passes it by."""
    x, (weight, shift, _) = was.x, norm
    M, D = x.shape
    dx = torch.empty_like(x)
    df = dx if kept is None else torch.empty_like(x)
    again = again and was.plain is None
    normed = torch.empty_like(x) if again else was.plain
    small = small_like(x) if fp8 else None
    how = tile(D)
    count = shares(M, how["ROWS"])
    sums = x.new_empty(count, 3, D, dtype=torch.float32)
    launcher(kernels.norm_back, (count,))(
        x, was.stats, dy, dz, kept, weight, shift, dx, df, normed, *(small or (None, None, None)), sums, M,
        tokens_each(M, kept), D=D, PASSED=dz is not None, DROP=kept is not None, AGAIN=again, FP8=fp8,
        **how,
    )  # fmt: skip
    return NormGradients(dx, df, small, later.of(sums), normed)


def tokens_each(rows: int, per_image: Tensor | None) -> int:
    return 1 if per_image is None else rows // per_image.numel()


def act(
    h: Tensor, bias: Tensor, tanh: bool, known: tuple[Tensor, Tensor] | None, in_place: bool = False
) -> tuple[Tensor | None, Small | None]:
    """GELU(h + bias): as bf16, or as FP8 where it is known how large h can be: `known` has the lengths of the rows
    that it is the product of, and what `shrink` found about the weights and this bias."""
    M, N = h.shape
    g, small = (h if in_place else torch.empty_like(h), None) if known is None else (None, small_like(h))
    how, across = blocks(N, 1024, 4) if small is None else blocks(N, 512, 8)
    launcher(kernels.act, (triton.cdiv(M, how["ROWS"]), across))(
        h, bias, g, *(small or (None, None, None))[:2], *(known or (None, None)), M, N=N, TANH=tanh,
        FP8=small is not None, **how,
    )  # fmt: skip
    return g, small


def act_back(
    h: Tensor, bias: Tensor, dg: Tensor, tanh: bool, known: tuple[Tensor, Tensor] | None, kept: Tensor | None,
    later: Sums,
) -> tuple[Tensor, Tensor, Small | None, Tensor]:  # fmt: skip
    """GELU(h + bias) once more, unless it was kept; the gradient of h, that as FP8, and the bias's.

    They take the places of h and dg, which are not needed any more."""
    M, N = h.shape
    g, dh = h if kept is None else kept, dg
    small = None if known is None else small_like(h)
    how, across = blocks(N, 512, 2)
    count = shares(M, how["ROWS"], across)
    sums = h.new_empty(count, N, dtype=torch.float32)
    launcher(kernels.act_back, (count, across))(
        h, bias, dg, g, dh, *(small or (None, None, None))[:2], *(known or (None, None)), sums, M,
        N=N, TANH=tanh, AGAIN=kept is None, FP8=small is not None, **how,
    )  # fmt: skip
    return g, dh, small, later.of(sums)


def half(d: int, numbers: int = 1024) -> dict[str, int]:
    block = triton.next_power_of_2(d // 2)
    return {"HALF": block, "ROWS": max(1, numbers // block), "num_warps": 2}


def turn(qkv: Tensor, heads: int, T: int, norms: Norms | None, waves: Tensor | None) -> Tensor:
    """Queries and keys, normed and turned: 2 M h d."""
    M, d = qkv.shape[0], qkv.shape[1] // 3 // heads
    out = qkv.new_empty(2, M, heads, d)
    how = half(d)
    *given, eps = norms or (None, None, None, None, 0.0)
    launcher(kernels.turn, (triton.cdiv(M * heads, how["ROWS"]), 2))(
        qkv, *given, waves, out, M, T, eps, H=heads, d=d, NORM=norms is not None, ROTARY=waves is not None, **how
    )
    return out


def turn_back(
    qkv: Tensor, gradients_BhTd: tuple[Tensor, ...], norms: Norms | None, waves: Tensor | None, bias: bool, later: Sums,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of qkv, M 3hd, the sums for the norms' weights and shifts, 2 2 d, and those for the bias, 3hd.

    With `out`, the gradients lie there already, token by token."""
    _, h, T, d = gradients_BhTd[0].shape
    M, placed, out = qkv.shape[0], out is not None, torch.empty_like(qkv) if out is None else out
    how = half(d, 512)
    count = shares(M, how["ROWS"], 3 * h)
    gain_q, gain_k, _, _, eps = norms or (None, None, None, None, 0.0)
    sums = qkv.new_empty(count * h, 2, 2, d, dtype=torch.float32) if norms else None
    totals = qkv.new_empty(count, 3 * h * d, dtype=torch.float32) if bias else None
    launcher(kernels.turn_back, (count, 3 * h))(
        qkv, *gradients_BhTd, gain_q, gain_k, waves, out, sums, totals, M, T, eps, *strides(gradients_BhTd),
        H=h, d=d, NORM=norms is not None, ROTARY=waves is not None, BIAS=bias, PLACED=placed, **how,
    )  # fmt: skip
    return out, None if sums is None else later.of(sums), None if totals is None else later.of(totals)


def short(qkv: Tensor, heads: int, T: int, norms: Norms | None, waves: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d)·v of normed and turned queries and keys, M hd, where T is at most SHORT."""
    M, d = qkv.shape[0], qkv.shape[1] // 3 // heads
    o = qkv.new_empty(M, heads * d)
    *given, eps = norms or (None, None, None, None, 0.0)
    launcher(kernels.short, (M // T * heads,))(
        qkv, *given, waves, o, T, eps, d**-0.5,
        H=heads, d=d, NORM=norms is not None, ROTARY=waves is not None, **at_once(T, d),
    )  # fmt: skip
    return o


def short_back(qkv: Tensor, do: Tensor, heads: int, T: int, norms: Norms | None, waves: Tensor | None) -> Tensor:
    """From the gradient of what `short` gave, those of queries, keys and values as `turn_back` takes them: M 3hd."""
    M, d = qkv.shape[0], qkv.shape[1] // 3 // heads
    out = torch.empty_like(qkv)
    *given, eps = norms or (None, None, None, None, 0.0)
    launcher(kernels.short_back, (M // T * heads,))(
        qkv, do, *given, waves, out, T, eps, d**-0.5,
        H=heads, d=d, NORM=norms is not None, ROTARY=waves is not None, **at_once(T, d),
    )  # fmt: skip
    return out


def by_heads(qkv: Tensor, heads: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values: B h T d."""
    q, k, v = qkv.view(len(qkv) // T, T, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def at_once(T: int, d: int) -> dict[str, int]:
    tokens = max(16, triton.next_power_of_2(T))
    return {"TOKENS": tokens, "HALF": max(16, triton.next_power_of_2(d // 2)), "num_warps": 4}


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, T: int) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√d)·v, M hd, and the logarithms of its sums to base 2, Bh T; for T up to LONG, d up to WIDE.

    All are M hd: v is a part of qkv, q and k are too, or what `turn` gave."""
    o, lse = q.new_empty(q.shape), q.new_empty(len(q) // T * heads, T, dtype=torch.float32)
    _attend(q, k, v, heads, T, o, lse)
    return o, lse


def attend_small(q: Tensor, k: Tensor, v: Tensor, heads: int, T: int, known: tuple[Tensor, Tensor]) -> Small:
    """The same as FP8, by what is `known` about the product that v is of: the lengths of its rows, and `shrink`'s."""
    o8 = small_like(v)
    _attend(q, k, v, heads, T, o8.numbers, None, o8.scales, *known)
    return o8


def _attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, T: int, o: Tensor, lse: Tensor | None, scales: Tensor | None = None,
    norms: Tensor | None = None, bound: Tensor | None = None,
) -> None:  # fmt: skip
    M, D = q.shape
    launcher(attention.attend, (M // T * heads * triton.cdiv(T, CUT),))(
        q, k, v, o, lse, scales, norms, bound, (D // heads) ** -0.5, STEP=q.stride(0), FP8=scales is not None,
        TOKENS=triton.next_power_of_2(T), **passing(T, heads, D // heads, 32, 3),
    )  # fmt: skip


def attend_back(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, heads: int, T: int) -> Tensor:
    """The gradients of q, k and v as `attend` took them, side by side: M 3hd."""
    M, D = q.shape
    dqkv, delta, scale = q.new_empty(M, 3 * D), torch.empty_like(lse), (D // heads) ** -0.5
    programs = (M // T * heads * triton.cdiv(T, CUT),)
    launcher(attention.queries_back, programs)(
        q, k, v, o, do, lse, delta, dqkv, scale, STEP=q.stride(0), **passing(T, heads, D // heads, 64, 2)
    )
    launcher(attention.keys_back, programs)(  # 128 registers: a few do not fit, but a fourth program does
        q, k, v, do, lse, delta, dqkv, scale, STEP=q.stride(0), maxnreg=128, **passing(T, heads, D // heads, 32, 3)
    )
    return dqkv


def passing(T: int, heads: int, d: int, piece: int, stages: int) -> dict[str, int]:
    """How many tokens pass by at once, how many remain for the last time, and how far ahead they are fetched."""
    rest = max(16, triton.next_power_of_2(T % piece)) if T % piece else 0
    return {
        "T": T, "H": heads, "d": d, "COLUMNS": max(16, triton.next_power_of_2(d)), "M": CUT, "N": piece, "REST": rest,
        "STAGES": stages, "num_warps": 4,
    }  # fmt: skip


def cast(x: Tensor, sums: bool, fp8: bool, later: Sums) -> tuple[Tensor | None, Small | None]:
    """The sums over rows, and the rows as FP8: what of both is wanted."""
    if not (sums or fp8):
        return None, None
    (M, N), small = x.shape, small_like(x) if fp8 else None
    rows, warps = (2 if N < 2048 else 1, triton.next_power_of_2(triton.cdiv(N, 3072))) if fp8 else (1, 4)
    block = min(N & -N, 1024) if N % 64 == 0 else 128
    count = shares(M, rows)
    totals = x.new_empty(count, N, dtype=torch.float32) if sums else None
    launcher(attention.cast, (count,))(
        x, *(small or (None, None, None))[:2], totals, M, N=N, PIECES=triton.cdiv(N, block), COLUMNS=block, ROWS=rows,
        SUMS=sums, FP8=fp8, num_warps=max(rows, warps),
    )  # fmt: skip
    return None if totals is None else later.of(totals), small


def narrow(D: int, hidden: int, learning: bool = False) -> bool:
    """Whether `rows` knows tokens of this width, and registers suffice for what learning keeps besides."""
    fits = (NARROWER if learning else NARROW) >= D
    return fits and tiled(D, 16) and hidden % PIECE == 3 * D % PIECE == 0


def tiled(D: int, least: int) -> bool:
    """Whether rows are one or two powers of two, none smaller."""
    A, B = pieces(D)
    return least <= A and (B == 0 or (least <= B and B & (B - 1) == 0))


def pieces(D: int) -> tuple[int, int]:
    """The largest power of two in it, and the rest."""
    A = 1 << (D.bit_length() - 1)
    return A, D - A


class Between(NamedTuple):
    """What `rows` passes that the way back needs."""

    two: Tensor  # the tokens between attention and MLP
    h: Tensor
    stats_two: Tensor
    stats_one: Tensor  # of the next block's norm


def rows(
    o: Tensor, x: Tensor, out: Tensor, qkv: Tensor, block: Any, after: Any, rounded: dict[Tensor, Tensor],
    between: Between | None = None,
) -> None:  # fmt: skip
    """From what attention gave and the tokens x to the tokens behind a block, `out`, and the next block's `qkv`."""
    (M, D), attention, mlp = x.shape, block.attention, block.mlp
    layers = (attention.project, block.norm2, mlp.expand, mlp.contract, after.norm1, after.attention.qkv)
    given = [p for layer in layers for p in (rounded.get(layer.weight, layer.weight), layer.bias)]
    A, B = pieces(D)
    stages = 4 if D <= 192 else 3  # of which two programs' fit a core
    launcher(rows_kernels.rows, (triton.cdiv(M, AT_ONCE),))(
        o, x, out, qkv, *given, *(between or (None,) * 4), M, block.norm2.eps, after.norm1.eps,
        A=A, B=B, H=mlp.expand.out_features, KEEP=between is not None, TANH=mlp.gelu.approximate == "tanh",
        BIAS=given[-1] is not None, ROWS=AT_ONCE, N=PIECE, STAGES=stages, num_warps=4,
    )  # fmt: skip


def expands(D: int, hidden: int) -> bool:
    """Whether `expand` knows tokens of this width, with so many hidden numbers."""
    return D <= EXPANDED and tiled(D, 32) and hidden % (CUTS * 64) == 0


def expand(x: Small, weight: Small, bias: Tensor, tanh: bool) -> Small:
    """GELU(x·wᵀ + bias) as FP8: `act` of a product that is nowhere written."""
    (M, D), H = x.numbers.shape, len(weight.numbers)
    (A, B), out = pieces(D), small_like(x.numbers, H)
    launcher(rows_kernels.expand, (CUTS * triton.cdiv(M, 128),))(
        x.numbers, x.scales, x.norms, weight.numbers, weight.scales, weight.norms, bias, *out[:2], M,
        A=A, B=B, H=H, TANH=tanh, ROWS=128, N=64, CUTS=CUTS, STAGES=2, num_warps=8,
    )  # fmt: skip
    return out


def strides(tensors_BhTd: tuple[Tensor, ...]) -> list[int]:
    """Of image, token and head."""
    for tensor in tensors_BhTd:
        assert tensor.stride(3) == 1
    return [tensor.stride(axis) for tensor in tensors_BhTd for axis in (0, 2, 1)]


def shrink(matrix: Tensor, bias: Tensor | None, most: Tensor) -> Small:
    """A matrix as FP8, row by row. A transposed one is read as it lies and written as it looks.

    `most`, two zeros, becomes its `norms`: the longest row's length and the largest number of the bias beside it."""
    N, K = matrix.shape
    numbers = torch.empty(N, K, device=matrix.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(N, 1, device=matrix.device)
    rows, block = (4, 1024) if matrix.stride(1) == 1 else (8, 512)
    launcher(kernels.shrink, (triton.cdiv(N, rows),))(
        matrix, bias, numbers, scales, most, N, K, *matrix.stride(), BIAS=bias is not None, ROWS=rows, BLOCK=block
    )
    return Small(numbers, scales, most)
