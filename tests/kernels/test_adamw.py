"""The fused AdamW update against torch.optim.AdamW, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.triton_interpreter import requires_interpreter
from vitral.kernels.adamw import op as kernels
from vitral.kernels.muon import op as muon_op
from vitral.training.optim import adamw as adamw_module
from vitral.training.optim.adamw import AdamW, fits_kernels

pytestmark = requires_interpreter
SHAPES = [(3, 5), (2100,), (), (1,), (40, 60), (7,)]


def make_optimizer() -> tuple[AdamW, list[Tensor]]:
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=rng) for shape in SHAPES]
    groups: list[dict[str, Any]] = [
        {"params": weights[:3], "weight_decay": 0.3, "lr": torch.tensor(0.02)},
        {"params": weights[3:], "lr": torch.tensor(0.05)},
    ]
    return AdamW(groups, lr=torch.tensor(0.01), betas=(0.9, 0.95), weight_decay=0.0, fused=True), weights


def take_steps(adamw: AdamW, weights: list[Tensor], count: int) -> None:
    rng = torch.Generator().manual_seed(1)
    for step in range(count):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=rng)
        if step == 2:  # a tensor without a gradient misses this step
            weights[4].grad = None
        adamw.step()


def test_weights_and_state_match_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_op, "MAX_TENSORS_PER_LAUNCH", 4)  # several launches
    (fused, weights), (reference, expected_weights) = make_optimizer(), make_optimizer()
    fused.kernels = kernels
    take_steps(fused, weights, 6)
    take_steps(reference, expected_weights, 6)
    for weight, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
        for name, value in reference.state[expected].items():
            torch.testing.assert_close(fused.state[weight][name], value, rtol=1e-5, atol=1e-7)


def test_nothing_changes_after_a_non_finite_gradient() -> None:
    adamw, weights = make_optimizer()
    adamw.kernels, adamw.found_inf = kernels, torch.zeros(())
    take_steps(adamw, weights, 2)
    weights_before = [weight.clone() for weight in weights]
    state_before = [value.clone() for state in adamw.state.values() for value in state.values()]
    adamw.found_inf.fill_(1)
    for weight in weights:
        weight.grad = torch.full_like(weight, float("nan"))
    adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(weights_before, weights, strict=True))
    state_after = [value for state in adamw.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(state_before, state_after, strict=True))


def test_kernel_check_compares_the_kernel_with_pytorch() -> None:
    fused, reference = AdamW.kernel_check(kernels, torch.device("cpu"))
    torch.testing.assert_close(fused, reference, rtol=1e-4, atol=1e-6)
    assert reference.abs().max() > 0.1


def test_updates_are_sorted_by_size_and_need_state() -> None:
    adamw, weights = make_optimizer()
    assert adamw.updates() == []  # before the first step
    take_steps(adamw, weights, 1)
    assert [update.weight.numel() for update in adamw.updates()] == [2400, 2100, 15, 7, 1, 1]


def test_unsuitable_tensors_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw, weights = make_optimizer()
    take_steps(adamw, weights, 1)
    assert fits_kernels(adamw.updates())
    assert not fits_kernels([])
    changes: list[dict[str, Any]] = [
        {"lr": 0.1}, {"grad": torch.zeros(4, 6).t()}, {"exp_avg": torch.zeros(2).double()},
    ]  # fmt: skip
    for change in changes:
        assert not fits_kernels([adamw.updates()[0]._replace(**change)])
    monkeypatch.setattr(adamw_module, "MAX_KERNEL_ELEMENTS", 100)
    assert not fits_kernels(adamw.updates())
