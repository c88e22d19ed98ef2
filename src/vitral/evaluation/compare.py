"""Is one model better than another, or was it luck? The same images, asked of both.

Shapes:  N images
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.bootstrap import Interval, mean_intervals
from vitral.evaluation.selective_prediction import share


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A class on which the two differ."""

    name: str
    images: int
    only_first: int  # images that only the first got right
    only_second: int


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    images: int
    first: Interval  # accuracy
    second: Interval
    difference: Interval  # second minus first, of the same resamples (paired bootstrap)
    both_right: int
    only_first: int
    only_second: int
    both_wrong: int
    same_mistake: int  # of both_wrong
    p: float  # McNemar's exact test, two-sided
    classes: tuple[Disagreement, ...]  # the most differing first

    def as_dict(self) -> dict[str, Any]:
        from vitral.utils.serialization import to_plain

        plain: dict[str, Any] = to_plain(self)
        return plain

    def verdict(self, first: str = "the first", second: str = "the second") -> str:
        """One sentence."""
        points = f"{100 * abs(self.difference.value):.2f} points"
        better, worse = (second, first) if self.difference.value > 0 else (first, second)
        if self.only_first == self.only_second == 0:
            return f"{first} and {second} are right about exactly the same {self.both_right:,} images."
        if self.p < 0.05:
            chance = "less than 1 in 10,000" if self.p < 1e-4 else f"{self.p:.2g}"
            return (
                f"{better} is better than {worse} by {points}: were they equally good, images that tell them "
                f"this far apart would be drawn with probability {chance}."
            )
        lead = f"{better} leads by {points}, which" if self.difference.value else "They are level, which"
        return (
            f"These {self.images:,} images cannot tell which is better: {lead} equally good models would "
            f"reach or exceed with probability {self.p:.2g}."
        )


def compare(
    said_first_N: Tensor, said_second_N: Tensor, labels_N: Tensor, classes: tuple[str, ...]
) -> PairedComparison:
    if not len(labels_N):
        raise VitralError("there are no images to compare on", "choose a set or folder with --data")
    first, second = said_first_N == labels_N, said_second_N == labels_N
    only_first, only_second = first & ~second, second & ~first
    (difference,) = mean_intervals(second[:, None].float() - first[:, None].float())
    rows = [
        Disagreement(name=name, images=images, only_first=one, only_second=other)
        for name, images, one, other in zip(
            classes,
            labels_N.bincount(minlength=len(classes)).tolist(),
            labels_N[only_first].bincount(minlength=len(classes)).tolist(),
            labels_N[only_second].bincount(minlength=len(classes)).tolist(),
            strict=True,
        )
        if one or other
    ]
    return PairedComparison(
        images=len(labels_N),
        first=share(int(first.sum()), len(first)),
        second=share(int(second.sum()), len(second)),
        difference=difference,
        both_right=int((first & second).sum()),
        only_first=int(only_first.sum()),
        only_second=int(only_second.sum()),
        both_wrong=int((~first & ~second).sum()),
        same_mistake=int((~first & (said_first_N == said_second_N)).sum()),
        p=mcnemar(int(only_first.sum()), int(only_second.sum())),
        classes=tuple(sorted(rows, key=lambda row: (-abs(row.only_second - row.only_first), -row.only_first))),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact test (McNemar, 1947): of images that one alone got right, each is a fair coin if both are equally good.

    Two-sided: twice the chance of a split at least so uneven, in whole numbers up to the last division.
    """
    n, few = only_first + only_second, min(only_first, only_second)
    if 2 * few == n:
        return 1.0
    ways, sum_of_ways = 1, 0
    for k in range(few + 1):
        sum_of_ways += ways
        ways = ways * (n - k) // (k + 1)
    shift = max(sum_of_ways.bit_length() - 64, 0)  # the quotient of such numbers is beyond floats, its logarithm is not
    return min(math.ldexp(sum_of_ways >> shift, shift + 1 - n), 1.0)
