"""SwiGLU as functions of tensors, forward and backward. h: (M, 2N), the gate first."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vitral.kernels.dropout.op import NO_DROPOUT, Dropout
from vitral.kernels.fp8.op import Fp8Tensor, empty_fp8, pointers
from vitral.kernels.precompile import launch
from vitral.kernels.reduce.op import ColumnSums, num_partial_sums
from vitral.kernels.swiglu import kernel as kernels

MAX_COLS = 8192  # a program holds whole rows of gate and value


def row_blocks(num_cols: int) -> dict[str, int]:
    """Launch parameters for blocks of whole rows."""
    block_cols = triton.next_power_of_2(num_cols)
    return {"BLOCK_ROWS": 1, "BLOCK_COLS": block_cols, "num_warps": min(16, max(1, block_cols // 512))}


def swiglu(h: Tensor, bias: Tensor, fp8: bool, dropout: Dropout = NO_DROPOUT) -> tuple[Tensor | None, Fp8Tensor | None]:
    """dropout(silu(gate)·value), (M, N), in bf16 or in FP8; the row norms of the FP8 tensor are not set."""
    M, N = h.shape[0], h.shape[1] // 2
    out, out_fp8 = (None, empty_fp8(h, N)) if fp8 else (h.new_empty(M, N), None)
    launch(kernels.swiglu_kernel, (M,))(
        h, bias, out, *pointers(out_fp8)[:2], *dropout, M,
        NUM_COLS=N, DROPOUT=dropout.seed is not None, FP8=fp8, **row_blocks(N),
    )  # fmt: skip
    return out, out_fp8


def swiglu_backward(
    h: Tensor, bias: Tensor, grad_out: Tensor, fp8: bool, saved_out: Tensor | None, sums: ColumnSums,
    dropout: Dropout = NO_DROPOUT,
) -> tuple[Tensor, Tensor, Fp8Tensor | None, Tensor]:  # fmt: skip
    """The output of `swiglu`, recomputed unless saved; the gradient of h, the same in FP8; the gradient of the bias.

    h and grad_out are overwritten.
    """
    M, N = grad_out.shape
    out, grad_h, grad_h_fp8 = grad_out if saved_out is None else saved_out, h, empty_fp8(h) if fp8 else None
    num_programs = num_partial_sums(M, 1)
    partial_sums = h.new_empty(num_programs, 2 * N, dtype=torch.float32)
    launch(kernels.swiglu_backward_kernel, (num_programs,))(
        h, bias, grad_out, out, grad_h, *pointers(grad_h_fp8)[:2], partial_sums, *dropout, M,
        NUM_COLS=N, DROPOUT=dropout.seed is not None, RECOMPUTE=saved_out is None, FP8=fp8, **row_blocks(N),
    )  # fmt: skip
    return out, grad_h, grad_h_fp8, sums.add(partial_sums)
