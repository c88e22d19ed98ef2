"""Compare training strategies on the same images: which one to use, and how certain that is.

A paired bootstrap (Efron, 1979): images and seeds are drawn with replacement, the same images for every strategy, so
that images that are difficult for all of them do not widen the interval of the difference.

Shapes:  S seeds   M images   R resamples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral.utils.intervals import wilson_interval

NUM_RESAMPLES = 10_000
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategy:
    """Outcome of one training strategy."""

    name: str
    correct: Array  # (S, M) booleans: for each seed, the images that were predicted correctly
    seconds: float  # per seed


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    name: str
    seeds: int
    accuracy: float  # mean over seeds
    low: float  # 95% interval over images and seeds
    high: float
    accuracies: tuple[float, ...]  # per seed
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AccuracyGap:
    """Accuracy of the best strategy minus that of another one, with its 95% interval."""

    other: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which strategy is the best, and which one to use."""

    rows: tuple[StrategyResult, ...]
    images: int
    best: str  # highest accuracy
    gaps: tuple[AccuracyGap, ...]  # of the best to each of the others
    recommended: str  # the fastest strategy that is not significantly worse than the best
    summary: str  # one sentence


def rank_strategies(strategies: Sequence[Strategy], display_names: Mapping[str, str] | None = None) -> Verdict:
    """Compare strategies and recommend one. `display_names` are used in the summary."""
    names = {strategy.name: (display_names or {}).get(strategy.name, strategy.name) for strategy in strategies}
    resampled = {
        strategy.name: accuracies_R
        for strategy, accuracies_R in zip(strategies, bootstrap_accuracies(strategies), strict=True)
    }
    rows = tuple(_strategy_result(strategy, resampled[strategy.name]) for strategy in strategies)
    by_name = {row.name: row for row in rows}
    best = max(rows, key=lambda row: (row.accuracy, -row.seconds))
    gaps = []
    for row in rows:
        if row is not best:
            low, high = np.percentile(resampled[best.name] - resampled[row.name], [2.5, 97.5])
            difference = best.accuracy - row.accuracy
            gaps.append(AccuracyGap(other=row.name, difference=difference, low=float(low), high=float(high)))
    insignificant = [gap for gap in gaps if gap.low <= 0]
    recommended = min([best, *(by_name[gap.other] for gap in insignificant)], key=lambda row: row.seconds)
    return Verdict(
        rows=rows,
        images=strategies[0].correct.shape[1],
        best=best.name,
        gaps=tuple(gaps),
        recommended=recommended.name,
        summary=_summary(best, recommended, gaps, insignificant, by_name, names),
    )


def bootstrap_accuracies(strategies: Sequence[Strategy]) -> list[Array]:
    """Accuracies (R,) of each strategy; every resample has the same images for all strategies."""
    random = np.random.RandomState(0)
    M = strategies[0].correct.shape[1]
    images_RM = random.multinomial(M, np.full(M, 1 / M), size=NUM_RESAMPLES) / M
    accuracies = []
    for strategy in strategies:
        S = len(strategy.correct)
        seeds_RS = random.multinomial(S, np.full(S, 1 / S), size=NUM_RESAMPLES) / S
        accuracies.append(((images_RM @ strategy.correct.T.astype(float)) * seeds_RS).sum(axis=1))
    return accuracies


def _strategy_result(strategy: Strategy, resampled_R: Array) -> StrategyResult:
    """The interval is at least as wide as Wilson's: without errors, all resamples are equal."""
    accuracies = strategy.correct.mean(axis=1)
    accuracy, (low, high) = float(accuracies.mean()), np.percentile(resampled_R, [2.5, 97.5])
    wilson_low, wilson_high = wilson_interval(accuracy, strategy.correct.shape[1])
    return StrategyResult(
        name=strategy.name,
        seeds=len(strategy.correct),
        accuracy=accuracy,
        low=min(float(low), wilson_low),
        high=max(float(high), wilson_high),
        accuracies=tuple(accuracies.tolist()),
        seconds=strategy.seconds,
    )


def _summary(
    best: StrategyResult,
    recommended: StrategyResult,
    gaps: Sequence[AccuracyGap],
    insignificant: Sequence[AccuracyGap],
    rows: Mapping[str, StrategyResult],
    names: Mapping[str, str],
) -> str:
    if recommended is not best:
        gap = next(gap for gap in insignificant if gap.other == recommended.name)
        return (
            f"Use {names[recommended.name]}: {names[best.name]} is not significantly better ({_points(gap)}) and takes "
            f"{_duration(best.seconds)} instead of {_duration(recommended.seconds)}."
        )
    accuracy = f"Use {names[best.name]}: {best.accuracy:.1%}"
    if insignificant:
        others = " and ".join(names[gap.other] for gap in insignificant)
        slower = ", ".join(_duration(rows[gap.other].seconds) for gap in insignificant)
        return f"{accuracy} in {_duration(best.seconds)}; {others} may be as accurate but took longer ({slower})."
    if not gaps:
        return f"{accuracy}."
    nearest = min(gaps, key=lambda gap: gap.difference)
    return f"{accuracy}, {_points(nearest)} compared with {names[nearest.other]}."


def _points(gap: AccuracyGap) -> str:
    return f"+{100 * gap.difference:.1f} points, 95% interval {100 * gap.low:.1f} to {100 * gap.high:.1f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
