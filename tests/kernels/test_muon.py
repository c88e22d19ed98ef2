"""Muon with fused kernels against Muon without them, in Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.triton_interpreter import requires_interpreter
from vitral.kernels.muon import op as kernels
from vitral.training.optim import muon
from vitral.training.optim.muon import Muon, fits_kernels

pytestmark = [requires_interpreter, pytest.mark.slow]

# Tall, wide and square; smaller and larger than a tile, also not multiples of it; several of one size and single ones.
GROUPS: list[dict[str, Any]] = [
    {"shapes": [(120, 40), (48, 16)], "num_matrices": 3, "lr": 0.02, "weight_decay": 0.1},
    {"shapes": [(40, 40), (100, 40), (40, 100), (33, 65), (1, 5)], "lr": 0.05, "weight_decay": 0.1},
    {"shapes": [(40, 100), (65, 33), (16, 16)], "lr": 0.03, "weight_decay": 0.0, "momentum": 0.4},
]


def make_optimizer(fused: bool = False, tensor_lr: bool = True) -> Muon:
    rng = torch.Generator().manual_seed(0)
    groups = []
    for group in GROUPS:
        matrices = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in group["shapes"]]
        lr = torch.tensor(group["lr"]) if tensor_lr else group["lr"]
        groups.append({key: value for key, value in group.items() if key != "shapes"} | {"params": matrices, "lr": lr})
    optimizer = Muon(groups, lr=0.0, weight_decay=0.0)
    optimizer.found_inf = torch.zeros(())
    optimizer.kernels = kernels if fused else None
    return optimizer


def matrices_of(optimizer: Muon) -> list[Tensor]:
    return [matrix for group in optimizer.param_groups for matrix in group["params"]]


def momentum_buffers_of(optimizer: Muon) -> list[Tensor]:
    return [optimizer.state[matrix]["momentum"] for matrix in matrices_of(optimizer)]


def set_gradients(optimizer: Muon, step: int) -> None:
    rng = torch.Generator().manual_seed(1000 + step)
    for matrix in matrices_of(optimizer):
        matrix.grad = torch.randn(matrix.shape, generator=rng, dtype=matrix.dtype) * 10.0 ** (step % 3 - 1)


def take_steps(optimizer: Muon, steps: range) -> None:
    for step in steps:
        set_gradients(optimizer, step)
        optimizer.step()


def assert_equivalent(fused: Muon, reference: Muon, tolerance: float) -> None:
    initial = matrices_of(make_optimizer())
    for a, b, start in zip(matrices_of(fused), matrices_of(reference), initial, strict=True):
        assert (a - b).norm() < tolerance * (b - start).norm()
    for a, b in zip(momentum_buffers_of(fused), momentum_buffers_of(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("bf16", "tolerance", "tensor_lr"),
    [
        (False, 1e-4, True),
        (False, 1e-4, False),
        (True, 0.03, True),
    ],
)
def test_fused_step_matches_the_reference(
    bf16: bool, tolerance: float, tensor_lr: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "bf16_is_faster", lambda *_: bf16)
    fused, reference = make_optimizer(fused=True, tensor_lr=tensor_lr), make_optimizer(tensor_lr=tensor_lr)
    take_steps(fused, range(3))
    take_steps(reference, range(3))
    assert_equivalent(fused, reference, tolerance)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    count=st.integers(1, 4),
    momentum=st.floats(0, 1),
    magnitude=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)
def test_momentum_stack_is_normalised_nesterov_momentum(
    rows: int, columns: int, count: int, momentum: float, magnitude: float
) -> None:
    rng = torch.Generator().manual_seed(rows * 71 + columns)
    shapes = sorted(
        ([(rows, columns), (columns, rows)][index % 2] for index in range(count)),
        key=lambda shape: shape[0] > shape[1],  # wide before tall
    )
    grads, buffers = ([torch.randn(shape, generator=rng) * magnitude for shape in shapes] for _ in range(2))
    expected_buffers = [buffer.lerp(grad, 1 - momentum) for grad, buffer in zip(grads, buffers, strict=True)]
    look_aheads = [grad.lerp(buffer, momentum) for grad, buffer in zip(grads, expected_buffers, strict=True)]
    stack = kernels.momentum_stack(grads, buffers, momentum, torch.float32)
    for buffer, expected_buffer in zip(buffers, expected_buffers, strict=True):
        torch.testing.assert_close(buffer, expected_buffer, rtol=1e-6, atol=1e-6 * magnitude)
    for normalised, matrix in zip(stack, look_aheads, strict=True):
        expected = (matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix) / (matrix.norm() + 1e-7)
        torch.testing.assert_close(normalised, expected, rtol=1e-5, atol=1e-5)


def test_many_matrices_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_TENSORS_PER_LAUNCH", 2)
    fused, reference = make_optimizer(fused=True), make_optimizer()
    take_steps(fused, range(2))
    take_steps(reference, range(2))
    assert_equivalent(fused, reference, 1e-4)


def test_launches_have_equal_lengths() -> None:
    batches = list(kernels.launch_batches(range(48)))
    assert [(first, len(batch)) for first, batch in batches] == [(0, 24), (24, 24)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_stay_unchanged_after_a_non_finite_gradient(bad: float) -> None:
    fused, reference = make_optimizer(fused=True), make_optimizer()
    take_steps(fused, range(1))
    take_steps(reference, range(1))
    before = [matrix.detach().clone() for matrix in matrices_of(fused)]
    for optimizer in (fused, reference):
        assert optimizer.found_inf is not None
        optimizer.found_inf.fill_(1)
        set_gradients(optimizer, 1)
        for matrix in matrices_of(optimizer):
            assert matrix.grad is not None
            matrix.grad[0, -1] = bad
        with np.errstate(invalid="ignore"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(matrices_of(fused), before, strict=True))
    for a, b in zip(momentum_buffers_of(fused), momentum_buffers_of(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)  # as without kernels


def test_learning_rate_tensors_are_read_at_every_step() -> None:
    """A captured CUDA graph knows them by address only."""
    fused = make_optimizer(fused=True)
    take_steps(fused, range(1))
    before = [matrix.detach().clone() for matrix in matrices_of(fused)]
    for group in fused.param_groups[1:]:
        group["lr"].zero_()
    take_steps(fused, range(1, 2))
    changed = [not torch.equal(a, b) for a, b in zip(matrices_of(fused), before, strict=True)]
    assert changed == [True, True] + 8 * [False]


def test_a_fused_step_increments_the_version_of_the_weights() -> None:
    fused = make_optimizer(fused=True)
    version = matrices_of(fused)[0]._version
    take_steps(fused, range(1))
    assert matrices_of(fused)[0]._version > version


def test_kernel_check_compares_the_kernels_with_the_reference() -> None:
    rng_state = torch.get_rng_state()
    fused, reference = Muon.kernel_check(kernels, torch.device("cpu"))
    torch.testing.assert_close(fused, reference, rtol=1e-3, atol=1e-4)
    assert reference.abs().max() > 0.01
    assert torch.equal(torch.get_rng_state(), rng_state)


def test_unsuitable_tensors_are_left_to_the_reference() -> None:
    def fits(optimizer: Muon) -> bool:
        set_gradients(optimizer, 0)
        return fits_kernels(optimizer.active_groups(), optimizer.found_inf)

    assert fits(make_optimizer())
    assert fits(make_optimizer(tensor_lr=False))
    assert not fits_kernels([], None)
    transposed = nn.Parameter(torch.randn(6, 4).t())
    assert not fits(Muon([transposed], lr=0.1, weight_decay=0.0))
    assert not fits(Muon([nn.Parameter(torch.randn(6, 4).double())], lr=0.1, weight_decay=0.0))
    assert not fits(Muon([nn.Parameter(torch.randn(6, 4))], lr=torch.tensor(0.1).double(), weight_decay=0.0))


def test_gradients_may_be_transposed_or_missing() -> None:
    fused, reference = make_optimizer(fused=True), make_optimizer()
    for optimizer in (fused, reference):
        set_gradients(optimizer, 0)
        for matrix in matrices_of(optimizer):
            assert matrix.grad is not None
            matrix.grad = matrix.grad.t().contiguous().t()
        for group in optimizer.param_groups:
            group["params"][-1].grad = None
        optimizer.step()
    for a, b in zip(matrices_of(fused), matrices_of(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(fused.state) == len(reference.state) == 7


def test_state_saved_with_kernels_continues_without_them() -> None:
    fused, reference = make_optimizer(fused=True), make_optimizer()
    take_steps(fused, range(2))
    saved = copy.deepcopy(fused.state_dict())
    take_steps(reference, range(2))
    assert [{key: value.shape for key, value in state.items()} for state in saved["state"].values()] == [
        {key: value.shape for key, value in state.items()} for state in reference.state_dict()["state"].values()
    ]
    resumed = make_optimizer()
    with torch.no_grad():
        for a, b in zip(matrices_of(resumed), matrices_of(fused), strict=True):
            a.copy_(b)
    resumed.load_state_dict(saved)
    take_steps(resumed, range(2, 4))
    take_steps(reference, range(2, 4))
    assert_equivalent(resumed, reference, 1e-4)
