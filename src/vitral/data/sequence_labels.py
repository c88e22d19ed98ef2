"""Labels of Python sequences: what kind they are, their class names, and the labels as an array.

| label of an item                                    | task           |
|-----------------------------------------------------|----------------|
| an integer or a name                                | classification |
| a set, list or tuple of integers or names           | multilabel     |
| a boolean vector, or an integer array of 0 and 1    | multilabel     |
| a float; a list, tuple or array of floats           | regression     |

Class names come from `.classes`, from `.features["label"].names`, or from the labels themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vitral.data.classes import class_index_map
from vitral.data.targets import LabelOptions, Labels, TaskName, labels_array
from vitral.errors import VitralError, short_repr, truncate_list
from vitral.utils.text import count_text

LABEL_KEYS = ("label", "labels", "fine_label", "target", "targets", "class")
LABELS_HINT = "Labels are class names or class indices from 0; sets of them; or floats"


def read_sequence_labels(
    raw_labels: Sequence[Any], data: object, options: LabelOptions
) -> tuple[TaskName, tuple[str, ...], Labels]:
    """The task, the names of the classes or targets, and the labels of all items. `data` may declare class names."""
    labels = [_plain(label) for label in raw_labels]
    if not labels:
        raise VitralError("0 items in 0 classes, expected at least two classes", "An item is (image, label)")
    task = options.task or ("regression" if options.targets else _detect_task(labels))
    if task == "regression":
        names, values = _targets(labels, options.targets)
        return task, names, values
    declared = _declared_class_names(data)
    if task == "classification":
        classes, indices = _class_indices(labels, declared)
        return task, classes, indices
    classes, multi_hot = _multi_hot(labels, declared)
    return task, classes, multi_hot


def _plain(label: Any) -> Any:
    """Arrays and tensors of one value as a Python number, longer ones as an array."""
    if isinstance(label, Tensor):
        label = label.detach().cpu().numpy()
    if isinstance(label, np.generic | np.ndarray) and label.ndim == 0:
        return label.item()
    return label


def _detect_task(labels: Sequence[Any]) -> TaskName:
    if all(isinstance(label, int | str) and not isinstance(label, bool) for label in labels):
        return "classification"
    if any(isinstance(label, float) for label in labels):
        return "regression"
    first = next((label for label in labels if not isinstance(label, Iterable) or _length(label)), labels[0])
    if isinstance(first, np.ndarray):
        return "regression" if first.dtype.kind == "f" else "multilabel"
    if isinstance(first, list | tuple) and any(isinstance(value, float) for value in first):
        return "regression"
    return "multilabel"


def _length(values: Any) -> int:
    return len(values) if hasattr(values, "__len__") else 1


def _unsupported(index: int, label: Any, expected: str) -> VitralError:
    return VitralError(f"item {index}: unsupported label {short_repr(label)}, expected {expected}", LABELS_HINT)


def _class_indices(labels: Sequence[Any], declared: tuple[str, ...] | None) -> tuple[tuple[str, ...], Labels]:
    for index, label in enumerate(labels):
        if not isinstance(label, int | str) or isinstance(label, bool):
            raise _unsupported(index, label, "a class name or an integer")
    classes = declared if declared is not None else _class_names(labels)
    index_of = _IndexLookup(classes, is_declared=declared is not None)
    indices = labels_array(map(index_of, labels), "classification", len(classes))
    if len(classes) < 2:
        raise VitralError(
            f"{len(labels):,} items in {len(classes)} classes, expected at least two classes",
            "An item is (image, label)",
        )
    return classes, indices


def _multi_hot(labels: Sequence[Any], declared: tuple[str, ...] | None) -> tuple[tuple[str, ...], Labels]:
    """Multi-hot labels (N, K) of label sets, or of vectors that are multi-hot already."""
    if all(isinstance(label, np.ndarray) and label.ndim == 1 for label in labels):
        lengths = {len(label) for label in labels}
        is_binary = all(np.isin(label, (0, 1)).all() for label in labels)
        if len(lengths) == 1 and is_binary:
            K = lengths.pop()
            classes = declared or tuple(str(index) for index in range(K))
            if len(classes) != K:
                raise VitralError(f"{K} values per label vector, but {len(classes)} classes", LABELS_HINT)
            return classes, np.stack(labels).astype(np.float32)
    sets = [label.tolist() if isinstance(label, np.ndarray) else label for label in labels]
    sets = [[label] if isinstance(label, int | str) and not isinstance(label, bool) else label for label in sets]
    for index, label in enumerate(sets):
        is_collection = isinstance(label, list | tuple | set | frozenset)
        if not is_collection or any(not isinstance(name, int | str) or isinstance(name, bool) for name in label):
            raise _unsupported(index, label, "a set of class names or integers")
    classes = declared if declared is not None else _class_names([name for label in sets for name in label])
    if len(classes) < 2:
        raise VitralError(
            f"{len(labels):,} items with {len(classes)} different labels, expected at least two",
            "An item is (image, {label, ...})",
        )
    index_of = _IndexLookup(classes, is_declared=declared is not None)
    return classes, labels_array((map(index_of, label) for label in sets), "multilabel", len(classes))


def _targets(labels: Sequence[Any], names: tuple[str, ...]) -> tuple[tuple[str, ...], Labels]:
    """Names of the targets and their values (N, R)."""
    rows: list[list[float]] = []
    for index, label in enumerate(labels):
        values = [label] if isinstance(label, int | float) else label
        try:
            row = [float(value) for value in values]
        except (TypeError, ValueError):
            raise _unsupported(index, label, "a number or several") from None
        if len(row) != len(rows[0] if rows else row) or not row or not all(map(math.isfinite, row)):
            count = len(rows[0]) if rows else 1
            raise _unsupported(index, label, count_text(count, "finite number"))
        rows.append(row)
    R = len(rows[0])
    names = names or (("target",) if R == 1 else tuple(f"target {index + 1}" for index in range(R)))
    if len(names) != R:
        raise VitralError(f"{R} values per item, but {len(names)} names in data.targets", "Name one target per value")
    return names, labels_array(rows, "regression", R)


class _IndexLookup:
    """Integers are indices into declared class names; without declared names they are names themselves."""

    def __init__(self, classes: tuple[str, ...], is_declared: bool) -> None:
        self.classes, self.is_declared, self.index = classes, is_declared, class_index_map(classes)

    def __call__(self, label: int | str) -> int:
        if isinstance(label, int) and self.is_declared:
            if not 0 <= label < len(self.classes):
                raise VitralError(f"the label {label} is not one of {len(self.classes)} classes", LABELS_HINT)
            return label
        if str(label) not in self.index:
            raise VitralError(
                f"the label {str(label)!r} is not one of the classes {truncate_list(self.classes, 8)}", LABELS_HINT
            )
        return self.index[str(label)]


def _declared_class_names(data: object) -> tuple[str, ...] | None:
    """Class names that the sequence provides for its integer labels."""
    names: Any = getattr(data, "classes", None)
    features = getattr(data, "features", None)
    if names is None and isinstance(features, Mapping):
        column = next((name for name in LABEL_KEYS if name in features), None)
        feature = features[column] if column else None
        names = getattr(getattr(feature, "feature", feature), "names", None)  # Sequence(ClassLabel) or ClassLabel
    return tuple(map(str, names)) if names else None


def _class_names(labels: Sequence[int | str]) -> tuple[str, ...]:
    """Sorted integers, then sorted strings; 1 and "1" are one class."""
    integers = map(str, sorted({label for label in labels if isinstance(label, int)}))
    strings = sorted({label for label in labels if isinstance(label, str)})
    return tuple(dict.fromkeys([*integers, *strings]))
