"""AdamW's step on a GPU as a function of many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

from vitral.kernels.adamw import kernel as adamw_kernels
from vitral.kernels.muon.op import batches
from vitral.kernels.precompile import launcher

BLOCK = 1024
Moving = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]  # weight, gradient, averages, step, rate, decay


def move(moving: Sequence[Moving], betas: tuple[float, float], eps: float, halted: Tensor | None) -> None:
    """All of them, the largest first: each launch has programs for the largest of its tensors."""
    for _, some in batches(moving):
        *tensors, decays = zip(*some, strict=True)
        sizes = tuple(weight.numel() for weight, *_ in some)
        launcher(adamw_kernels.adamw, (triton.cdiv(sizes[0], BLOCK), len(some)))(
            *tensors, decays, sizes, halted, *betas, eps, COUNT=len(some), BLOCK=BLOCK
        )
