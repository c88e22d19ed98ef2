"""Class names and class indices. The index of a class is its position in a tuple of class names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def class_index_map(classes: Sequence[str]) -> dict[str, int]:
    """Map each class name to its index."""
    return {name: index for index, name in enumerate(classes)}


def class_indices(names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Indices into `classes` of each name, int64 (len(names),). All names must be in `classes`.

    Indexed with labels of a dataset, `class_indices(dataset.classes, model_classes)[labels]` are the labels of a model
    that has its classes in another order, or more of them.
    """
    import torch

    index = class_index_map(classes)
    return torch.tensor([index[name] for name in names], dtype=torch.int64)


def to_model_labels(labels: Tensor, classes: Sequence[str], model_classes: Sequence[str]) -> Tensor:
    """Labels of a dataset with `classes` as labels of a model: class indices (N,), or one column per class (N, K).

    A class that the dataset does not have is 0 in multi-hot labels.
    """
    indices = class_indices(classes, model_classes)
    if labels.ndim == 1:
        return indices[labels]
    model_labels = labels.new_zeros(len(labels), len(model_classes))
    model_labels[:, indices] = labels
    return model_labels
