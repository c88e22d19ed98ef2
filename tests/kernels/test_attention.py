"""Flash attention for 65 to 256 tokens against PyTorch, in Triton's interpreter and fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.triton_interpreter import emulate_fp8_gemms, requires_interpreter, small_model, spy_on
from vitral.kernels.attention.op import (
    MAX_TOKENS,
    attention_backward,
    attention_forward,
    attention_forward_fp8,
    split_heads,
)
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.encoder_checks import ENCODER_TOLERANCE
from vitral.kernels.fp8.op import GemmBound
from vitral.kernels.short_attention.op import MAX_SHORT_TOKENS

pytestmark = [requires_interpreter, pytest.mark.slow]


@pytest.mark.parametrize(
    ("T", "d", "separate_qk"),
    [
        (T, d, separate_qk)
        for T, d in [(65, 32), (77, 64), (100, 24), (197, 64), (256, 32), (261, 32)]
        for separate_qk in (False, True)
    ],
)
def test_output_and_gradients_match_pytorch(T: int, d: int, separate_qk: bool) -> None:
    B, h = 1 if T > 100 else 2, 2
    torch.manual_seed(T)
    qkv, grad_out = 1.5 * torch.randn(B * T, 3 * h * d), torch.randn(B * T, h * d)
    qkv[:T, : h * d] += 12 * torch.randn(1, h * d)  # logits that overflow exp without the running maximum
    reference = qkv.clone().requires_grad_()
    expected = F.scaled_dot_product_attention(*split_heads(reference, h, T)).transpose(1, 2).reshape(B * T, -1)
    (expected_grad,) = torch.autograd.grad(expected, reference, grad_out)
    q, k, v = qkv.chunk(3, dim=1)
    if separate_qk:  # as after QK-norm and RoPE
        q, k = q.contiguous(), k.contiguous()
    out, lse = attention_forward(q, k, v, h, T)
    assert torch.allclose(out, expected, atol=2e-5)
    grad_qkv = attention_backward(q, k, v, out, lse, grad_out, h, T)
    assert (grad_qkv - expected_grad).abs().max() < 2e-5 * expected_grad.abs().max()


@pytest.mark.parametrize("T", [65, 84, 197])
def test_a_token_of_size_s_counts_as_s_tokens(T: int) -> None:
    B, h, d = 2, 2, 32
    torch.manual_seed(T)
    qkv, sizes = torch.randn(B * T, 3 * h * d), torch.randint(1, 9, (B * T,)).float()
    bias = sizes.log().view(B, 1, 1, T)
    expected = F.scaled_dot_product_attention(*split_heads(qkv, h, T), attn_mask=bias).transpose(1, 2).flatten(2)
    q, k, v = qkv.chunk(3, dim=1)
    out, _ = attention_forward(q, k, v, h, T, sizes)
    assert torch.allclose(out.view_as(expected), expected, atol=2e-5)
    bound = GemmBound(torch.full((B * T, 1), 8.0), torch.tensor([1.0, 0.0]))
    out_fp8 = attention_forward_fp8(q, k, v, h, T, bound, sizes)
    error = (out_fp8.data.float() * out_fp8.scales).view_as(expected) - expected
    assert error.norm() < 0.1 * expected.norm()  # the interpreter truncates some e4m3 values that a GPU rounds


@pytest.mark.parametrize(
    ("image_size", "overrides"),
    [
        (32, {}),
        (32, {"qk_norm": True, "positions": "learned+rotary", "registers": 2}),
        (36, {"positions": "rotary", "pooling": "mean", "qkv_bias": False}),
        (36, {"qkv_bias": False}),
    ],
    ids=str,
)
def test_the_encoder_uses_the_kernel_and_matches_the_reference(
    image_size: int, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = small_model(image_size, **overrides)
    assert MAX_SHORT_TOKENS < tokens.shape[1] <= MAX_TOKENS
    kernels = [
        spy_on(monkeypatch, "attention", f"attention_{name}_kernel") for name in ("forward", "grad_q", "grad_kv")
    ]
    encoder = FusedEncoder(model.encoder, dtype=torch.float32)
    grad_out, inputs = torch.randn_like(tokens), tokens.clone().requires_grad_()
    out = encoder(inputs, model.config.grid)
    grads = torch.autograd.grad(out, [inputs, *encoder.parameters], grad_out)
    assert [kernel.launches for kernel in kernels] == [1, 1, 1]
    with torch.no_grad():
        assert torch.equal(encoder(tokens, model.config.grid), out)
    inputs = tokens.clone().requires_grad_()
    expected = model.encoder(inputs, model.config.grid)
    assert (out - expected).norm() < 5e-5 * expected.norm()
    expected_grads = torch.autograd.grad(expected, [inputs, *encoder.parameters], grad_out)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).norm() < 5e-5 * expected_grad.norm().clamp_min(0.1)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize(("T", "d"), [(65, 32), (100, 24), (197, 64)])
def test_fp8_output_has_one_scale_per_image_and_does_not_overflow(T: int, d: int, scale: float) -> None:
    """A weighted mean of x·Wᵀ + b is bounded by max|x|·max|w| + max|b|."""
    B, h = 2, 2
    torch.manual_seed(T)
    x, weight, bias = torch.randn(B * T, 48), scale * torch.randn(3 * h * d, 48), scale * torch.randn(3 * h * d)
    x[T:] *= 30  # the second image has larger values
    qkv = x @ weight.t() + bias
    weight_bound = torch.tensor([weight.norm(dim=1).max(), bias.abs().max()])
    q, k, v = qkv.chunk(3, dim=1)
    expected, _ = attention_forward(q, k, v, h, T)
    out = attention_forward_fp8(q, k, v, h, T, GemmBound(x.norm(dim=1, keepdim=True), weight_bound))
    assert (out.scales[:T] == out.scales[0]).all()
    assert out.scales[T] > 5 * out.scales[0]
    assert out.data.float().abs().max() < 448
    for image in (slice(0, T), slice(T, None)):  # the interpreter rounds 31.7 to 16; a GPU rounds it to 32
        error = out.data[image].float() * out.scales[image] - expected[image]
        assert error.norm() < 0.15 * expected[image].norm()


@pytest.mark.parametrize("cls_only", [False, True])
def test_fp8_inference_runs_all_gemms_in_fp8(cls_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gemms = emulate_fp8_gemms(monkeypatch)
    model, tokens = small_model(32, depth=2)
    with torch.no_grad():
        out = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32, cls_only=cls_only)(tokens, model.config.grid)
        expected = model.encoder(tokens, model.config.grid)[:, : out.shape[1]]
    block_gemms = [(130, 48, 144), (130, 48, 48), (130, 48, 64), (130, 64, 48)]
    assert gemms == block_gemms + (block_gemms[:1] if cls_only else block_gemms)
    assert (out - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize(
    ("overrides", "cls_only"),
    [
        ({}, True),
        ({}, False),
        ({"qk_norm": True}, False),
    ],
    ids=str,
)
def test_fp8_training_runs_the_qkv_input_gradient_in_fp8(
    overrides: dict[str, Any], cls_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemms = emulate_fp8_gemms(monkeypatch)
    model, tokens = small_model(32, **overrides)
    inputs, reference_inputs = (tokens.clone().requires_grad_() for _ in range(2))
    out = FusedEncoder(model.encoder, fp8=True, dtype=torch.float32, cls_only=cls_only)(inputs, model.config.grid)
    grad_out = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, inputs, grad_out)
    reference = model.encoder(reference_inputs, model.config.grid)[:, : out.shape[1]]
    (expected,) = torch.autograd.grad(reference, reference_inputs, grad_out)
    assert gemms[-1] == (130, 144, 48)
    assert (130, 48, 48) not in gemms  # the attention projection stays in bf16 in training
    assert (grad - expected).norm() < ENCODER_TOLERANCE[True] * expected.norm()
