"""Ranking of training strategies: paired bootstrap over images and seeds, and the recommendation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vitral.evaluation.strategy_comparison import Strategy, bootstrap_accuracies, rank_strategies
from vitral.utils.intervals import wilson_interval


def strategy(name: str, errors: list[list[int]], seconds: float, images: int = 100) -> Strategy:
    """`errors`: the indices of misclassified images, one list per seed."""
    correct = np.ones((len(errors), images), dtype=bool)
    for seed, indices in enumerate(errors):
        correct[seed, indices] = False
    return Strategy(name=name, correct=correct, seconds=seconds)


def test_the_interval_of_one_seed_is_binomial() -> None:
    (accuracies,) = bootstrap_accuracies([strategy("x", [list(range(30))], 1.0)])
    low, high = np.percentile(accuracies, [2.5, 97.5])
    expected = stats.binom.ppf([0.025, 0.975], 100, 0.7) / 100
    assert (low, high) == pytest.approx(tuple(expected), abs=0.011)


def test_seeds_that_differ_widen_the_interval() -> None:
    equal = rank_strategies([strategy("x", [list(range(20))] * 3, 1.0)]).rows[0]
    different = rank_strategies([strategy("x", [[], list(range(20)), list(range(40))], 1.0)]).rows[0]
    assert equal.accuracy == pytest.approx(different.accuracy) == pytest.approx(0.8)
    assert different.high - different.low > 1.5 * (equal.high - equal.low)


def test_a_perfect_accuracy_has_the_wilson_interval() -> None:
    row = rank_strategies([strategy("x", [[]], 1.0)]).rows[0]
    assert (row.low, row.high) == pytest.approx(wilson_interval(1.0, 100))


def test_a_significantly_better_strategy_is_recommended_whatever_it_costs() -> None:
    verdict = rank_strategies([strategy("slow", [[0, 1]], 100.0), strategy("quick", [list(range(20))], 1.0)])
    assert (verdict.best, verdict.recommended) == ("slow", "slow")
    assert verdict.gaps[0].low > 0


def test_pairing_detects_a_difference_that_separate_intervals_hide() -> None:
    hard = list(range(30))  # misclassified by both
    verdict = rank_strategies([strategy("a", [hard], 10.0), strategy("b", [[*hard, *range(30, 38)]], 1.0)])
    assert verdict.rows[0].low < verdict.rows[1].high, "the intervals overlap"
    assert verdict.recommended == "a"


def test_the_quickest_of_equally_good_strategies_is_recommended() -> None:
    verdict = rank_strategies(
        [
            strategy("slow", [[0, 1, 2]], 600.0),
            strategy("quick", [[3, 4, 5, 6]], 20.0),
            strategy("bad", [list(range(50))], 1.0),
        ],
        {"quick": "the quick one"},
    )
    assert (verdict.best, verdict.recommended) == ("slow", "quick")
    assert "the quick one" in verdict.summary
    assert "20 s" in verdict.summary


def test_the_best_strategy_is_recommended_if_it_is_also_the_quickest() -> None:
    verdict = rank_strategies([strategy("slow", [[0, 1, 2, 3]], 60.0), strategy("quick", [[3, 4, 5]], 20.0)])
    assert (verdict.best, verdict.recommended) == ("quick", "quick")
    assert "slow" in verdict.summary
