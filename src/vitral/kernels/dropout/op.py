"""Dropout masks from seeds."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vitral.kernels.dropout import kernel as kernels
from vitral.kernels.precompile import launch


class Dropout(NamedTuple):
    """A mask, determined by its seed, and the rate."""

    seed: Tensor | None = None  # (4,) int32, of which two are used
    p: float = 0.0


NO_DROPOUT = Dropout()


def apply_dropout(x: Tensor, dropout: Dropout) -> Tensor:
    """x (M, N) with the mask that a fused kernel would apply to a matrix of this shape."""
    if dropout.seed is None:
        return x
    out = torch.empty_like(x)
    launch(kernels.dropout_kernel, (triton.cdiv(x.numel(), 1024),))(x, out, *dropout, x.numel(), BLOCK=1024)
    return out


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Random seeds, (count, 4) int32, from PyTorch's generator of the device.

    Each has 16 bytes: Triton would compile other kernels for pointers that are aligned differently.
    """
    return torch.randint(-(2**31), 2**31 - 1, (count, 4), dtype=torch.int32, device=device)
