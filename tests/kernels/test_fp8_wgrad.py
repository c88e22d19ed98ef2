"""Weight gradients as FP8 GEMMs, in Triton's interpreter (which truncates some e4m3 values that a GPU rounds)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from support.triton_interpreter import emulate_fp8_gemms, requires_interpreter, small_model
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.fp8.op import Fp8Tensor
from vitral.kernels.fp8_wgrad import op
from vitral.kernels.layernorm_gelu.op import LayerNormParams, add_layernorm
from vitral.kernels.reduce.op import ColumnSums
from vitral.models.vit import ViT

pytestmark = [requires_interpreter, pytest.mark.slow]


def quantize_rows(matrix: torch.Tensor) -> Fp8Tensor:
    scales = matrix.norm(dim=1, keepdim=True) / 448
    return Fp8Tensor((matrix / scales).to(torch.float8_e4m3fn), scales, scales)


@settings(max_examples=30, deadline=None)
@given(M=st.integers(1, 3000), decades=st.floats(0, 12), seed=st.integers(0, 99))
def test_relative_scales_split_into_a_power_of_two_and_a_remainder(M: int, decades: float, seed: int) -> None:
    scales = 10 ** (-decades * torch.rand(M, 1, generator=torch.Generator().manual_seed(seed)))
    split = op.relative_scales(scales)
    assert split.max_scale == scales.max()
    assert torch.allclose(split.relative, (scales / scales.max()).squeeze(1))
    assert torch.allclose(split.pow2_root * split.remainder, split.relative)
    assert (torch.frexp(split.pow2_root).mantissa == 0.5).all()
    assert (split.remainder <= 1.001 * split.pow2_root).all()
    assert (split.pow2_root <= 4.001 * split.remainder).all()
    assert (split.pow2_root <= 1).all()


@pytest.mark.parametrize(("M", "N"), [(16, 16), (48, 80), (197, 144)])
def test_transpose_keeps_the_values_and_pads_with_zeros(M: int, N: int) -> None:
    torch.manual_seed(0)
    padding = -M % 16
    x = quantize_rows(torch.randn(M, N) * torch.logspace(-3, 3, M)[:, None])
    transposed = op.transpose_fp8(x)
    assert transposed.shape == (N, M + padding)
    assert torch.equal(transposed.float(), F.pad(x.data.float().t(), (0, padding)))
    factor = torch.exp2(-(torch.arange(M) % 3.0))
    transposed, expected = (
        op.transpose_fp8(x, factor).float(),
        F.pad((x.data.float() * factor[:, None]).t(), (0, padding)),
    )
    is_normal = expected.abs() >= 2**-6  # subnormal values have fewer bits
    assert torch.equal(transposed[is_normal], expected[is_normal])
    assert torch.allclose(transposed, expected, rtol=0, atol=2**-9)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_backward_returns_row_major_and_transposed_operands(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitral.kernels.reduce.op.MAX_PROGRAMS", 3)
    torch.manual_seed(0)
    M, N = 75, 144
    h, bias, grad_gelu = (3 * torch.randn(M, N)).requires_grad_(), torch.randn(N), torch.randn(M, N)
    grad_scales, factor = 0.01 + torch.rand(M, 1), torch.rand(M)
    scale_ratio, gelu_scale, sums = torch.tensor(1.3), torch.tensor(20 / 448), ColumnSums()
    with np.errstate(over="ignore"):
        grad_h, grad_h_t, gelu_t, grad_bias = op.gelu_backward_fp8(
            h.detach(), bias, grad_gelu, activation, grad_scales, scale_ratio, factor, gelu_scale, sums
        )
    sums.compute()
    expected = F.gelu(h + bias, approximate="tanh" if activation == "gelu_tanh" else "none")
    (expected_grad,) = torch.autograd.grad(expected, h, grad_gelu)
    assert torch.allclose(grad_h.scales, grad_scales * scale_ratio)
    assert torch.equal(grad_h_t.float(), F.pad(grad_h.data.float().t(), (0, 5)))
    assert not gelu_t[:, M:].float().any()
    assert (grad_h.data.float() * grad_h.scales - expected_grad).norm() < 0.1 * expected_grad.norm()
    assert (gelu_t[:, :M].float().t() * gelu_scale - expected * factor[:, None]).norm() < 0.1 * expected.norm()
    assert torch.allclose(grad_bias, expected_grad.sum(0), atol=1e-3)


def test_layernorm_transposed_recomputes_the_norm() -> None:
    torch.manual_seed(0)
    M, N = 62, 80
    norm = LayerNormParams(torch.rand(N) + 0.5, torch.randn(N), 1e-6)
    saved = add_layernorm(torch.randn(M, N), None, None, None, norm, fp8=False)
    assert saved.normed is not None
    factor, scale = torch.rand(M), torch.tensor(0.03)
    out = op.layernorm_transposed(saved, norm, factor, scale).float().t() * scale
    assert not out[M:].any()
    assert (out[:M] - saved.normed * factor[:, None]).norm() < 0.1 * saved.normed.norm()


def test_wgrad_gemm_returns_fp32() -> None:
    grad_out_t, x_t = torch.randn(32, 160).to(torch.float8_e4m3fn), torch.randn(48, 160).to(torch.float8_e4m3fn)
    out = op.wgrad_gemm(grad_out_t, x_t, torch.tensor(0.5), torch.tensor(3.0))
    assert out.dtype == torch.float32
    assert torch.allclose(out, 1.5 * grad_out_t.float() @ x_t.float().t(), atol=1e-3)


def param_grads(model: ViT, tokens: torch.Tensor, grad_ratio: float, fp8_wgrad: bool) -> list[torch.Tensor]:
    """Parameter gradients; the output gradient of the second image is multiplied by `grad_ratio`."""
    torch.manual_seed(3)
    cls_only = model.config.pooling == "class"
    encoder = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32, cls_only=cls_only, fp8_wgrad=fp8_wgrad)
    out = encoder(tokens, model.config.grid)
    grad_out = torch.randn_like(out)
    grad_out[1] *= grad_ratio
    return list(torch.autograd.grad(out, encoder.parameters, grad_out))


@pytest.mark.parametrize(
    ("overrides", "grad_ratio"),
    [
        ({"qk_norm": True}, 1e-3),
        pytest.param({}, 1e-3, marks=pytest.mark.slow),
        pytest.param({"pooling": "mean", "activation": "gelu_tanh"}, 1.0, marks=pytest.mark.slow),
        pytest.param({"drop_path": 0.4}, 1.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp8_weight_gradients_agree_with_bf16(
    overrides: dict[str, Any], grad_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemms = emulate_fp8_gemms(monkeypatch)
    cls_only = overrides.get("pooling") != "mean"
    model, tokens = small_model(32, depth=2, registers=15 if cls_only else 16, **overrides)
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.get_parameter("mlp.contract.weight").mul_(8)
    assert tokens.shape[:2] == (2, 80)
    grads = param_grads(model, tokens, grad_ratio, fp8_wgrad=True)
    block_wgrads = [(48, 160, 64), (64, 160, 48), (144, 160, 48)]  # contract, expand, qkv
    last_block_wgrads = block_wgrads[2:] if cls_only else block_wgrads
    assert [gemm for gemm in gemms if gemm in block_wgrads] == last_block_wgrads + block_wgrads
    for grad, expected in zip(grads, param_grads(model, tokens, grad_ratio, fp8_wgrad=False), strict=True):
        assert (grad - expected).norm() <= (0.2 if grad.ndim == 2 else 1e-3) * expected.norm().clamp_min(0.01)


def test_fp8_gradients_do_not_depend_on_whose_attention_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's attention returns separate gradients of q, k and v; those of the kernel are already side by side."""
    emulate_fp8_gemms(monkeypatch)
    model, tokens = small_model(32, depth=2, registers=15)
    expected = param_grads(model, tokens, 1.0, fp8_wgrad=True)
    monkeypatch.setattr("vitral.kernels.attention.op.MAX_TOKENS", 0)
    for grad, expected_grad in zip(param_grads(model, tokens, 1.0, fp8_wgrad=True), expected, strict=True):
        assert (grad - expected_grad).norm() <= 1e-2 * expected_grad.norm().clamp_min(0.01)
