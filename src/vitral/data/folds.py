"""Folds for cross-validation: every image is in exactly one of them, and each has its share of every class.

A run with `data.fold = "2/5"` trains without the images of the second of five folds and is tested on them. One with
`data.fold = "all"` trains on all folds.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from vitral.data.targets import is_multi_hot, label_strata
from vitral.errors import VitralError

FOLD_SEED = 1974  # fixed, like VALIDATION_SEED: all runs on the same images have the same folds

Array = np.ndarray[Any, Any]


class Fold(NamedTuple):
    """One of several folds."""

    number: int  # from 1
    total: int

    def __str__(self) -> str:
        return "all" if self == ALL_FOLDS else f"{self.number}/{self.total}"


ALL_FOLDS = Fold(0, 0)  # training on the images of all folds, without a validation split


def parse_fold(text: str) -> Fold | None:
    """The fold of a recipe, such as "2/5" or "all"; None for an empty string. Raises ValueError."""
    if not text:
        return None
    if text == "all":
        return ALL_FOLDS
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    fold = Fold(int(match[1]), int(match[2])) if match else None
    if fold is None or fold.total < 2 or not 1 <= fold.number <= fold.total:
        raise ValueError(f"data.fold must be a fold and the number of folds, such as 2/5, or all, got {text!r}")
    return fold


def assign_folds(labels: Array, count: int, *, groups: Array | None = None, seed: int = FOLD_SEED) -> Array:
    """The fold (N,), from 0, of each image.

    Iterative stratification (Sechidis et al., 2011): images are assigned in the order of their rarest label, each to
    the fold that lacks most of this label. Without groups, folds differ by at most one image per class.

    Args:
        labels: Those of any task: class indices (N,), multi-hot labels (N, K) or real values (N, R).
        groups: (N,) numbers; images with equal numbers are copies of one image and stay in one fold.
    """
    random = np.random.RandomState(seed)
    members = [np.array([row]) for row in range(len(labels))] if groups is None else group_members(groups)
    if len(members) < count:
        raise VitralError(
            f"{len(members)} different images cannot be divided into {count} folds", "Use fewer --folds, or add images"
        )
    strata = _strata(labels)
    counts_GK = np.stack([strata[rows].sum(axis=0) for rows in members]).astype(float)
    missing_FK = np.repeat(counts_GK.sum(axis=0, keepdims=True) / count, count, axis=0)
    missing_F = np.full(count, len(labels) / count)
    frequency_K = counts_GK.sum(axis=0)
    rarest_G = np.where(counts_GK > 0, frequency_K, np.inf).argmin(axis=1)
    sizes_G = np.array([len(rows) for rows in members])
    # Large groups first, because small ones can still even out the folds; then the rarest labels; ties at random.
    order = np.lexsort((random.permutation(len(members)), frequency_K[rarest_G], -sizes_G))
    folds = np.empty(len(labels), dtype=np.int64)
    for group in order:
        tie_break = random.permutation(count)
        fold = np.lexsort((tie_break, -missing_F, -missing_FK[:, rarest_G[group]]))[0]
        folds[members[group]] = fold
        missing_FK[fold] -= counts_GK[group]
        missing_F[fold] -= sizes_G[group]
    return folds


def group_members(groups: Array) -> list[Array]:
    """The rows of each group: those with equal numbers in `groups` (N,)."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _strata(labels: Array) -> Array:
    """Booleans (N, K) of what the folds must share evenly: classes, labels, or quantiles of a real value."""
    if labels.ndim == 2 and is_multi_hot(labels):  # images without any label are a stratum of their own
        return np.concatenate([labels > 0, (labels > 0).sum(axis=1, keepdims=True) == 0], axis=1)
    _, indices = np.unique(label_strata(labels), return_inverse=True)
    return np.eye(indices.max() + 1, dtype=bool)[indices]
