"""AdamW update of many tensors in few launches."""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

from vitral.kernels.adamw.kernel import adamw_kernel
from vitral.kernels.muon.op import launch_batches
from vitral.kernels.precompile import launch

BLOCK_SIZE = 1024

# weight, grad, exp_avg, exp_avg_sq, step, lr, weight_decay
AdamWTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]


def adamw_update(
    tensors: Sequence[AdamWTensors], betas: tuple[float, float], eps: float, found_inf: Tensor | None
) -> None:
    """Update weights and moments in place. `step` must already count this update.

    `tensors` is sorted by size, the largest first: the grid of a launch covers the largest tensor of its batch.
    """
    for _, batch in launch_batches(tensors):
        *pointers, weight_decays = zip(*batch, strict=True)
        numels = tuple(weight.numel() for weight, *_ in batch)
        launch(adamw_kernel, (triton.cdiv(numels[0], BLOCK_SIZE), len(batch)))(
            *pointers, weight_decays, numels, found_inf, *betas, eps, NUM_TENSORS=len(batch), BLOCK_SIZE=BLOCK_SIZE
        )
