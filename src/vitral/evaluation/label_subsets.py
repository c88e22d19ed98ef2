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
    """Indices of a fraction of the images, the same share of every class to within one image and at least one image.

    In ascending order. The subsets of a seed are nested: those of 1% are among those of 10%.
    """
    return label_order(labels_N, seed)[: subset_size(labels_N, fraction)].sort().values


def label_order(labels_N: Tensor, seed: int) -> Tensor:
    """Indices of all images in an order of which every beginning is stratified.

    One image of each class comes first. Then the j-th image of a class of n follows at the position (j - ½) / n, the
    divisor method of Webster: a class never loses an image as the subset grows. Equal positions are in random order.
    """
    random = np.random.RandomState(seed)
    shuffled = random.permutation(len(labels_N))
    labels = labels_N.numpy()[shuffled]
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        positions[members] = (np.arange(len(members)) + 0.5) / len(members)
        positions[members[0]] = 0.0
    return torch.from_numpy(shuffled[np.argsort(positions, kind="stable")])


def subset_size(labels_N: Tensor, fraction: float) -> int:
    """Images in a subset: the fraction, rounded, or one per class if that is more."""
    return max(int(fraction * len(labels_N) + 0.5), len(labels_N.unique()))


def check_fractions(fractions: Sequence[float]) -> None:
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        values = ", ".join(f"{fraction:g}" for fraction in fractions) or "none"
        raise VitralError(
            f"expected fractions of the labels above 0 and at most 1, got {values}",
            "For example: 0.01,0.1,1",
        )


def distinct_fractions(labels_N: Tensor, fractions: Sequence[float]) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The fractions in ascending order without those that select the images of a larger one, and a note on each."""
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
