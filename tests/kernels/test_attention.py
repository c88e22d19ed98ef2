"""Attention of 65 to 256 tokens in Triton's interpreter, in fp32, against PyTorch's own and its way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.triton_interpreter import a_model, interpreted, products_in_fp32
from vitral.kernels import fused_model as fused
from vitral.kernels import ops as launch
from vitral.kernels.encoder import FusedEncoder

pytestmark = interpreted


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("T", "d"), [(65, 32), (77, 64), (100, 24), (197, 64), (256, 32)])
def test_own_attention_is_attention(T: int, d: int, turned: bool) -> None:
    B, h = 1 if T > 100 else 2, 2
    torch.manual_seed(T)
    qkv, do = 1.5 * torch.randn(B * T, 3 * h * d), torch.randn(B * T, h * d)
    qkv[:T, : h * d] += 12 * torch.randn(1, h * d)  # far from zero: scores beyond what exp can hold
    wanted = qkv.clone().requires_grad_()
    wanted_o = F.scaled_dot_product_attention(*launch.by_heads(wanted, h, T)).transpose(1, 2).reshape(B * T, -1)
    (gradient,) = torch.autograd.grad(wanted_o, wanted, do)
    q, k, v = qkv.chunk(3, dim=1)
    if turned:  # queries and keys for themselves, as after norms and rotary positions
        q, k = q.contiguous(), k.contiguous()
    o, lse = launch.attend(q, k, v, h, T)
    assert torch.allclose(o, wanted_o, atol=2e-5)
    dqkv = launch.attend_back(q, k, v, o, lse, do, h, T)
    assert (dqkv - gradient).abs().max() < 2e-5 * gradient.abs().max()


@pytest.mark.parametrize(
    ("image", "changes"),
    [
        (32, {}),
        (32, {"qk_norm": True, "positions": "learned+rotary", "registers": 2}),
        (36, {"positions": "rotary", "pooling": "mean", "qkv_bias": False}),
        (36, {"qkv_bias": False}),
    ],
    ids=str,
)
def test_an_encoder_of_so_many_tokens(image: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = a_model(image, **changes)
    assert launch.SHORT < tokens.shape[1] <= launch.LONG
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    encoder = FusedEncoder(model.encoder, number=torch.float32)
    dy, given = torch.randn_like(tokens), tokens.clone().requires_grad_()
    out = encoder(given, model.config.grid)
    found = torch.autograd.grad(out, [given, *encoder.parameters], dy)
    with torch.no_grad():
        assert torch.equal(encoder(tokens, model.config.grid), out)
    monkeypatch.undo()
    given = tokens.clone().requires_grad_()
    plain = model.encoder(given, model.config.grid)
    assert (out - plain).norm() < 5e-5 * plain.norm()
    for a, b in zip(found, torch.autograd.grad(plain, [given, *encoder.parameters], dy), strict=True):
        assert (a - b).norm() < 5e-5 * b.norm().clamp_min(0.1)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize(("T", "d"), [(65, 32), (100, 24), (197, 64)])
def test_attention_as_fp8_is_that_but_for_rounding(T: int, d: int, scale: float) -> None:
    """By the bound of the values: x·Wᵀ + b is no larger than |x|·|w| + |b|, nor is a mean of such."""
    B, h = 2, 2
    torch.manual_seed(T)
    x, weight, bias = torch.randn(B * T, 48), scale * torch.randn(3 * h * d, 48), scale * torch.randn(3 * h * d)
    x[T:] *= 30  # the other image is larger, and has its own scale
    qkv = x @ weight.t() + bias
    bound = torch.tensor([weight.norm(dim=1).max(), bias.abs().max()])
    q, k, v = qkv.chunk(3, dim=1)
    wanted, _ = launch.attend(q, k, v, h, T)
    found = launch.attend_small(q, k, v, h, T, (x.norm(dim=1, keepdim=True), bound))
    assert (found.scales[:T] == found.scales[0]).all()
    assert found.scales[T] > 5 * found.scales[0]
    assert found.numbers.float().abs().max() < 448
    for image in (slice(0, T), slice(T, None)):  # the interpreter rounds 31.7 to 16, where a GPU carries
        off = found.numbers[image].float() * found.scales[image] - wanted[image]
        assert off.norm() < 0.15 * wanted[image].norm()


@pytest.mark.parametrize("front", [False, True])
def test_with_fp8_an_answer_has_all_products_of_fp8(front: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = products_in_fp32(monkeypatch)
    model, tokens = a_model(32, depth=2)
    with torch.no_grad():
        out = FusedEncoder(model.encoder, True, torch.float32, front=front)(tokens, model.config.grid)
        wanted = model.encoder(tokens, model.config.grid)[:, : out.shape[1]]
    block = [(130, 48, 144), (130, 48, 48), (130, 48, 64), (130, 64, 48)]
    assert seen == block + (block[:1] if front else block)
    assert (out - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize(("changes", "front"), [({}, False), ({"qk_norm": True}, False), ({}, True)], ids=str)
def test_with_fp8_the_gradient_of_queries_keys_and_values_is_fp8_too(
    changes: dict[str, Any], front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = products_in_fp32(monkeypatch)
    model, tokens = a_model(32, **changes)
    given, again = (tokens.clone().requires_grad_() for _ in range(2))
    out = FusedEncoder(model.encoder, True, torch.float32, front=front)(given, model.config.grid)
    dy = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, given, dy)
    (wanted,) = torch.autograd.grad(model.encoder(again, model.config.grid)[:, : out.shape[1]], again, dy)
    assert seen[-1] == (130, 144, 48)
    assert (130, 48, 48) not in seen  # what attention gave stays bf16
    assert (found - wanted).norm() < fused.OFF[True] * wanted.norm()


@pytest.mark.parametrize("N", [192, 144])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_sums_over_rows_and_rows_as_fp8(N: int, sums: bool, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", 3)
    torch.manual_seed(0)
    x = torch.randn(37, N) * torch.logspace(-4, 4, 37)[:, None]
    x[5] = 0
    x[6, 1:] = 0  # all of its length in one number
    later = launch.Sums()
    totals, small = launch.cast(x, sums, fp8, later)
    if sums:
        later.take()
    assert (totals is not None, small is not None) == (sums, fp8)
    if totals is not None:
        assert torch.allclose(totals, x.sum(0), rtol=1e-4)
    if small is not None:
        again = small.numbers.float() * small.scales
        off = (again - x).norm(dim=1) / x.norm(dim=1).clamp_min(1e-12)
        assert off.mean() < 0.1  # Triton's interpreter rounds some numbers badly, a GPU does not
        assert off[6] < 1e-6
        assert small.scales.squeeze(1).tolist() == pytest.approx((x.norm(dim=1) / 448).clamp_min(1e-12 / 448).tolist())
