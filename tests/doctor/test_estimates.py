"""Estimates of the time of a training run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vitral.doctor.estimates import OVERHEAD_SECONDS, estimate_seconds
from vitral.recipes.schema import Recipe
from vitral.training.setup import with_placeholder_stats


@pytest.mark.usefixtures("fast_benchmark")
def test_one_of_several_ranks_estimates_alone(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the checkpoint that it chooses."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    estimate = estimate_seconds(with_placeholder_stats(replace(recipe, threads=1)), num_train=40, num_images=48)
    assert estimate.seconds > OVERHEAD_SECONDS
