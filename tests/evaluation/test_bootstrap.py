"""Bootstrap intervals against the normal approximation and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from vitral.evaluation.bootstrap import bootstrap, mean_interval, resamples
from vitral.utils.intervals import Interval


def test_resamples_are_drawn_with_replacement() -> None:
    blocks = list(resamples(7, 3, count=5))
    first, second = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    assert first.shape == (5, 7)
    assert second.shape == (5, 3)
    assert first.sum(dim=1).tolist() == [7] * 5
    assert second.sum(dim=1).tolist() == [3] * 5


def test_the_interval_of_a_mean_agrees_with_the_normal_approximation() -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 3 + 1
    interval = mean_interval(values, count=4000)
    half = 1.96 * values.std().item() / 2000**0.5
    assert interval.value == pytest.approx(values.mean().item(), abs=1e-5)
    expected = (interval.value - half, interval.value + half)
    assert (interval.low, interval.high) == pytest.approx(expected, abs=half * 0.08)


def test_the_interval_of_a_mean_agrees_with_scipy() -> None:
    values = np.random.default_rng(0).exponential(size=300)
    expected = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=1).confidence_interval
    interval = mean_interval(torch.from_numpy(values), count=4000)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=0.015)


def test_a_statistic_is_evaluated_on_every_resample() -> None:
    assert bootstrap(lambda counts: counts[:, :1], 4, count=3).shape == (3, 1)


def test_an_interval_is_printed_with_its_bounds() -> None:
    interval = Interval(value=0.5, low=0.25, high=0.75)
    assert str(interval) == "0.5000 (0.2500-0.7500)"
    assert interval.percent() == "50.00% (95% CI 25.00-75.00%)"
    assert interval.percent_range(1) == "25.0-75.0%"
