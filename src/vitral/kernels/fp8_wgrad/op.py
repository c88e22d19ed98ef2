"""Gradients of weights as products of FP8: `columns_kernels.py` as functions of tensors, and the product itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.fp8_wgrad import kernel as kernels
from vitral.kernels.ops import Norm, Normed, Small, Sums, small_like
from vitral.kernels.ops import shares as programs
from vitral.kernels.precompile import launcher

TILE = {"ROWS": 16, "BLOCK": 128, "num_warps": 8}
TILE_OF_GELU = {"ROWS": 8, "BLOCK": 256, "num_warps": 8, "maxnreg": 128}


class Shares(NamedTuple):
    """Of tokens' scales in the largest of them."""

    top: Tensor
    whole: Tensor
    root: Tensor  # about its root: a power of two, which rounds nothing
    rest: Tensor  # what is left of the share


def shares_of(scales: Tensor) -> Shares:
    M, top = len(scales), scales.amax()
    out = scales.new_empty(3, M)
    launcher(kernels.shares, (triton.cdiv(M, 1024),))(scales, top, out, M, BLOCK=1024)
    return Shares(top, *out)


def columns_like(M: int, N: int, like: Tensor) -> Tensor:
    return torch.empty(N, M, device=like.device, dtype=torch.float8_e4m3fn)


def turned(small: Small, root: Tensor | None = None) -> Tensor:
    """The numbers, N M, each token's times a power of two."""
    M, N = small.numbers.shape
    out = columns_like(M, N, small.numbers)
    grid = (triton.cdiv(M, 4 * TILE["ROWS"]), triton.cdiv(N, TILE["BLOCK"]))
    launcher(kernels.turned, grid)(small.numbers, root, out.view(torch.int32), M, N=N, **TILE)
    return out


def normed(was: Normed, norm: Norm, share: Tensor, scale: Tensor) -> Tensor:
    """What `add_norm` gave, times the tokens' shares: N M."""
    (M, N), (weight, shift, _) = was.x.shape, norm
    out = columns_like(M, N, was.x)
    grid = (triton.cdiv(M, 4 * TILE["ROWS"]), triton.cdiv(N, TILE["BLOCK"]))
    launcher(kernels.normed, grid)(was.x, was.stats, weight, shift, share, scale, out.view(torch.int32), M, N=N, **TILE)
    return out


def gelu_back(
    h: Tensor, bias: Tensor, dg: Tensor, tanh: bool, given: Tensor, steep: Tensor, rest: Tensor, scale: Tensor,
    later: Sums,
) -> tuple[Small, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of h as FP8, that by columns, GELU(h + bias) times `rest` by columns, and the bias's gradient.

    `given` are the scales of the rows that dg is a product of."""
    M, N = h.shape
    small, dh, g = small_like(h), columns_like(M, N, h), columns_like(M, N, h)
    across = triton.cdiv(N, TILE_OF_GELU["BLOCK"])
    count = programs(M, 4 * TILE_OF_GELU["ROWS"], across)
    sums = h.new_empty(count, N, dtype=torch.float32)
    launcher(kernels.gelu_back, (count, across))(
        h, bias, dg, given, steep, rest, scale, *small[:2], dh.view(torch.int32), g.view(torch.int32), sums, M,
        N=N, TANH=tanh, **TILE_OF_GELU,
    )  # fmt: skip
    return small, dh, g, later.of(sums)


def product(dy: Tensor, x: Tensor, scale_dy: Tensor, scale_x: Tensor) -> Tensor:
    """dyᵀ·x of what lies by columns. Summed in fp32: over so many tokens, the quicker way of a GPU loses half of it."""
    return torch._scaled_mm(dy, x.t(), scale_a=scale_dy, scale_b=scale_x, out_dtype=torch.float32, use_fast_accum=False)
