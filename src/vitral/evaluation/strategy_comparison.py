"""Several ways to a model, judged on the same images: which one to take, and how sure that is.

Images and seeds are drawn with replacement, the same images for every way, so that what is hard for all of them does
not blur the difference (the paired bootstrap, Efron 1979).

Shapes:  S seeds   M images   R draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral.evaluation.metrics import wilson

DRAWS = 10_000
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """What one way to a model gave: for each seed, which images it was right about."""

    name: str
    right: Array  # S M, booleans
    seconds: float  # one seed took


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way in figures."""

    name: str
    seeds: int
    accuracy: float  # mean over seeds
    low: float  # 95 % interval, over images and seeds
    high: float
    accuracies: tuple[float, ...]  # seed by seed
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How much better the best is than another, in shares, with its 95 % interval."""

    other: str
    more: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    rows: tuple[Row, ...]
    images: int
    best: str  # the highest accuracy
    gaps: tuple[Gap, ...]  # of the best to each of the others
    take: str  # the quickest of those that are not measurably worse than the best
    sentence: str


def verdict(ways: Sequence[Way], names: dict[str, str] | None = None) -> Verdict:
    """`names`: what the sentence calls them."""
    called = {way.name: (names or {}).get(way.name, way.name) for way in ways}
    drawn = {way.name: draws_R for way, draws_R in zip(ways, resampled(ways), strict=True)}
    rows = tuple(_row(way, drawn[way.name]) for way in ways)
    by_name = {row.name: row for row in rows}
    best = max(rows, key=lambda row: (row.accuracy, -row.seconds))
    gaps = []
    for row in rows:
        if row is not best:
            low, high = np.percentile(drawn[best.name] - drawn[row.name], [2.5, 97.5])
            gaps.append(Gap(other=row.name, more=best.accuracy - row.accuracy, low=float(low), high=float(high)))
    even = [gap for gap in gaps if gap.low <= 0]  # the draws leave it open which is better
    quickest = min([best, *(by_name[gap.other] for gap in even)], key=lambda row: row.seconds)
    return Verdict(
        rows=rows,
        images=ways[0].right.shape[1],
        best=best.name,
        gaps=tuple(gaps),
        take=quickest.name,
        sentence=_sentence(best, quickest, gaps, even, by_name, called),
    )


def resampled(ways: Sequence[Way]) -> list[Array]:
    """R accuracies of each way, every draw with the same images for all."""
    random = np.random.RandomState(0)
    M = ways[0].right.shape[1]
    images_RM = random.multinomial(M, np.full(M, 1 / M), size=DRAWS) / M
    found = []
    for way in ways:
        S = len(way.right)
        seeds_RS = random.multinomial(S, np.full(S, 1 / S), size=DRAWS) / S
        found.append(((images_RM @ way.right.T.astype(float)) * seeds_RS).sum(axis=1))
    return found


def _row(way: Way, drawn_R: Array) -> Row:
    """Where all answers are right the draws all agree: Wilson's interval knows that more images could differ."""
    accuracies = way.right.mean(axis=1)
    accuracy, (low, high) = float(accuracies.mean()), np.percentile(drawn_R, [2.5, 97.5])
    least, most = wilson(accuracy, way.right.shape[1])
    return Row(
        name=way.name,
        seeds=len(way.right),
        accuracy=accuracy,
        low=min(float(low), least),
        high=max(float(high), most),
        accuracies=tuple(accuracies.tolist()),
        seconds=way.seconds,
    )


def _sentence(
    best: Row, take: Row, gaps: Sequence[Gap], even: Sequence[Gap], rows: dict[str, Row], called: dict[str, str]
) -> str:
    if take is not best:
        gap = next(gap for gap in even if gap.other == take.name)
        return (
            f"Take {called[take.name]}: {called[best.name]} is not measurably better ({_points(gap)}), and costs "
            f"{_time(best.seconds)} instead of {_time(take.seconds)}."
        )
    if even:
        others = " and ".join(called[gap.other] for gap in even)
        slower = ", ".join(_time(rows[gap.other].seconds) for gap in even)
        return (
            f"Take {called[best.name]}: {best.accuracy:.1%} in {_time(best.seconds)}; {others} may be as good, "
            f"but took longer ({slower})."
        )
    if not gaps:
        return f"Take {called[best.name]}: {best.accuracy:.1%}."
    nearest = min(gaps, key=lambda gap: gap.more)
    return f"Take {called[best.name]}: {best.accuracy:.1%}, {_points(nearest)} than {called[nearest.other]}."


def _points(gap: Gap) -> str:
    return f"{100 * gap.more:.1f} points more, 95 % interval {100 * gap.low:.1f} to {100 * gap.high:.1f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
