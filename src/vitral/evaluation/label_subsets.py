"""Parts of the labels of a dataset: 1%, 10% and all of them, the same share of every class.

Shapes:  N images   K classes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitral.errors import VitralError

DEFAULT_FRACTIONS = (0.01, 0.1, 1.0)


def draw_label_subset(labels_N: Tensor, fraction: float, seed: int) -> Tensor:
    """Indices of a fraction of each class, at least one image, in ascending order.

    The subsets of a seed are nested: those of 1% are among those of 10%.
    """
    random = np.random.RandomState(seed)
    chosen = []
    for label, count in class_shares(labels_N, fraction).items():
        members = np.flatnonzero(labels_N.numpy() == label)
        chosen.append(random.permutation(members)[:count])
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def class_shares(labels_N: Tensor, fraction: float) -> dict[int, int]:
    """Images per class in a subset. Rounded class by class, because only then no class shrinks as the fraction grows"""
    classes, counts = labels_N.unique(return_counts=True)
    return {
        label: max(int(fraction * count + 0.5), 1)
        for label, count in zip(classes.tolist(), counts.tolist(), strict=True)
    }


def subset_size(labels_N: Tensor, fraction: float) -> int:
    return sum(class_shares(labels_N, fraction).values())


def check_fractions(fractions: Sequence[float]) -> None:
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        values = ", ".join(f"{fraction:g}" for fraction in fractions) or "none"
        raise VitralError(
            f"expected fractions of the labels above 0 and at most 1, got {values}",
            "For example: --fractions 0.01,0.1,1",
        )


def distinct_fractions(labels_N: Tensor, fractions: Sequence[float]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The fractions in ascending order without those that select the same images as a larger one, and a note on each"""
    check_fractions(fractions)
    by_size = {subset_size(labels_N, fraction): fraction for fraction in sorted(set(fractions))}
    kept = tuple(by_size.values())
    notes = []
    for fraction in sorted(set(fractions)):
        size = subset_size(labels_N, fraction)
        if by_size[size] != fraction:
            same_as = fraction_text(by_size[size])
            notes.append(f"{fraction_text(fraction)} of the labels: left out, the same {size:,} images as {same_as}")
    return kept, tuple(notes)


def fraction_text(fraction: float) -> str:
    """1%, 0.5%, 100%"""
    return f"{100 * fraction:.3g}%"
