"""Muon in plain PyTorch. Its kernels are tested in tests/kernels/test_muon.py."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitral.training.optim import muon
from vitral.training.optim.muon import Muon, orthogonalise

SHAPES = [(16, 16), (16, 64), (64, 16), (16, 64), (48, 16), (16, 16)]


def make_parameters() -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]


def make_gradients(step: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=rng) * 10.0 ** (step % 3 - 1) for shape in SHAPES]


def run_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, make_gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("bf16", [False, True])
def test_updates_equal_those_of_torch_muon(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "bf16_is_faster", lambda *_: bf16)
    initial, ours, theirs = make_parameters(), make_parameters(), make_parameters()
    run_steps(Muon(ours, lr=0.02, weight_decay=0.1), ours, range(6))
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    run_steps(reference, theirs, range(6))
    for actual, expected, start in zip(ours, theirs, initial, strict=True):
        distance = (expected - start).norm()
        assert (actual - expected).norm() < 0.02 * distance  # bf16 has about three decimal digits
        assert distance > 0.1


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24), (1, 40), (40, 1)])
def test_singular_values_of_an_orthogonalised_matrix_are_near_one(shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(3)
    left = torch.linalg.qr(torch.randn(shape[0], shape[0], generator=rng)).Q[:, : min(shape)]
    right = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=rng)).Q[:, : min(shape)]
    values = torch.logspace(0, -1.5, min(shape))
    for scale in (1e-3, 1.0, 1e4):
        result = orthogonalise((left @ (scale * values).diag() @ right.T)[None])[0].float()
        assert result.shape == shape
        singular_values = torch.linalg.svdvals(result)
        assert singular_values.min() > 0.6
        assert singular_values.max() < 1.3
        assert (left.T @ result @ right).diag().min() > 0.6, "the singular vectors are kept"


def test_batched_orthogonalisation_equals_one_matrix_at_a_time() -> None:
    for shape in ((5, 16, 48), (5, 48, 16), (5, 16, 16)):
        stack = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        one_by_one = torch.stack([orthogonalise(matrix[None])[0] for matrix in stack])
        torch.testing.assert_close(orthogonalise(stack), one_by_one, rtol=1e-4, atol=1e-4)


def test_a_zero_gradient_only_decays_the_weights() -> None:
    parameter = nn.Parameter(torch.ones(4, 8))
    parameter.grad = torch.zeros(4, 8)
    Muon([parameter], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(parameter.detach(), torch.full((4, 8), 0.95))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()])
def test_parameters_that_are_not_matrices_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Muon needs 2-D parameters"):
        Muon([nn.Parameter(torch.zeros(shape))], lr=0.1, weight_decay=0.0)


def test_parameters_without_a_gradient_are_skipped() -> None:
    updated, skipped = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    updated.grad = torch.eye(4)
    Muon([updated, skipped], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(skipped, torch.ones(4, 4))
    assert not torch.equal(updated, torch.ones(4, 4))


def test_a_restored_optimizer_continues_bit_for_bit() -> None:
    uninterrupted = make_parameters()
    run_steps(Muon(uninterrupted, lr=0.02, weight_decay=0.1), uninterrupted, range(6))
    first = make_parameters()
    optimizer = Muon(first, lr=0.02, weight_decay=0.1)
    run_steps(optimizer, first, range(3))
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    restored = Muon(second, lr=99.0, weight_decay=0.0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run_steps(restored, second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, second, strict=True))


def test_stacked_matrices_are_orthogonalised_separately() -> None:
    rng = torch.Generator().manual_seed(11)
    weights, gradient = (torch.randn(24, 8, generator=rng) for _ in range(2))
    stacked = nn.Parameter(weights.clone())
    stacked.grad = gradient.clone()
    Muon([{"params": [stacked], "num_matrices": 3}], lr=0.1, weight_decay=0.1).step()
    separate = [nn.Parameter(part.clone()) for part in weights.chunk(3)]
    for parameter, part_gradient in zip(separate, gradient.chunk(3), strict=True):
        parameter.grad = part_gradient.clone()
    Muon(separate, lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(stacked.detach(), torch.cat([parameter.detach() for parameter in separate]))


def test_gradient_hooks_do_not_keep_the_optimizer_alive() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.0)
    optimizer.overlap_with_backward()
    references: list[weakref.ref[Any]] = [weakref.ref(optimizer), weakref.ref(parameter)]
    del optimizer, parameter
    gc.collect()
    assert [reference() for reference in references] == [None, None]
