"""Gradients of weights as products of FP8, in Triton's interpreter: which rounds some numbers badly, a GPU does not."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from support.triton_interpreter import a_gpu, a_model, interpreted, products_in_fp32
from vitral.kernels import encoder
from vitral.kernels import fused_model as fused
from vitral.kernels import ops as launch
from vitral.kernels.fp8_wgrad import op as columns
from vitral.models.vit import ViT

pytestmark = interpreted


def small(matrix: torch.Tensor) -> launch.Small:
    """Each row as FP8, as PyTorch rounds it."""
    scales = matrix.norm(dim=1, keepdim=True) / 448
    return launch.Small((matrix / scales).to(torch.float8_e4m3fn), scales, scales)


@settings(max_examples=30, deadline=None)
@given(M=st.integers(1, 3000), spread=st.floats(0, 12), seed=st.integers(0, 99))
def test_a_token_s_share_is_a_power_of_two_and_the_rest(M: int, spread: float, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    scales = 10 ** (-spread * torch.rand(M, 1, generator=draws))
    shares = columns.shares_of(scales)
    assert shares.top == scales.max()
    assert torch.allclose(shares.whole, (scales / scales.max()).squeeze(1))
    assert torch.allclose(shares.root * shares.rest, shares.whole)
    assert (torch.frexp(shares.root).mantissa == 0.5).all()
    assert ((shares.rest <= 1.001 * shares.root) & (shares.root <= 4.001 * shares.rest) & (shares.root <= 1)).all()


@pytest.mark.parametrize(("M", "N"), [(16, 16), (48, 80), (208, 144)])
def test_numbers_turned_are_the_same_numbers(M: int, N: int) -> None:
    torch.manual_seed(0)
    rows = small(torch.randn(M, N) * torch.logspace(-3, 3, M)[:, None])
    found = columns.turned(rows)
    assert found.shape == (N, M)
    assert torch.equal(found.float(), rows.numbers.float().t())
    root = torch.exp2(-(torch.arange(M) % 3.0))
    found, wanted = columns.turned(rows, root).float(), (rows.numbers.float() * root[:, None]).t()
    assert torch.equal(found[wanted.abs() >= 2**-6], wanted[wanted.abs() >= 2**-6])  # smaller ones have fewer bits
    assert torch.allclose(found, wanted, rtol=0, atol=2**-9)


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_and_its_gradient_by_columns(tanh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROGRAMS", 3)
    torch.manual_seed(0)
    M, N = 80, 144
    h, bias, dg = (3 * torch.randn(M, N)).requires_grad_(), torch.randn(N), torch.randn(M, N)
    given, rest = 0.01 + torch.rand(M, 1), torch.rand(M)
    steep, scale, later = torch.tensor(1.3), torch.tensor(20 / 448), launch.Sums()
    with np.errstate(over="ignore"):
        dh8, dh, g, summed = columns.gelu_back(h.detach(), bias, dg, tanh, given, steep, rest, scale, later)
    later.take()
    wanted = F.gelu(h + bias, approximate="tanh" if tanh else "none")
    (gradient,) = torch.autograd.grad(wanted, h, dg)
    assert torch.allclose(dh8.scales, given * steep)
    assert torch.equal(dh.float(), dh8.numbers.float().t())
    assert (dh8.numbers.float() * dh8.scales - gradient).norm() < 0.1 * gradient.norm()
    assert (g.float().t() * scale - wanted * rest[:, None]).norm() < 0.1 * wanted.norm()
    assert torch.allclose(summed, gradient.sum(0), atol=1e-3)


def test_a_norm_by_columns() -> None:
    torch.manual_seed(0)
    M, N = 64, 80
    norm = (torch.rand(N) + 0.5, torch.randn(N), 1e-6)
    was = launch.add_norm(torch.randn(M, N), None, None, None, norm, False)
    assert was.plain is not None
    share, scale = torch.rand(M), torch.tensor(0.03)
    found = columns.normed(was, norm, share, scale).float().t() * scale
    assert (found - was.plain * share[:, None]).norm() < 0.1 * was.plain.norm()


def test_the_product_itself() -> None:
    dy, x = torch.randn(32, 160).to(torch.float8_e4m3fn), torch.randn(48, 160).to(torch.float8_e4m3fn)
    found = columns.product(dy, x, torch.tensor(0.5), torch.tensor(3.0))
    assert found.dtype == torch.float32
    assert torch.allclose(found, 1.5 * dy.float() @ x.float().t(), atol=1e-3)


def gradients(model: ViT, tokens: torch.Tensor, apart: float, columns: bool) -> list[torch.Tensor]:
    """With the same branches left out, and an image whose gradient is that much smaller."""
    torch.manual_seed(3)
    own = encoder.FusedEncoder(
        model.encoder, True, torch.float32, front=model.config.pooling == "class", columns=columns
    )
    out = own(tokens, model.config.grid)
    dy = torch.randn_like(out)
    dy[1] *= apart
    return list(torch.autograd.grad(out, own.parameters, dy))


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({"qk_norm": True}, 1e-3),
        pytest.param({}, 1e-3, marks=pytest.mark.slow),
        pytest.param({"pooling": "mean", "gelu": "tanh"}, 1.0, marks=pytest.mark.slow),
        pytest.param({"drop_path": 0.4}, 1.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_fp8_weights_of_wide_models_have_gradients_of_fp8(
    changes: dict[str, Any], apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = products_in_fp32(monkeypatch)
    front = changes.get("pooling") != "mean"
    model, tokens = a_model(32, depth=2, registers=15 if front else 16, **changes)
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.mlp.contract.weight *= 8  # type: ignore[union-attr]
    assert tokens.shape[:2] == (2, 80)
    found = gradients(model, tokens, apart, columns=True)
    products = [(48, 160, 64), (64, 160, 48), (144, 160, 48)]  # of a block, on the way back
    assert [one for one in seen if one in products] == (products[2:] if front else products) + products
    for got, wanted in zip(found, gradients(model, tokens, apart, columns=False), strict=True):
        assert (got - wanted).norm() <= (0.2 if got.ndim == 2 else 1e-3) * wanted.norm().clamp_min(0.01)


def test_a_number_of_tokens_that_no_product_of_fp8_can_sum_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = products_in_fp32(monkeypatch)
    model, tokens = a_model(32)  # 2·65
    found, wanted = (gradients(model, tokens, 1.0, columns) for columns in (True, False))
    assert all(map(torch.equal, found, wanted))
    assert all(product[0] == 130 for product in seen)


@pytest.mark.parametrize(("image", "changes"), [(16, {}), (32, {}), (68, {}), (32, {"width": 80, "heads": 1})], ids=str)
def test_answers_in_fp8_need_no_other_weights(
    image: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way attention goes: for 17 tokens, 65 and 290, and with heads of 80 columns."""
    products_in_fp32(monkeypatch)
    model, tokens = a_model(image, depth=2, **changes)
    own, held = encoder.FusedEncoder(model.encoder, True, torch.float32, front=True), list[int]()
    with torch.no_grad():
        before = own(tokens, model.config.grid)
        own.weights.let_go(
            lambda small: (
                held.append(len(own.weights.rounded)),
                a_gpu().gather([*model.parameters(), *small]),
            )
        )
        assert held == [0], "while they are held, their memory is not given back"
        for weight, rounded in own.weights.rounded.items():
            assert rounded.data_ptr() == weight.data_ptr(), "the old ones would be held"
        assert torch.equal(own(tokens, model.config.grid), before)
    left = [name for name, weight in model.encoder.named_parameters() if weight.ndim == 2 and weight.numel()]
    assert left == ["blocks.0.attention.project.weight"] + [
        f"blocks.1.{name}.weight" for name in ("attention.project", "mlp.expand", "mlp.contract")
    ]


def test_they_are_tried_in_wide_models_and_left_to_bf16_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, said = products_in_fp32(monkeypatch), list[str]()
    model = a_model(16)[0]
    gpu = a_gpu(precision="fp32", fp8=True)
    assert not fused.columns_agree(model, gpu, 16, said.append), "too narrow"
    assert seen == []
    monkeypatch.setattr(fused, "WIDE", 48)
    assert not fused.columns_agree(model, gpu, 9, said.append), "153 tokens"
    assert "multiples of 16" in said.pop()
    assert fused.columns_agree(model, gpu, 16, said.append)
    assert said == []
    assert model.training
    real = columns.normed
    monkeypatch.setattr(columns, "normed", lambda *given: torch.zeros_like(real(*given)))
    assert not fused.columns_agree(model, gpu, 16, said.append)
    assert said[0].startswith("gradients of weights are products of bf16: its kernels are off by 100%")


def test_an_answer_needs_the_widest_matrix_once_and_the_tokens_four_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Normed, what attention gives, what is added, and the sums, which stay where they are."""
    monkeypatch.setattr(launch, "launcher", lambda kernel, grid: lambda *given, **named: None)
    model, tokens = a_model(32, depth=3, mlp_width=768)
    own = encoder.FusedEncoder(model.encoder, number=torch.float32)
    with torch.no_grad(), Alive([*model.parameters(), tokens]) as alive:
        own(tokens, model.config.grid)
    wide = tokens.shape[0] * tokens.shape[1] * 768 * 4
    assert alive.most < wide + 4.2 * tokens.numel() * 4


class Alive(TorchDispatchMode):
    """The most bytes at a time of all that was made meanwhile."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        made = function(*given, **(named or {}))
        if isinstance(made, torch.Tensor) and (place := made.untyped_storage()._cdata) not in self.sizes:
            self.sizes[place] = made.untyped_storage().nbytes()
            self.most = max(self.most, sum(self.sizes.values()))
            weakref.finalize(made.untyped_storage(), self.sizes.pop, place, None)
        return made
