"""Muon's step on a GPU, except its GEMMs, for many matrices at once.

N matrices of the same size form a stack (N, A, B) with A ≤ B. Wide matrices (A, B) come first; tall ones (B, A) follow
and are transposed into the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import triton
from torch import Tensor

from vitral.kernels.muon.kernel import apply_update_kernel, frobenius_normalize_kernel, nesterov_momentum_kernel
from vitral.kernels.precompile import launch

T = TypeVar("T")

BLOCKS = {"BLOCK_ROWS": 32, "BLOCK_COLS": 64, "num_warps": 4}  # full cache lines along both axes
MAX_TENSORS_PER_LAUNCH = 32  # pointers are kernel arguments, whose size is limited


def momentum_stack(
    grads: Sequence[Tensor], momentum_buffers: Sequence[Tensor], momentum: float, dtype: torch.dtype
) -> Tensor:
    """Update the momentum buffers; return the Nesterov look-aheads (N, A, B), each with Frobenius norm 1.

    All matrices have the same size, wide ones before tall ones.
    """
    A, B = sorted(grads[0].shape)
    stack = grads[0].new_empty(len(grads), A, B, dtype=dtype)
    tiles = num_tiles(A, B)
    square_sums = stack.new_empty(len(grads), tiles, dtype=torch.float32)
    for first, batch in launch_batches(list(zip(grads, momentum_buffers, strict=True))):
        batch_grads, batch_buffers = zip(*batch, strict=True)
        launch(nesterov_momentum_kernel, (tiles, len(batch)))(
            batch_grads, batch_buffers, stack[first:], square_sums[first:], count_wide(batch_grads),
            1 - momentum, momentum, A=A, B=B, NUM_MATRICES=len(batch), **BLOCKS,
        )  # fmt: skip
    block_size = min(4096, triton.next_power_of_2(A * B))
    launch(frobenius_normalize_kernel, (triton.cdiv(A * B, block_size), len(grads)))(
        stack, square_sums, NUMEL=A * B, NUM_TILES=tiles, BLOCK_SIZE=block_size
    )
    return stack


def apply_updates(
    weights: Sequence[Tensor],
    lrs: Sequence[Tensor],
    updates_NAB: Tensor,
    weight_decay: float,
    update_scale: float,
    found_inf: Tensor | None,
) -> None:
    """w ← w·(1 - lr·weight_decay) - lr·update_scale·update, with a learning rate tensor per matrix.

    Weights are in the order of the stack. They stay unchanged where `found_inf` > 0.
    """
    assert updates_NAB.is_contiguous()
    _, A, B = updates_NAB.shape
    for first, batch in launch_batches(list(zip(weights, lrs, strict=True))):
        batch_weights, batch_lrs = zip(*batch, strict=True)
        launch(apply_update_kernel, (num_tiles(A, B), len(batch)))(
            batch_weights, batch_lrs, updates_NAB[first:], found_inf, count_wide(batch_weights),
            weight_decay, update_scale, A=A, B=B, NUM_MATRICES=len(batch), **BLOCKS,
        )  # fmt: skip


def num_tiles(A: int, B: int) -> int:
    return triton.cdiv(A, BLOCKS["BLOCK_ROWS"]) * triton.cdiv(B, BLOCKS["BLOCK_COLS"])


def count_wide(matrices: Sequence[Tensor]) -> int:
    return sum(matrix.shape[0] <= matrix.shape[1] for matrix in matrices)


def launch_batches(items: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
    """(index of the first item, items) per launch: as few launches as possible, of nearly equal length.

    Equal lengths matter because Triton compiles the kernel once per number of pointers.
    """
    batch_len = triton.cdiv(len(items), triton.cdiv(len(items), MAX_TENSORS_PER_LAUNCH))
    for first in range(0, len(items), batch_len):
        yield first, items[first : first + batch_len]
