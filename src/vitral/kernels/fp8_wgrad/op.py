"""Weight gradients as FP8 GEMMs: transposed operands as functions of tensors, and the GEMM itself.

Operands are (N, M): one row per column of the activations, contiguous along the M tokens, which zeros extend to a
multiple of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.dropout.op import NO_DROPOUT, Dropout
from vitral.kernels.fp8.op import Fp8Tensor, empty_fp8
from vitral.kernels.fp8_wgrad import kernel as kernels
from vitral.kernels.layernorm_gelu.op import AddNormOutput, LayerNormParams
from vitral.kernels.precompile import launch
from vitral.kernels.reduce.op import ColumnSums, num_partial_sums

TRANSPOSE_BLOCKS = {"BLOCK_WORDS": 16, "BLOCK_COLS": 128, "num_warps": 8}
GELU_BLOCKS = {"BLOCK_WORDS": 8, "BLOCK_COLS": 256, "num_warps": 8, "maxnreg": 128}


class RelativeScales(NamedTuple):
    """The scales of M tokens relative to the largest: relative = pow2_root·remainder."""

    max_scale: Tensor  # scalar
    relative: Tensor  # (M,)
    pow2_root: Tensor  # (M,): a power of two near the square root of `relative`
    remainder: Tensor  # (M,)


def relative_scales(scales: Tensor) -> RelativeScales:
    M, max_scale = len(scales), scales.amax()
    out = scales.new_empty(3, M)
    launch(kernels.relative_scales_kernel, (triton.cdiv(M, 1024),))(scales, max_scale, out, M, BLOCK_ROWS=1024)
    return RelativeScales(max_scale, *out)


def transpose_fp8(x: Fp8Tensor, factor: Tensor | None = None) -> Tensor:
    """The FP8 values of x (M, N) as (N, M), each token multiplied by a power of two."""
    M, N = x.data.shape
    out = _empty_transposed(M, N, x.data)
    launch(kernels.transpose_fp8_kernel, _transpose_grid(M, N))(
        x.data, factor, out.view(torch.int32), M, NUM_COLS=N, NUM_PADDED=-M % 16, **TRANSPOSE_BLOCKS
    )
    return out


def layernorm_transposed(saved: AddNormOutput, norm: LayerNormParams, factor: Tensor, scale: Tensor) -> Tensor:
    """The norm's output (M, N), computed again, times one factor per token, over `scale`, in FP8: (N, M)."""
    M, N = saved.sum.shape
    out = _empty_transposed(M, N, saved.sum)
    launch(kernels.layernorm_transposed_kernel, _transpose_grid(M, N))(
        saved.sum, saved.stats, norm.weight, norm.bias, factor, scale, out.view(torch.int32), M,
        NUM_COLS=N, NUM_PADDED=-M % 16, **TRANSPOSE_BLOCKS,
    )  # fmt: skip
    return out


def gelu_backward_fp8(
    h: Tensor, bias: Tensor, grad_gelu: Tensor, activation: str, grad_scales: Tensor, scale_ratio: Tensor,
    factor: Tensor, gelu_scale: Tensor, sums: ColumnSums, dropout: Dropout = NO_DROPOUT,
) -> tuple[Fp8Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of h in FP8, the same transposed, dropout(GELU(h + bias))·factor transposed, and the bias gradient.

    h, grad_gelu: (M, N). `grad_scales`: scales of the FP8 rows from which grad_gelu was computed; times `scale_ratio`
    they are the scales of the gradient of h, whose row norms are not set.
    """
    M, N = h.shape
    grad_h, grad_h_t, gelu_t = empty_fp8(h), _empty_transposed(M, N, h), _empty_transposed(M, N, h)
    column_blocks = triton.cdiv(N, GELU_BLOCKS["BLOCK_COLS"])
    num_programs = num_partial_sums(M, 4 * GELU_BLOCKS["BLOCK_WORDS"], column_blocks)
    partial_sums = h.new_empty(num_programs, N, dtype=torch.float32)
    launch(kernels.gelu_backward_fp8_kernel, (num_programs, column_blocks))(
        h, bias, grad_gelu, grad_scales, scale_ratio, factor, gelu_scale, grad_h.data, grad_h.scales,
        grad_h_t.view(torch.int32), gelu_t.view(torch.int32), partial_sums, *dropout, M,
        NUM_COLS=N, NUM_PADDED=-M % 16, ACTIVATION=activation, DROPOUT=dropout.seed is not None, **GELU_BLOCKS,
    )  # fmt: skip
    return grad_h, grad_h_t, gelu_t, sums.add(partial_sums)


def wgrad_gemm(grad_out_t: Tensor, x_t: Tensor, grad_out_scale: Tensor, x_scale: Tensor) -> Tensor:
    """grad_outᵀ·x in fp32 from the transposed operands (N, M) and (K, M), each with one scale.

    Fast accumulation is off: over this many tokens it loses half of the precision.
    """
    return torch._scaled_mm(
        grad_out_t, x_t.t(), scale_a=grad_out_scale, scale_b=x_scale, out_dtype=torch.float32, use_fast_accum=False
    )


def _empty_transposed(M: int, N: int, like: Tensor) -> Tensor:
    return torch.empty(N, M + -M % 16, device=like.device, dtype=torch.float8_e4m3fn)


def _transpose_grid(M: int, N: int) -> tuple[int, int]:
    return triton.cdiv(M, 4 * TRANSPOSE_BLOCKS["BLOCK_WORDS"]), triton.cdiv(N, TRANSPOSE_BLOCKS["BLOCK_COLS"])
