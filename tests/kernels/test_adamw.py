"""AdamW's kernel against PyTorch's step: in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.triton_interpreter import interpreted
from vitral.kernels.muon import op as muon
from vitral.training.optim import adamw as own
from vitral.training.optim.adamw import AdamW

pytestmark = interpreted
SHAPES = [(3, 5), (2100,), (), (1,), (40, 60), (7,)]


def made() -> tuple[AdamW, list[Tensor]]:
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draws) for shape in SHAPES]
    groups: list[dict[str, Any]] = [
        {"params": weights[:3], "weight_decay": 0.3, "lr": torch.tensor(0.02)},
        {"params": weights[3:], "lr": torch.tensor(0.05)},
    ]
    return AdamW(groups, lr=torch.tensor(0.01), betas=(0.9, 0.95), weight_decay=0.0, fused=True), weights


def take_steps(adamw: AdamW, weights: list[Tensor], kernel: bool, count: int) -> None:
    draws = torch.Generator().manual_seed(1)
    for number in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws)
        weights[4].grad = None if number == 2 else weights[4].grad  # which then misses a step
        with torch.no_grad():
            if kernel and number:  # the first makes the state
                adamw.step_with_kernel(adamw.moving())
            else:
                adamw.step()


def test_it_moves_weights_and_state_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "MANY", 4)  # several launches
    (ours, weights), (plain, wanted) = made(), made()
    take_steps(ours, weights, True, 6)
    take_steps(plain, wanted, False, 6)
    for weight, same in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-5, atol=1e-6)
        for name, value in plain.state[same].items():
            torch.testing.assert_close(ours.state[weight][name], value, rtol=1e-5, atol=1e-7)


def test_where_training_has_halted_nothing_moves() -> None:
    adamw, weights = made()
    adamw.found_inf = torch.zeros(())
    take_steps(adamw, weights, True, 2)
    before = [weight.clone() for weight in weights]
    state = [value.clone() for kept in adamw.state.values() for value in kept.values()]
    adamw.found_inf.fill_(1)
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))
    with torch.no_grad():
        adamw.step_with_kernel(adamw.moving())
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    after = [value for kept in adamw.state.values() for value in kept.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


def test_a_kernel_that_fails_or_lies_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert own.kernel_agrees.__wrapped__(device)
    real = AdamW.step_with_kernel

    def lies(self: AdamW, moving: list[own.Moving]) -> None:
        real(self, moving)
        moving[0].weight.mul_(1.01)

    monkeypatch.setattr(AdamW, "step_with_kernel", lies)
    assert not own.kernel_agrees.__wrapped__(device)
    monkeypatch.setattr(AdamW, "step_with_kernel", lambda self, moving: 1 / 0)
    assert not own.kernel_agrees.__wrapped__(device)


def test_what_does_not_suit_it_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw, weights = made()
    assert adamw.moving() == []  # before the first step
    take_steps(adamw, weights, False, 1)
    assert [one.weight.numel() for one in adamw.moving()] == [2400, 2100, 15, 7, 1, 1]
    assert own.suit_kernel(adamw.moving())
    monkeypatch.setattr(AdamW, "step_with_kernel", lambda self, moving: 1 / 0)
    take_steps(adamw, weights, False, 1)  # on a CPU
    assert not own.suit_kernel([])
    for name, other in (("lr", 0.1), ("gradient", torch.zeros(4, 6).t()), ("mean", torch.zeros(2).double())):
        assert not own.suit_kernel([adamw.moving()[0]._replace(**{name: other})])
    monkeypatch.setattr(own, "MOST", 100)
    assert not own.suit_kernel(adamw.moving())
