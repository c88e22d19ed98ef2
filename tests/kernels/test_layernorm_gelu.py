"""GELU kernels against PyTorch, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.triton_interpreter import requires_interpreter
from vitral.kernels.layernorm_gelu.op import bias_gelu, bias_gelu_backward
from vitral.kernels.reduce.op import ColumnSums
from vitral.models.vit import ACTIVATIONS, Activation

pytestmark = requires_interpreter


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu"])
def test_gelu_and_its_gradients_match_pytorch(activation: Activation) -> None:
    x = torch.cat([torch.linspace(-12, 12, 255), torch.tensor([-300.0, 300.0, 0.0])]).reshape(2, 129).requires_grad_()
    bias, sums = torch.zeros(129), ColumnSums()
    with np.errstate(over="ignore"):  # exp2 overflows to infinity for large |x|, as on a GPU
        gelu, _ = bias_gelu(x.detach(), bias, activation, None)
        recomputed, grad_h, _, grad_bias = bias_gelu_backward(
            x.detach().clone(), bias, torch.ones_like(x), activation, None, None, sums
        )
        sums.compute()
    expected = ACTIVATIONS[activation]()(x.double())
    assert gelu is not None
    assert (gelu - expected).abs().max() < 2e-5 + 1e-6 * 300
    assert (gelu - expected)[x.abs() < 13].abs().max() < 5e-6
    (slope,) = torch.autograd.grad(expected.sum(), x)
    assert (grad_h - slope).abs().max() < 8e-6
    assert torch.equal(recomputed, gelu)
    assert torch.allclose(grad_bias, grad_h.sum(0), atol=1e-5)
