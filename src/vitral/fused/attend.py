"""launch functions for attention.py (variants)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from vitral.fused import attention


def rest(T: int, block: int, least: int = 16) -> int:
    """How large the last piece is: a power of two, or none."""
    return 0 if T % block == 0 else max(least, triton.next_power_of_2(T % block))


def sizes(T: int, d: int, M: int, N: int, stages: int, least_m: int = 16, least_n: int = 16) -> dict[str, Any]:
    return {
        "T": T, "d": d, "COLUMNS": max(16, triton.next_power_of_2(d)), "M": M, "N": N,
        "REST": rest(T, N, least_n), "LAST": rest(T, M, least_m), "STAGES": stages,
    }  # fmt: skip


def forward(
    kind: str, q: Tensor, k: Tensor, v: Tensor, heads: int, T: int, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√d)·v, M hd, and the logarithms of its sums, to base 2: Bh T. q, k and v: M hd, with a row's step."""
    rows, d = q.shape[0], q.shape[1] // heads
    o, lse = q.new_empty(rows, heads * d), q.new_empty(rows // T * heads, T, dtype=torch.float32)
    how = dict(how)
    warps, most = how.pop("warps"), how.pop("most", None)
    named = sizes(T, d, **how)
    programs = rows // T * heads
    if kind == "forward_loops":
        programs *= triton.cdiv(T, named["M"])
    getattr(attention, kind)[(programs,)](
        q, k, v, o, lse, heads, d**-0.5 * 1.4426950408889634, q.stride(0), k.stride(0), v.stride(0), o.stride(0),
        **named, num_warps=warps, maxnreg=most,
    )  # fmt: skip
    return o, lse


def backward(
    kind: str, q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, heads: int, T: int,
    how: dict[str, Any], how2: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of qkv: M 3hd."""
    rows, D = q.shape
    d = D // heads
    out, delta = q.new_empty(rows, 3 * D), torch.empty_like(lse)
    dq, dk, dv = out[:, :D], out[:, D : 2 * D], out[:, 2 * D :]
    steps = (q.stride(0), k.stride(0), v.stride(0), o.stride(0))
    programs = rows // T * heads
    how = dict(how)
    warps, most = how.pop("warps"), how.pop("most", None)
    fp32 = how.pop("fp32", False)
    named = sizes(T, d, **how)
    if kind == "back_apart":
        how2 = dict(how2 or {})
        warps2, most2 = how2.pop("warps"), how2.pop("most", None)
        named2 = sizes(T, d, **how2)
        attention.back_queries[(programs * triton.cdiv(T, named["M"]),)](
            q, k, v, o, do, lse, delta, dq, heads, d**-0.5, *steps, 3 * D, **named, num_warps=warps, maxnreg=most
        )
        attention.back_keys[(programs * triton.cdiv(T, named2["M"]),)](
            q, k, v, do, lse, delta, dk, dv, heads, d**-0.5, *steps, 3 * D, **named2, num_warps=warps2, maxnreg=most2
        )
    elif kind == "back_parts":
        part, step = (q.new_empty(rows, D, dtype=torch.float32), D) if fp32 else (dq, 3 * D)
        attention.back_parts[(programs,)](
            q, k, v, o, do, lse, delta, part, dq, dk, dv, heads, d**-0.5, *steps, step, 3 * D, **named, num_warps=warps, maxnreg=most
        )
    else:
        getattr(attention, kind)[(programs,)](
            q, k, v, o, do, lse, delta, dq, dk, dv, heads, d**-0.5, *steps, 3 * D, **named, num_warps=warps, maxnreg=most
        )
    return out


def cast(x: Tensor, fp8: bool, rows: int = 1, warps: int = 4, programs: int = 1056, widest: int = 1024) -> tuple[Any, ...]:
    M, N = x.shape
    columns = min(N & -N, widest)
    small = torch.empty_like(x, dtype=torch.float8_e4m3fn) if fp8 else None
    scales = x.new_empty(M, 1, dtype=torch.float32) if fp8 else None
    count = max(1, min(programs, triton.cdiv(M, rows)))
    sums = x.new_empty(count, N, dtype=torch.float32)
    attention.cast[(count,)](
        x, small, scales, sums, M, N=N, PIECES=N // columns, COLUMNS=columns, ROWS=rows, FP8=fp8, num_warps=warps
    )
    return small, scales, sums
