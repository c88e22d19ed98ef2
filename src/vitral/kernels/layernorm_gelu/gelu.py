"""GELU and its approximations as device functions: with slope in fp32, and with an FP8 result in half precision."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter cannot run inline PTX


@triton.jit
def gelu_and_slope(x, ACTIVATION: tl.constexpr):
    """Return GELU(x) = x·sigmoid(y) and its derivative, where y(x) is an odd polynomial.

    ACTIVATION is one of ViTConfig: gelu, gelu_tanh or quick_gelu, for which y = 1.702x.

    For the exact GELU, y was fitted so that sigmoid(y) approximates the normal CDF: the maximum error is 4e-6 (bf16
    rounds at 4e-3), at a third of the instructions of erf. sigmoid(y) is computed as rsqrt(1 + exp2(-y))²: exp2 and
    rsqrt are one instruction each, exp and division are not.
    """
    if ACTIVATION == "quick_gelu":
        root = tl.rsqrt(1.0 + tl.exp2(tl.maximum(x, -50.0) * -2.455466997))  # 0·inf must not occur
        sigmoid = root * root
        gelu = x * sigmoid
        return gelu, sigmoid + 1.702 * gelu * (1 - sigmoid)
    x_sq = x * x
    # All coefficients of y include the factor log2(e).
    if ACTIVATION == "gelu_tanh":  # y = 2·sqrt(2/pi)·(x + 0.044715·x³)
        x_sq = tl.minimum(x_sq, 100.0)  # sigmoid is 0 or 1 beyond this, and 0·inf must not occur
        y = x * (2.3022082 + 0.102943235 * x_sq)
    else:
        y = x * (
            2.30212171 + x_sq * (0.105122524 + x_sq * (-0.00031903585 + x_sq * (-9.41645088e-5 + x_sq * 3.49945324e-6)))
        )
    root = tl.rsqrt(1.0 + tl.exp2(-y))
    sigmoid = root * root
    gelu = x * sigmoid
    if ACTIVATION == "gelu_tanh":
        slope = sigmoid + gelu * (1 - sigmoid) * (1.5957691216 + 0.21406443846 * x_sq)
    else:
        slope = sigmoid + x * 0.3989422804 * tl.exp2(x_sq * -0.7213475204)  # x times the normal density
    return gelu, slope


def _gelu_fp8_ptx(*coefficients: float) -> tl.constexpr:
    """Inline PTX for four values of u·(1 + tanh(x·p(x²))) as packed e4m3 bytes, computed as pairs of fp16.

    $1 ... $4 are x, $5 ... $8 are u = x·scale/2; `coefficients` are those of the polynomial p.
    """
    constants = [*coefficients, 36]  # the last one clamps x²: tanh is 1 beyond it
    last = len(coefficients) - 1
    lines = [f"{{ .reg .b32 x, t, y, u, c<{len(constants)}>; .reg .b16 g<2>;"]
    lines += [f"mov.b32 c{n}, 0x{2 * struct.pack('>e', constant).hex()};" for n, constant in enumerate(constants)]
    for n in (0, 1):
        lines += [f"cvt.rn.satfinite.f16x2.f32 x, ${2 * n + 2}, ${2 * n + 1};", "mul.rn.f16x2 t, x, x;"]
        lines += [f"min.f16x2 t, t, c{last + 1};", f"fma.rn.f16x2 y, c{last}, t, c{last - 1};"]
        lines += [f"fma.rn.f16x2 y, y, t, c{power};" for power in range(last - 2, -1, -1)]
        lines += ["mul.rn.f16x2 y, y, x;", "tanh.approx.f16x2 y, y;"]
        lines += [f"cvt.rn.satfinite.f16x2.f32 u, ${2 * n + 6}, ${2 * n + 5};", "fma.rn.f16x2 y, u, y, u;"]
        lines += [f"cvt.rn.satfinite.e4m3x2.f16x2 g{n}, y;"]
    return tl.constexpr("\n".join([*lines, "mov.b32 $0, {g0, g1}; }"]))


EXACT_GELU_PTX = _gelu_fp8_ptx(0.797502553, 0.0370104273, -0.000352286167)  # fitted; maximum error 5e-5 in fp16
TANH_GELU_PTX = _gelu_fp8_ptx(0.797884561, 0.0356774081)
QUICK_GELU_PTX = _gelu_fp8_ptx(0.851, 0.0)


@triton.jit
def gelu_to_fp8(x, scale, ACTIVATION: tl.constexpr):
    """Return GELU(x)·scale as e4m3. Half precision suffices for its four significant bits, at half the cost."""
    if INTERPRETED:
        return (gelu_and_slope(x, ACTIVATION)[0] * scale).to(tl.float8e4nv)
    if ACTIVATION == "gelu_tanh":
        PTX: tl.constexpr = TANH_GELU_PTX
    elif ACTIVATION == "quick_gelu":
        PTX: tl.constexpr = QUICK_GELU_PTX
    else:
        PTX: tl.constexpr = EXACT_GELU_PTX
    return tl.inline_asm_elementwise(
        PTX,
        "=r,r,r,r,r,r,r,r,r", (x, x * (0.5 * scale)), tl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip
