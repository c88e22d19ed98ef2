"""The fused post-attention block and the FP8 expansion with GELU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.triton_interpreter import emulate_fp8_gemms, requires_interpreter, small_model, spy_on
from vitral.kernels.block.op import expand_gelu_fp8, expand_gelu_supports, post_attention_supports
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.fp8.op import quantize_weight
from vitral.kernels.layernorm_gelu.op import LayerNormParams, add_layernorm

pytestmark = [requires_interpreter, pytest.mark.slow]

MODELS: dict[str, dict[str, Any]] = {
    "class token": {"width": 96, "heads": 3},
    "power of two, tanh, no bias": {"width": 64, "activation": "gelu_tanh", "qkv_bias": False, "pooling": "mean"},
    "RoPE, QK-norm": {"width": 64, "positions": "learned+rotary", "qk_norm": True},
    "width of Ti/16": {"width": 192, "heads": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)
def test_fused_blocks_match_the_reference_in_inference(
    overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = small_model(20, **{"depth": 3, "mlp_width": 128} | overrides)
    model.eval()
    tokens_before, kernel = tokens.clone(), spy_on(monkeypatch, "block", "post_attention_kernel")
    cls_only = model.config.pooling == "class"
    encoder = FusedEncoder(model.encoder, dtype=torch.float32, cls_only=cls_only, fused_block_min_tokens=0)
    out, expected = encoder(tokens, model.config.grid), model.encoder(tokens, model.config.grid)
    torch.testing.assert_close(out, expected[:, :1] if cls_only else expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(tokens, tokens_before), "the caller's tokens were overwritten"
    assert kernel.launches == 2, "the last of three blocks has no next block"


@torch.no_grad()
def test_small_batches_do_not_use_fused_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = small_model(20, width=64, mlp_width=128, depth=2)
    kernel = spy_on(monkeypatch, "block", "post_attention_kernel")
    num_tokens = tokens[..., 0].numel()
    for minimum, launches in ((num_tokens + 1, 0), (num_tokens, 1)):
        encoder = FusedEncoder(model.eval().encoder, dtype=torch.float32, fused_block_min_tokens=minimum)
        encoder(tokens, model.config.grid)
        assert kernel.launches == launches


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("power of two, tanh, no bias", 20),
        ("RoPE, QK-norm", 20),
        ("class token", 36),  # flash attention
        pytest.param("width of Ti/16", 20, marks=pytest.mark.slow),
    ],
)
def test_fused_blocks_match_the_reference_in_training(
    name: str, image_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = small_model(image_size, **{"depth": 3, "mlp_width": 128} | MODELS[name])
    kernel = spy_on(monkeypatch, "block", "post_attention_kernel")
    tokens.requires_grad_()
    encoder = FusedEncoder(
        model.encoder,
        dtype=torch.float32,
        recompute_threshold=0,
        cls_only=model.config.pooling == "class",
        fused_block_min_tokens=0,
    )
    out = encoder(tokens, model.config.grid)
    expected = model.encoder(tokens, model.config.grid)[:, : out.shape[1]]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert kernel.launches == 2
    grad_out, inputs = torch.randn_like(expected), [tokens, *model.encoder.parameters()]
    grads, expected_grads = (torch.autograd.grad(result, inputs, grad_out) for result in (out, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("overrides", "recompute_threshold"), [({}, 2**25), ({"drop_path": 0.3}, 0)], ids=str)
def test_training_that_saves_norms_or_drops_branches_does_not_use_fused_blocks(
    overrides: dict[str, Any], recompute_threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = spy_on(monkeypatch, "block", "post_attention_kernel")
    model, tokens = small_model(20, width=64, mlp_width=128, depth=3, **overrides)
    encoder = FusedEncoder(
        model.train().encoder,
        dtype=torch.float32,
        recompute_threshold=recompute_threshold,
        cls_only=True,
        fused_block_min_tokens=0,
    )
    encoder(tokens.requires_grad_(), model.config.grid)
    assert kernel.launches == 0


@torch.no_grad()
def test_workspace_fits_an_mlp_that_is_wider_than_qkv() -> None:
    model, tokens = small_model(8, width=64, mlp_width=2048, depth=3)
    encoder = FusedEncoder(model.eval().encoder, dtype=torch.float32, cls_only=True, fused_block_min_tokens=0)
    expected = model.encoder(tokens, model.config.grid)[:, :1]
    torch.testing.assert_close(encoder(tokens, model.config.grid), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "overrides", [{"width": 96, "heads": 3}, {"width": 64, "activation": "gelu_tanh", "pooling": "mean"}]
)
def test_fp8_inference_fuses_expansion_and_gelu(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results differ only in that the unfused hidden activations are rounded between GEMM and GELU."""
    model, tokens = small_model(20, **{"depth": 3, "mlp_width": 256} | overrides)
    gemms, kernel = emulate_fp8_gemms(monkeypatch), spy_on(monkeypatch, "block", "expand_gelu_fp8_kernel")
    cls_only = model.config.pooling == "class"
    encoder = FusedEncoder(
        model.eval().encoder, fp8=True, dtype=torch.float32, cls_only=cls_only, fused_block_min_tokens=0
    )
    out = encoder(tokens, model.config.grid)
    assert kernel.launches == (2 if cls_only else 3), "all blocks, except for class tokens alone"
    assert not any(shape[1:] == (model.config.width, 256) for shape in gemms)
    encoder.fused_block_min_tokens = tokens[..., 0].numel() + 1
    torch.testing.assert_close(out, encoder(tokens, model.config.grid), atol=0.02, rtol=0.02)
    assert any(shape[1:] == (model.config.width, 256) for shape in gemms)
    expected = model.encoder(tokens, model.config.grid)[:, : out.shape[1]]
    assert (out - expected).norm() / expected.norm() < 0.3  # FP8 rounding


def test_expand_gelu_is_gelu_of_the_gemm() -> None:
    M, D, H = 150, 96, 256  # more tokens than one program has
    torch.manual_seed(0)
    x, weight, bias = torch.randn(M, D), 0.1 * torch.randn(H, D), torch.randn(H)
    norm = LayerNormParams(torch.ones(D), torch.zeros(D), 1e-6)
    x_fp8 = add_layernorm(x, None, None, None, norm, fp8=True, store_normed=False).normed_fp8
    weight_fp8 = quantize_weight(weight, bias, torch.zeros(2))
    assert x_fp8 is not None
    out = expand_gelu_fp8(x_fp8, weight_fp8, bias, "gelu")
    product = (x_fp8.data.float() * x_fp8.scales) @ (weight_fp8.data.float() * weight_fp8.scales).t()
    is_close = torch.isclose(out.data.float() * out.scales, F.gelu(product + bias), atol=0.003, rtol=0.07)
    assert is_close.float().mean() > 0.97  # the interpreter halves values that round up to a power of two


def test_supported_widths_are_one_or_two_powers_of_two() -> None:
    widths = range(16, 1024, 16)
    assert [D for D in widths if post_attention_supports(D, 4 * D)] == [32, 64, 96, 128, 160, 192, 256]
    assert not post_attention_supports(192, 100)
    assert not post_attention_supports(256, 1024, training=True)
    expand_widths = [32, 64, 96, 128, 160, 192, 256, 288, 320, 384]
    assert [D for D in widths if expand_gelu_supports(D, 4 * D)] == expand_widths
    assert not expand_gelu_supports(384, 1000)
