"""Gradients of layer scale as a function of tensors."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vitral.kernels.layer_scale import kernel as kernels
from vitral.kernels.precompile import launch


def layer_scale_backward(grad: Tensor, grad_bias: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """The gradient of `scale` (N,) from those of diag(scale)·weight, (N, K), and scale·bias, (N,).

    `grad` and `grad_bias` become the gradients of `weight` and `bias`.
    """
    (N, K), grad_scale, block_rows = grad.shape, torch.empty_like(scale), 4
    launch(kernels.layer_scale_backward_kernel, (triton.cdiv(N, block_rows),))(
        grad, weight, scale, bias, grad_bias, grad_scale, N, K,
        BLOCK_ROWS=block_rows, BLOCK_COLS=min(512, triton.next_power_of_2(K)),
    )  # fmt: skip
    return grad_scale
