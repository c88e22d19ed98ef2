"""Deterministic sums over tokens, in two stages.

A kernel that reads all tokens writes one partial sum per program; `ColumnSums` adds the partial sums of several kernels
in one launch, in fp32 and in a fixed order (atomics would change the result from run to run).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vitral.kernels.precompile import launch
from vitral.kernels.reduce import kernel as kernels

MAX_PROGRAMS = 1056  # programs that share the rows: eight for each of the 132 SMs of a large GPU


def num_partial_sums(num_rows: int, rows_per_program: int, column_blocks: int = 1) -> int:
    """Programs along the rows, each of which writes one partial sum."""
    return max(1, min(MAX_PROGRAMS // column_blocks, triton.cdiv(num_rows, rows_per_program)))


class ColumnSums:
    """Collect partial sums (P, ...) with `add`; `compute` fills all returned tensors in one launch."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def add(self, partial_sums: Tensor) -> Tensor:
        """Return the tensor that will hold `partial_sums.sum(0)` after `compute`."""
        self.pending.append((partial_sums, torch.empty_like(partial_sums[0])))
        return self.pending[-1][1]

    def compute(self) -> None:
        partial_sums, outs = zip(*self.pending, strict=True)
        num_rows = tuple(float(len(matrix)) for matrix in partial_sums)  # floats are not specialised, integers are
        num_cols = tuple(out.numel() for out in outs)
        launch(kernels.column_sums_kernel, (triton.cdiv(max(num_cols), 8), len(outs)))(
            partial_sums, outs, num_rows, num_cols, COUNT=len(outs), BLOCK_ROWS=512, BLOCK_COLS=8, num_warps=8
        )
        self.pending.clear()


def column_sums(partial_sums: Tensor) -> Tensor:
    """`partial_sums.sum(0)` in fp32."""
    sums = ColumnSums()
    out = sums.add(partial_sums)
    sums.compute()
    return out
