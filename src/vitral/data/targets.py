"""What an image is labelled with: one class, a set of classes, or real numbers.

| task           | label in a listing            | `Split.labels`                            |
|----------------|-------------------------------|-------------------------------------------|
| classification | class index                   | int64 (N,)                                |
| multilabel     | tuple of class indices        | float32 (N, K), 1 for each of its classes |
| regression     | tuple of values, per target   | float32 (N, R)                            |

Does not import torch, so that the command line can read a list at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

TaskName = Literal["classification", "multilabel", "regression"]
LabelValue = int | tuple[int, ...] | tuple[float, ...]  # of one image
Labels = np.ndarray[Any, Any]  # of a split

NUM_QUANTILES = 10  # strata of a real-valued target


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """How the labels of a CSV list or of a Python sequence are read. The defaults detect it."""

    task: TaskName | None = None
    targets: tuple[str, ...] = ()  # regression: columns with the values
    separator: str = ""  # multilabel: between the labels of an image


DETECT_LABELS = LabelOptions()


def labels_array(labels: Iterable[Any], task: TaskName, num_outputs: int) -> Labels:
    """The labels of a split as an array, from those of a listing."""
    values = list(labels)
    if task == "classification":
        return np.array(values, dtype=np.int64)
    if task == "regression":
        return np.array(values, dtype=np.float32).reshape(len(values), num_outputs)
    multi_hot = np.zeros((len(values), num_outputs), dtype=np.float32)
    for row, indices in enumerate(values):
        multi_hot[row, list(indices)] = 1
    return multi_hot


def label_values(labels: Labels, task: TaskName) -> list[Any]:
    """The inverse of `labels_array`, as lists for JSON."""
    if task == "multilabel":
        return [np.flatnonzero(row).tolist() for row in labels]
    values: list[Any] = labels.tolist()
    return values


def label_strata(labels: Labels) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A stratum per image, int64 (N,), of which each split should get its share.

    The class of classification labels. Multi-hot labels: the label of the image that is rarest among the images that
    have no stratum yet, the rarest label first, as in iterative stratification (Sechidis et al., 2011). Real values:
    their decile, of the first target.
    """
    if labels.ndim == 1:
        return labels.astype(np.int64)
    if not is_multi_hot(labels):
        ranks = labels[:, 0].argsort(kind="stable").argsort(kind="stable")
        return ranks * min(NUM_QUANTILES, max(len(labels) // 2, 1)) // max(len(labels), 1)
    K = labels.shape[1]
    strata = np.full(len(labels), K)  # of images without a label
    remaining = labels > 0
    counts = remaining.sum(axis=0)
    while counts.any():
        rarest = int(np.where(counts > 0, counts, len(labels) + 1).argmin())
        members = remaining[:, rarest].copy()
        strata[members] = rarest
        remaining[members] = False
        counts = remaining.sum(axis=0)
    return strata


def is_multi_hot(labels: Labels) -> bool:
    """Whether labels (N, K) are zeros and ones."""
    return bool(np.isin(labels, (0, 1)).all())


def closest_rows(row: int, labels: Labels) -> Sequence[int]:
    """Other images by how close their labels are to those of image `row`: of its class, or nearest first."""
    if labels.ndim == 1:
        members = np.flatnonzero(labels == labels[row])
        position = int(np.searchsorted(members, row))
        return [int(other) for other in (*members[position + 1 :], *members[:position])]
    distances = np.abs(labels - labels[row]).sum(axis=1)
    return [int(other) for other in distances.argsort(kind="stable") if other != row]
