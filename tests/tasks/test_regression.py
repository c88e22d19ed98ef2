"""Losses and scaling of a regression: values computed by hand."""

from __future__ import annotations

import pytest
import torch

from vitral.errors import VitralError
from vitral.tasks import TASKS
from vitral.tasks.losses import per_image_losses


def test_huber_is_quadratic_up_to_one_and_linear_beyond() -> None:
    outputs = torch.tensor([[0.5, 0.0], [3.0, 0.0], [-2.0, 1.0]])
    losses = per_image_losses(outputs, torch.zeros(3, 2), "huber")
    # 0.5²/2 = 0.125;  3 - 1/2 = 2.5;  2 - 1/2 = 1.5 and 1²/2 = 0.5; means over two targets
    assert losses.tolist() == pytest.approx([0.0625, 1.25, 1.0])


def test_mse_is_the_mean_over_the_targets() -> None:
    losses = per_image_losses(torch.tensor([[1.0, -3.0]]), torch.tensor([[0.0, 1.0]]), "mse")
    assert losses.tolist() == pytest.approx([(1 + 16) / 2])


def test_targets_are_standardised_and_restored() -> None:
    labels = torch.tensor([[10.0, 1e6], [20.0, 1e6 + 2], [60.0, 1e6 + 4]])
    scaling = TASKS["regression"].scaling(labels, ("a", "b"))
    assert scaling is not None
    standardised = scaling.standardise(labels)
    assert standardised.mean(dim=0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert standardised.std(dim=0, correction=0).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert scaling.to_units(standardised).flatten().tolist() == pytest.approx(labels.flatten().tolist())


def test_a_constant_target_is_refused() -> None:
    with pytest.raises(VitralError, match="'b' has the same value for all 3 training images"):
        TASKS["regression"].scaling(torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]]), ("a", "b"))
