"""FP8 quantization: values, scales and bounds, in Triton's interpreter.

The interpreter truncates some e4m3 values that a GPU rounds; tolerances allow for that.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.triton_interpreter import relative_difference, requires_interpreter
from vitral.kernels.fp8.op import GemmBound, quantize_and_sum, quantize_weight, quantize_with_scales
from vitral.kernels.layernorm_gelu.op import LayerNormParams, add_layernorm, bias_gelu, bias_gelu_backward
from vitral.kernels.reduce.op import ColumnSums

pytestmark = requires_interpreter


@pytest.mark.parametrize("transposed", [False, True])
def test_quantize_weight_scales_each_row(transposed: bool) -> None:
    weight = torch.randn(40, 70) * torch.logspace(-3, 3, 40)[:, None]
    strided = weight.t().contiguous().t() if transposed else weight
    quantized = quantize_weight(strided, torch.linspace(-5, 4, 40), torch.zeros(2))
    error = (quantized.data.float() * quantized.scales - weight).abs().amax(dim=1) / weight.abs().amax(dim=1)
    assert error.max() < 0.15
    assert quantized.bound.tolist() == pytest.approx([weight.norm(dim=1).max().item(), 5.0], rel=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_quantize_with_the_scales_of_quantize_weight_gives_the_same_values(transposed: bool) -> None:
    matrix = torch.randn(24, 40)
    matrix = torch.randn(40, 24).t() if transposed else matrix
    expected = quantize_weight(matrix, None, torch.zeros(2))
    out = torch.empty_like(expected.data)
    quantize_with_scales(matrix, expected.scales, out)
    assert torch.equal(out.float(), expected.data.float())


def test_gemm_bounds_prevent_overflow() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(33, 48), torch.randn(56, 48) * 3
    bias = torch.randn(56)
    norm = LayerNormParams(torch.rand(48) + 0.5, torch.randn(48), 1e-6)
    _, _, normed, normed_fp8 = add_layernorm(x, None, None, None, norm, fp8=True)
    assert normed is not None
    assert normed_fp8 is not None
    assert relative_difference(normed_fp8.data.float() * normed_fp8.scales, normed) < 0.1
    weight_bound = quantize_weight(weight, bias, torch.zeros(2)).bound
    assert ((normed @ weight.t()).abs() <= normed_fp8.row_norms * weight_bound[0]).all()
    with np.errstate(over="ignore"):
        gelu, gelu_fp8 = bias_gelu(normed @ weight.t(), bias, "gelu", GemmBound(normed_fp8.row_norms, weight_bound))
    assert gelu is None
    assert gelu_fp8 is not None
    assert gelu_fp8.data.float().abs().max() < 448


def test_scales_are_positive_for_zero_weights() -> None:
    """As after an identity initialisation, where bounds are 0."""
    h, bias, row_norms = torch.randn(5, 64), torch.zeros(64), torch.ones(5, 1)
    weight_bound = quantize_weight(torch.zeros(64, 16), bias, torch.zeros(2)).bound
    assert weight_bound.tolist() == [0, 0]
    bound = GemmBound(row_norms, weight_bound)
    with np.errstate(over="ignore"):
        _, gelu_fp8 = bias_gelu(torch.zeros_like(h), bias, "gelu", bound)
        _, _, grad_fp8, _ = bias_gelu_backward(h, bias, torch.zeros_like(h), "gelu", bound, None, ColumnSums())
    for tensor in (gelu_fp8, grad_fp8):
        assert tensor is not None
        assert (tensor.scales > 0).all()
        assert not tensor.data.float().any()


@pytest.mark.parametrize(("N", "num_parts"), [(192, 1), (144, 1), (192, 3), (144, 3)])
@pytest.mark.parametrize("sum_rows", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_quantize_and_sum(N: int, num_parts: int, sum_rows: bool, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.kernels.reduce.op.MAX_PROGRAMS", 3)
    torch.manual_seed(0)
    x = torch.randn(37, N) * torch.logspace(-4, 4, 37)[:, None]
    x[5] = 0
    x[6, 1:] = 0  # the row's norm equals its only value
    sums = ColumnSums()
    parts = tuple(part.contiguous() for part in x.chunk(num_parts, dim=1))
    row_sum, x_fp8 = quantize_and_sum(parts, sum_rows, fp8, sums)
    if sum_rows:
        sums.compute()
    assert (row_sum is not None, x_fp8 is not None) == (sum_rows, fp8)
    if row_sum is not None:
        assert torch.allclose(row_sum, x.sum(0), rtol=1e-4)
    if x_fp8 is not None:
        error = (x_fp8.data.float() * x_fp8.scales - x).norm(dim=1) / x.norm(dim=1).clamp_min(1e-12)
        assert error.mean() < 0.1
        assert error[6] < 1e-6
        expected_scales = (x.norm(dim=1) / 448).clamp_min(1e-12 / 448)
        assert x_fp8.scales.squeeze(1).tolist() == pytest.approx(expected_scales.tolist())
