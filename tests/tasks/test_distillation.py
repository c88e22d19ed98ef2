"""Losses of learning a teacher's predictions, against closed forms and SciPy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import log_softmax, rel_entr, softmax

from vitral.tasks.distillation import hard_distillation_losses, soft_distillation_losses

STUDENT = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TEACHER = 3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_soft_loss_is_the_divergence_of_scipy_times_the_squared_temperature(temperature: float) -> None:
    losses = soft_distillation_losses(STUDENT, TEACHER, temperature)
    teacher, student = (softmax(logits.numpy() / temperature, axis=1) for logits in (TEACHER, STUDENT))
    expected = temperature**2 * rel_entr(teacher, student).sum(axis=1)
    assert losses.tolist() == pytest.approx(expected.tolist())


def test_soft_loss_of_two_known_distributions() -> None:
    """KL((3/4, 1/4) ‖ (1/2, 1/2)) = 3/4 log 3/2 + 1/4 log 1/2."""
    losses = soft_distillation_losses(torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]]), 1.0)
    assert losses.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_soft_loss_of_equal_logits_is_zero_and_offsets_do_not_matter() -> None:
    assert soft_distillation_losses(TEACHER + 7, TEACHER, 3.0).tolist() == pytest.approx([0] * 5, abs=1e-12)


def test_gradient_hardly_depends_on_a_high_temperature() -> None:
    """Hinton et al. (arXiv 1503.02531, equation 4): with the factor τ², it tends to (z_s - z_t) / K."""
    logits = STUDENT.clone().requires_grad_()
    soft_distillation_losses(logits, TEACHER, 1000.0).sum().backward()
    centred = [values - values.mean(dim=1, keepdim=True) for values in (STUDENT, TEACHER)]
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (centred[0] - centred[1]) / 4, rtol=0.02, atol=0.01)


def test_hard_loss_is_the_cross_entropy_with_the_decision_of_the_teacher() -> None:
    log_probs = log_softmax(STUDENT.numpy(), axis=1)
    expected = [-row[decision] for row, decision in zip(log_probs, TEACHER.argmax(dim=1).tolist(), strict=True)]
    assert hard_distillation_losses(STUDENT, TEACHER).tolist() == pytest.approx(expected)
