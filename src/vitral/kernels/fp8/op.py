"""FP8 tensors and quantization."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.fp8 import kernel as kernels
from vitral.kernels.precompile import launch
from vitral.kernels.reduce.op import ColumnSums, num_partial_sums


class Fp8Tensor(NamedTuple):
    """A matrix of activations or gradients as e4m3 with one scale per row: x ≈ data·scales."""

    data: Tensor  # (M, N) e4m3
    scales: Tensor  # (M, 1) fp32
    row_norms: Tensor  # (M, 1) fp32; the Euclidean norm of each row


class Fp8Weight(NamedTuple):
    """A weight matrix as e4m3 with one scale per row."""

    data: Tensor  # (N, K) e4m3
    scales: Tensor  # (N, 1) fp32
    bound: Tensor  # (2,) fp32: the largest row norm, and the largest absolute value of the layer's bias


class GemmBound(NamedTuple):
    """Bounds for the values of x·Wᵀ (+ bias): |x_i|·bound[0] (+ bound[1]). FP8 scales of the result come from it."""

    row_norms: Tensor  # of x
    weight_bound: Tensor  # of W


def empty_fp8(x: Tensor, num_cols: int | None = None) -> Fp8Tensor:
    """Uninitialised FP8 tensor with the rows of x and as many columns, or `num_cols`."""
    M, N = x.shape
    scales = x.new_empty(2, 4 * triton.cdiv(M, 4), 1, dtype=torch.float32)  # both parts are aligned to 16 bytes
    return Fp8Tensor(x.new_empty(M, num_cols or N, dtype=torch.float8_e4m3fn), *scales[:, :M])


def pointers(tensor: Fp8Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Kernel arguments for an optional FP8 output: data, scales, row norms."""
    return (None, None, None) if tensor is None else tensor


def quantize_weight(matrix: Tensor, bias: Tensor | None, bound: Tensor) -> Fp8Weight:
    """Quantize a weight matrix (N, K) row by row. A transposed view is read through its strides.

    `bound` must be two zeros; it becomes `Fp8Weight.bound`.
    """
    N, K = matrix.shape
    data = torch.empty(N, K, device=matrix.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(N, 1, device=matrix.device)
    block_rows, block_cols = (4, 1024) if matrix.stride(1) == 1 else (8, 512)
    launch(kernels.quantize_weight_kernel, (triton.cdiv(N, block_rows),))(
        matrix, bias, data, scales, bound, N, K, *matrix.stride(),
        HAS_BIAS=bias is not None, BLOCK_ROWS=block_rows, BLOCK_COLS=block_cols,
    )  # fmt: skip
    return Fp8Weight(data, scales, bound)


def quantize_with_scales(matrix: Tensor, scales: Tensor, out: Tensor) -> None:
    """Quantize a matrix (N, K) row by row with given scales (N, 1) into `out`. A transposed view is read in place."""
    N, K = matrix.shape
    if K:
        launch(kernels.quantize_with_scales_kernel, (triton.cdiv(N, 8),))(
            matrix, scales, out, N, K, *matrix.stride(), BLOCK_ROWS=8, BLOCK_COLS=512
        )


def quantize_and_sum(
    parts: tuple[Tensor, ...], sum_rows: bool, fp8: bool, sums: ColumnSums
) -> tuple[Tensor | None, Fp8Tensor | None]:
    """Sum over the rows of x (available after `sums.compute()`) and x as FP8; each is None if not requested.

    x consists of matrices of equal width side by side. The row norms of the FP8 tensor are not set.
    """
    if not (sum_rows or fp8):
        return None, None
    if len(parts) > 1 and parts[0].shape[1] % 64:  # a block of columns would cross two of them
        parts = (torch.cat(parts, dim=1),)
    M, part_cols = parts[0].shape
    N = len(parts) * part_cols
    x_fp8 = empty_fp8(parts[0], N) if fp8 else None
    block_rows, num_warps = (2 if N < 2048 else 1, triton.next_power_of_2(triton.cdiv(N, 3072))) if fp8 else (1, 4)
    block_cols = min(part_cols & -part_cols, 1024) if part_cols % 64 == 0 else 128
    num_programs = num_partial_sums(M, block_rows)
    partial_sums = parts[0].new_empty(num_programs, N, dtype=torch.float32) if sum_rows else None
    launch(kernels.quantize_and_sum_kernel, (num_programs,))(
        parts, *pointers(x_fp8)[:2], partial_sums, M,
        NUM_COLS=N, NUM_BLOCKS=len(parts) * triton.cdiv(part_cols, block_cols), BLOCK_COLS=block_cols,
        BLOCK_ROWS=block_rows, SUM=sum_rows, FP8=fp8, num_warps=max(block_rows, num_warps),
    )  # fmt: skip
    return None if partial_sums is None else sums.add(partial_sums), x_fp8
