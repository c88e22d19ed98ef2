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


def test_the_variances_over_seeds_and_images_contain_their_interaction_once() -> None:
    before, after = correct(30, 45, 57), correct(60, 63, 63)  # differences 0.30, 0.18 and 0.06
    difference = paired_difference(before, after)
    differences = after.astype(float) - before
    per_image = differences.mean(axis=0)
    mean, mean_square = per_image.sum() / 102, (np.square(per_image).sum() + 1) / 102
    seeds, images = 0.12**2 / 3, (mean_square - mean**2) / 102
    # Sums of squares of a two-way analysis of variance: residual = total - seeds - images
    residual = np.square(differences - 0.18).sum() - 100 * 2 * 0.12**2 - 3 * np.square(per_image - 0.18).sum()
    interaction = residual / (2 * 99) / 300
    variance = seeds + images - interaction
    freedom = variance**2 / (seeds**2 / 2 + images**2 / 100 + interaction**2 / 198)
    half = stats.t(freedom).ppf(0.975) * np.sqrt(variance)
    assert (difference.low, difference.high) == pytest.approx((0.18 - half, 0.18 + half))


def test_equal_seeds_leave_at_least_the_uncertainty_of_the_images() -> None:
    difference = paired_difference(correct(40, 42, 44), correct(60, 62, 64))
    assert difference.low is not None
    assert difference.value - difference.low >= difference.images_margin


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


@pytest.mark.parametrize(
    ("seeds", "seed_effect", "image_effect"),
    [(3, 0.0, 0.0), (3, 0.2, 0.0), (10, 0.0, 0.0), (10, 0.2, 0.0), (10, 0.0, 1.0), (10, 0.2, 1.0)],
)
def test_intervals_contain_the_true_difference_as_often_as_they_state(
    seeds: int, seed_effect: float, image_effect: float
) -> None:
    """600 comparisons of models with the same expected accuracy, which differ by seeds, by images and by chance."""
    random = np.random.default_rng(0)
    values, margins = np.empty(600), np.empty(600)
    for i in range(len(values)):
        difficulty = random.normal(size=200)
        of_seeds = random.normal(0, seed_effect, size=(2, seeds, 1))
        of_images = random.normal(0, image_effect, size=(2, 1, 200))
        before, after = random.normal(size=(2, seeds, 200)) + difficulty + of_seeds + of_images > 0
        difference = paired_difference(before, after)
        assert difference.high is not None
        values[i], margins[i] = difference.value, difference.high - difference.value
    assert (abs(values) <= margins).mean() >= 0.93
    if seeds == 10:  # with few, Student's t needs wider ones
        assert 1.9 < margins.mean() / values.std() < 2.5


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
