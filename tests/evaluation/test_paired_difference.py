"""Intervals of paired differences against values computed by hand and against SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from vitral.evaluation.paired_difference import accuracy_interval, paired_difference
from vitral.utils.intervals import wilson_interval

Array = np.ndarray[Any, Any]


def correct(*counts: int, images: int = 100) -> Array:
    """One row per seed, of which the first `count` images are correct."""
    return np.arange(images) < np.array(counts)[:, None]


def test_the_margin_over_seeds_is_student_t_on_the_paired_differences() -> None:
    before, after = correct(40, 42, 44), correct(60, 63, 63)
    difference = paired_difference(before, after)
    assert difference.value == pytest.approx(0.20)  # mean of 0.20, 0.21 and 0.19
    # Standard deviation 0.01, t with 2 degrees of freedom 4.3027: 4.3027 * 0.01 / sqrt(3)
    assert difference.seeds_margin == pytest.approx(0.024841, abs=1e-6)
    interval = stats.ttest_rel(after.mean(axis=1), before.mean(axis=1)).confidence_interval(0.95)
    assert difference.seeds_margin == pytest.approx((interval.high - interval.low) / 2)


def test_what_seeds_have_in_common_cancels() -> None:
    """An easy draw of labels helps both models; the difference is the same for all seeds."""
    difference = paired_difference(correct(10, 50, 70), correct(20, 60, 80))
    assert difference.value == pytest.approx(0.1)
    assert difference.seeds_margin == pytest.approx(0, abs=1e-9)


def test_the_margin_over_images_is_that_of_agresti_and_min() -> None:
    """100 images, of which 30 only after and 10 only before: b = 30.5, c = 10.5, n = 102."""
    before = np.zeros((1, 100), dtype=bool)
    after = before.copy()
    after[0, :30] = True
    before[0, 30:40] = True
    difference = paired_difference(before, after, varies=False)
    b, c, n = 30.5, 10.5, 102
    standard_error = np.sqrt(b + c - (b - c) ** 2 / n) / n
    assert difference.images_margin == pytest.approx(stats.t(100).ppf(0.975) * standard_error)
    assert difference.low == pytest.approx(0.2 - difference.images_margin)
    assert difference.high == pytest.approx(0.2 + difference.images_margin)


def test_the_interval_adds_the_variances_over_seeds_and_images() -> None:
    before, after = correct(40, 42, 44), correct(60, 63, 63)
    difference = paired_difference(before, after)
    seeds = (0.01**2) / 3
    per_image = (after.astype(float) - before).mean(axis=0)
    mean, mean_square = per_image.sum() / 102, (np.square(per_image).sum() + 1) / 102
    images = (mean_square - mean**2) / 102
    freedom = (seeds + images) ** 2 / (seeds**2 / 2 + images**2 / 100)
    half = stats.t(freedom).ppf(0.975) * np.sqrt(seeds + images)
    assert (difference.low, difference.high) == pytest.approx((0.20 - half, 0.20 + half))
    assert difference.seeds_margin is not None
    assert half > max(difference.seeds_margin, difference.images_margin)


def test_models_that_agree_on_a_few_images_are_not_equal_with_certainty() -> None:
    difference = paired_difference(correct(5, images=10), correct(5, images=10), varies=False)
    assert difference.value == 0
    assert difference.low is not None
    assert difference.low < -0.1
    assert not difference.is_positive
    assert not difference.is_negative


def test_one_seed_gives_no_interval_unless_the_result_cannot_vary() -> None:
    before, after = correct(40), correct(80)
    difference = paired_difference(before, after)
    assert (difference.low, difference.high, difference.seeds_margin) == (None, None, None)
    assert not difference.is_positive
    certain = paired_difference(before, after, varies=False)
    assert certain.is_positive
    assert certain.seeds_margin == 0


def test_intervals_of_two_equal_models_contain_zero_as_often_as_they_state() -> None:
    """500 comparisons of models with the same accuracy: about 95% of the intervals contain zero, never many fewer."""
    random = np.random.default_rng(0)
    contained = 0
    for _ in range(500):
        image_difficulty, seed_effect = random.normal(size=200), random.normal(0, 0.5, size=(2, 4, 1))
        before, after = random.normal(size=(2, 4, 200)) + image_difficulty + seed_effect > 0
        difference = paired_difference(before, after)
        contained += not (difference.is_positive or difference.is_negative)
    assert contained / 500 >= 0.93


def test_the_interval_stays_within_what_is_possible() -> None:
    difference = paired_difference(correct(0, 3, images=6), correct(6, 6, images=6))
    assert difference.high == 1.0
    assert difference.low is not None
    assert difference.low >= -1.0


def test_an_accuracy_has_the_wider_of_the_intervals_over_seeds_and_images() -> None:
    interval = accuracy_interval(correct(50, 50))
    assert (interval.value, interval.low, interval.high) == (0.5, *wilson_interval(0.5, 100))
    interval = accuracy_interval(correct(30, 50, 70))
    assert interval.low == pytest.approx(max(0.5 - 4.302653 * 0.2 / np.sqrt(3), 0.0), abs=1e-6)
    assert accuracy_interval(correct(80)).low == wilson_interval(0.8, 100)[0]
