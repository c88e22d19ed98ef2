"""Muon with kernels against Muon without: on a CPU, in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.triton_interpreter import interpreted
from vitral.device.hardware import runs_triton
from vitral.kernels.muon import op as kernels
from vitral.training.optim import muon
from vitral.training.optim.muon import Muon

pytestmark = interpreted

# Tall, wide and square; smaller and larger than a tile, with edges that cut through one; all of a shape and alone.
GROUPS: list[dict[str, Any]] = [
    {"shapes": [(120, 40), (48, 16)], "parts": 3, "lr": 0.02, "weight_decay": 0.1},
    {"shapes": [(40, 40), (100, 40), (40, 100), (33, 65), (1, 5)], "lr": 0.05, "weight_decay": 0.1},
    {"shapes": [(40, 100), (65, 33), (16, 16)], "lr": 0.03, "weight_decay": 0.0, "momentum": 0.4},
]


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where there is a GPU."""
    monkeypatch.setattr(muon, "runs_triton", lambda device: True)
    muon.kernels_agree.cache_clear()
    yield
    muon.kernels_agree.cache_clear()


def made(groups: list[dict[str, Any]] = GROUPS, recorded: bool = True) -> Muon:
    draws = torch.Generator().manual_seed(0)
    own = []
    for group in groups:
        matrices = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in group["shapes"]]
        lr = torch.tensor(group["lr"]) if recorded else group["lr"]
        own.append({key: value for key, value in group.items() if key != "shapes"} | {"params": matrices, "lr": lr})
    optimizer = Muon(own, lr=0.0, weight_decay=0.0)
    optimizer.found_inf = torch.zeros(())
    return optimizer


def matrices_of(optimizer: Muon) -> list[Tensor]:
    return [matrix for group in optimizer.param_groups for matrix in group["params"]]


def averages_of(optimizer: Muon) -> list[Tensor]:
    return [optimizer.state[matrix]["momentum"] for matrix in matrices_of(optimizer)]


def with_gradients(optimizer: Muon, step: int) -> Any:
    """And its groups, as both ways of a step take them."""
    draws = torch.Generator().manual_seed(1000 + step)
    for matrix in matrices_of(optimizer):
        matrix.grad = torch.randn(matrix.shape, generator=draws, dtype=matrix.dtype) * 10.0 ** (step % 3 - 1)
    return [(group, group["params"]) for group in optimizer.param_groups]


def plainly(optimizer: Muon, steps: range) -> None:
    for step in steps:
        with torch.no_grad():
            optimizer.step_plainly(with_gradients(optimizer, step))


def with_kernels(optimizer: Muon, steps: range) -> None:
    for step in steps:
        with torch.no_grad():
            optimizer.step_with_kernels(with_gradients(optimizer, step))


def assert_alike(ours: Muon, plain: Muon, off: float) -> None:
    for mine, other, start in zip(matrices_of(ours), matrices_of(plain), matrices_of(made()), strict=True):
        assert (mine - other).norm() < off * (other - start).norm()
    for mine, other in zip(averages_of(ours), averages_of(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bf16", "off", "recorded"), [(False, 1e-4, False), (False, 1e-4, True), (True, 0.03, True)])
def test_the_kernels_step_as_the_plain_way_does(
    bf16: bool, off: float, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "bf16_is_faster", lambda *_: bf16)
    ours, plain = made(recorded=recorded), made(recorded=recorded)
    with_kernels(ours, range(3))
    plainly(plain, range(3))
    assert_alike(ours, plain, off)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    count=st.integers(1, 4),
    memory=st.floats(0, 1),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)
def test_what_lies_ahead_is_stacked_whatever_the_shape(
    rows: int, columns: int, count: int, memory: float, size: float
) -> None:
    """Alternately wide and tall: the averages to the bit but for one fused rounding, the stack normed."""
    draws = torch.Generator().manual_seed(rows * 71 + columns)
    shapes = sorted([(rows, columns), (columns, rows)][index % 2] for index in range(count))
    lr = torch.ones(())
    pieces = [kernels.Piece(*(torch.randn(3, *shape, generator=draws) * size), lr) for shape in shapes]
    pieces.sort(key=lambda piece: piece.tall)
    averages = [piece.average.lerp(piece.gradient, 1 - memory) for piece in pieces]
    ahead = [piece.gradient.lerp(average, memory) for piece, average in zip(pieces, averages, strict=True)]
    stack = kernels.stacked_ahead(pieces, memory, torch.float32)
    for piece, average, matrix, normed in zip(pieces, averages, ahead, stack, strict=True):
        torch.testing.assert_close(piece.average, average, rtol=1e-6, atol=1e-6 * size)
        wanted = (matrix.mT if piece.tall else matrix) / (matrix.norm() + 1e-7)
        torch.testing.assert_close(normed, wanted, rtol=1e-5, atol=1e-5)


def test_matrices_that_do_not_fit_one_launch_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MANY", 2)
    ours, plain = made(), made()
    with_kernels(ours, range(2))
    plainly(plain, range(2))
    assert_alike(ours, plain, 1e-4)
    pieces = [kernels.Piece(torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1))] * 48
    monkeypatch.setattr(kernels, "MANY", 32)
    assert [(first, len(some)) for first, some in kernels.batches(pieces)] == [(0, 24), (24, 24)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_where_training_has_halted_no_weight_moves(bad: float) -> None:
    """And the averages take what comes, as they do without kernels."""
    ours, plain = made(), made()
    with_kernels(ours, range(1))
    plainly(plain, range(1))
    before = [matrix.detach().clone() for matrix in matrices_of(ours)]
    for optimizer in (ours, plain):
        assert optimizer.found_inf is not None
        optimizer.found_inf.fill_(1)
        groups = with_gradients(optimizer, 1)
        for matrix in matrices_of(optimizer):
            assert matrix.grad is not None
            matrix.grad[0, -1] = bad
        with torch.no_grad(), np.errstate(invalid="ignore"):
            optimizer.step_with_kernels(groups) if optimizer is ours else optimizer.step_plainly(groups)
    assert all(torch.equal(matrix, start) for matrix, start in zip(matrices_of(ours), before, strict=True))
    for mine, other in zip(averages_of(ours), averages_of(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_learning_rate_is_read_when_the_step_is_made() -> None:
    """By address: a recorded step sees what was written there since."""
    ours = made()
    with_kernels(ours, range(1))
    before = [matrix.detach().clone() for matrix in matrices_of(ours)]
    for group in ours.param_groups[1:]:
        group["lr"].zero_()
    with_kernels(ours, range(1, 2))
    moved = [not torch.equal(a, b) for a, b in zip(matrices_of(ours), before, strict=True)]
    assert moved == [True, True] + 8 * [False]


def test_a_step_is_made_with_kernels_where_they_work(on_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = kernels.stacked_ahead
    monkeypatch.setattr(kernels, "stacked_ahead", lambda *given: asked.append(given) or real(*given))
    ours, plain = made(), made()
    with_gradients(ours, 0)
    version = matrices_of(ours)[0]._version
    state = torch.get_rng_state()
    ours.step()
    assert len(asked) == 2 * (1 + 8)  # tried before, and all rehearsed
    assert torch.equal(torch.get_rng_state(), state)
    assert matrices_of(ours)[0]._version > version
    plainly(plain, range(1))
    assert_alike(ours, plain, 1e-4)
    with_gradients(ours, 1)
    ours.step()
    assert len(asked) == 2 * (1 + 8) + 8


@pytest.mark.parametrize("fault", ["fails", "lies"])
def test_kernels_that_fail_or_lie_are_not_used(fault: str, on_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.stacked_ahead

    def broken(*given: Any) -> Tensor:
        if fault == "fails":
            raise RuntimeError("no C compiler")
        return real(*given).flip(0, 1)

    monkeypatch.setattr(kernels, "stacked_ahead", broken)
    ours, plain = made(), made()
    with_gradients(ours, 0)
    ours.step()
    plainly(plain, range(1))
    assert all(torch.equal(a, b) for a, b in zip(matrices_of(ours), matrices_of(plain), strict=True))


def test_what_the_kernels_do_not_know_goes_the_plain_way(on_kernels: None) -> None:
    def suits(optimizer: Muon) -> bool:
        return muon.suit_kernels(with_gradients(optimizer, 0), optimizer.found_inf)

    assert suits(made())
    assert suits(made(recorded=False))
    assert not muon.suit_kernels([], None)
    lying = nn.Parameter(torch.randn(6, 4).t())
    assert not suits(Muon([lying], lr=0.1, weight_decay=0.0))
    assert not suits(Muon([nn.Parameter(torch.randn(6, 4).double())], lr=0.1, weight_decay=0.0))
    assert not suits(Muon([nn.Parameter(torch.randn(6, 4))], lr=torch.tensor(0.1).double(), weight_decay=0.0))
    assert not runs_triton(torch.device("cpu"))


def test_gradients_that_lie_otherwise_and_those_that_are_missing() -> None:
    ours, plain = made(), made()
    for optimizer in (ours, plain):
        groups = [(group, group["params"][:-1]) for group, _ in with_gradients(optimizer, 0)]
        for matrix in matrices_of(optimizer):
            assert matrix.grad is not None
            matrix.grad = matrix.grad.t().contiguous().t()
        with torch.no_grad():
            optimizer.step_with_kernels(groups) if optimizer is ours else optimizer.step_plainly(groups)
    for mine, other in zip(matrices_of(ours), matrices_of(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert len(ours.state) == len(plain.state) == 7


def test_a_state_saved_one_way_goes_on_the_other() -> None:
    ours, plain = made(), made()
    with_kernels(ours, range(2))
    saved = copy.deepcopy(ours.state_dict())
    plainly(plain, range(2))
    assert [{key: value.shape for key, value in own.items()} for own in saved["state"].values()] == [
        {key: value.shape for key, value in own.items()} for own in plain.state_dict()["state"].values()
    ]
    resumed = made()
    with torch.no_grad():
        for mine, other in zip(matrices_of(resumed), matrices_of(ours), strict=True):
            mine.copy_(other)
    resumed.load_state_dict(saved)
    plainly(resumed, range(2, 4))
    plainly(plain, range(2, 4))
    assert_alike(resumed, plain, 1e-4)
