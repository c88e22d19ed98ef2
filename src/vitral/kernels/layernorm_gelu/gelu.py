"""GELU inside kernels: in fp32 with its slope, and in 16 bits where FP8 is all that is kept of it."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which knows no assembler


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """GELU and its slope: x·σ(y), with y the odd polynomial that makes σ(y) the normal distribution, or nearly so.

    The exact one's was fitted: off by 4e-6 at most, and bf16 rounds at 4e-3. A third of the instructions of an erf.
    σ(y) is of a power of two and a reciprocal root, which are an instruction each, as exp and / are not.
    """
    t = x * x
    if TANH:  # y is 2·√(2/π)·(x + 0.044715·x³), here and below times the binary logarithm of e
        t = tl.minimum(t, 100.0)  # beyond, σ is 0 or 1, and must not be multiplied by infinity
        y = x * (2.3022082 + 0.102943235 * t)
    else:
        y = x * (2.30212171 + t * (0.105122524 + t * (-0.00031903585 + t * (-9.41645088e-5 + t * 3.49945324e-6))))
    root = tl.rsqrt(1.0 + tl.exp2(-y))
    share = root * root
    g = x * share
    if TANH:
        slope = share + g * (1 - share) * (1.5957691216 + 0.21406443846 * t)
    else:
        slope = share + x * 0.3989422804 * tl.exp2(t * -0.7213475204)  # the density
    return g, slope


def _in_halves(*polynomial: float) -> tl.constexpr:
    """Assembler for GELU of $1 … $4, times a factor, as four bytes of FP8: u·(1 + tanh(x·p(x²))), where u is x times
    half of that factor, $5 … $8. Two numbers at a time, of 16 bits."""
    constants = [*polynomial, 36]  # of squares; beyond, tanh is 1
    last = len(polynomial) - 1
    lines = [f"{{ .reg .b32 x, t, y, u, c<{len(constants)}>; .reg .b16 g<2>;"]
    lines += [f"mov.b32 c{n}, 0x{2 * struct.pack('>e', number).hex()};" for n, number in enumerate(constants)]
    for n in (0, 1):
        lines += [f"cvt.rn.satfinite.f16x2.f32 x, ${2 * n + 2}, ${2 * n + 1};", "mul.rn.f16x2 t, x, x;"]
        lines += [f"min.f16x2 t, t, c{last + 1};", f"fma.rn.f16x2 y, c{last}, t, c{last - 1};"]
        lines += [f"fma.rn.f16x2 y, y, t, c{power};" for power in range(last - 2, -1, -1)]
        lines += ["mul.rn.f16x2 y, y, x;", "tanh.approx.f16x2 y, y;"]
        lines += [f"cvt.rn.satfinite.f16x2.f32 u, ${2 * n + 6}, ${2 * n + 5};", "fma.rn.f16x2 y, u, y, u;"]
        lines += [f"cvt.rn.satfinite.e4m3x2.f16x2 g{n}, y;"]
    return tl.constexpr("\n".join([*lines, "mov.b32 $0, {g0, g1}; }"]))


EXACT = _in_halves(0.797502553, 0.0370104273, -0.000352286167)  # fitted: in 16 bits, they put GELU off by 5e-5
BY_TANH = _in_halves(0.797884561, 0.0356774081)


@triton.jit
def _gelu_small(x, factor, TANH: tl.constexpr):
    """GELU(x)·factor as FP8, which keeps four bits: so it may be computed with eleven, at half the cost."""
    if INTERPRETED:
        return (_gelu(x, TANH)[0] * factor).to(tl.float8e4nv)
    return tl.inline_asm_elementwise(
        BY_TANH if TANH else EXACT, "=r,r,r,r,r,r,r,r,r", (x, x * (0.5 * factor)), tl.float8e4nv, is_pure=True, pack=4
    )
