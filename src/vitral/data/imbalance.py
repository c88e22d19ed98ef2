"""Class imbalance: when it is worth a warning, and what can be done. Used by doctor, training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

IMBALANCE_RATIO = 3.0  # of the largest class to a rare one
REMEDY = "--sampling balanced"  # the recommended option; benchmarks/imbalance.py compares them
OTHER_REMEDIES = "--class-weights balanced or --logit-adjustment 1"


@dataclass(frozen=True, kw_only=True)
class ClassImbalance:
    """The number of images of the rarest and of the most frequent class."""

    smallest: str
    num_smallest: int
    largest: str
    num_largest: int
    num_rare: int  # classes of which the largest is at least IMBALANCE_RATIO times as frequent

    def describe(self, images: str = "training images") -> str:
        """Such as "class imbalance: trash 137 training images, paper 594 (4.3 times as many)"."""
        others = self.num_rare - 1
        more = f" (and {others} more rare class{'es' * (others > 1)})" if others else ""
        ratio = self.num_largest / self.num_smallest
        return (
            f"class imbalance: {self.smallest} {self.num_smallest:,} {images}{more}, "
            f"{self.largest} {self.num_largest:,} ({ratio:.{0 if ratio >= 10 else 1}f} times as many)"
        )


def find_imbalance(counts: Mapping[str, int]) -> ClassImbalance | None:
    """The imbalance of classes with these numbers of images; None if no class is rare. Empty classes do not count."""
    present = {name: count for name, count in counts.items() if count}
    if not present:
        return None
    smallest, largest = min(present, key=present.__getitem__), max(present, key=present.__getitem__)
    num_rare = sum(present[largest] >= IMBALANCE_RATIO * count for count in present.values())
    if not num_rare:
        return None
    return ClassImbalance(
        smallest=smallest,
        num_smallest=present[smallest],
        largest=largest,
        num_largest=present[largest],
        num_rare=num_rare,
    )
