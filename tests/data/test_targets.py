"""Labels of the three tasks: arrays, strata for hold-outs, and Python sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitral.data.datasets import holdout_masks
from vitral.data.sequence_labels import read_sequence_labels
from vitral.data.targets import DETECT_LABELS, LabelOptions, label_strata, label_values, labels_array
from vitral.errors import VitralError


def read(labels: list[Any], data: object = None, options: LabelOptions = DETECT_LABELS) -> tuple[Any, ...]:
    task, names, values = read_sequence_labels(labels, data, options)
    return task, names, values.tolist()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1], ("classification", ("0", "1"), [0, 1])),
        ([{"cat", "dog"}, set(), ["dog"]], ("multilabel", ("cat", "dog"), [[1, 1], [0, 0], [0, 1]])),
        ([torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])], ("multilabel", ("0", "1", "2"), [[1, 0, 1], [0, 0, 1]])),
        ([np.array([True, False]), np.array([True, True])], ("multilabel", ("0", "1"), [[1, 0], [1, 1]])),
        ([1.5, 2], ("regression", ("target",), [[1.5], [2]])),
        ([torch.tensor(0.5), torch.tensor(2.0)], ("regression", ("target",), [[0.5], [2]])),
        ([(1.0, 2.0), (3.0, 4.0)], ("regression", ("target 1", "target 2"), [[1, 2], [3, 4]])),
    ],
)
def test_task_follows_from_the_labels_of_a_sequence(labels: list[Any], expected: tuple[Any, ...]) -> None:
    assert read(labels) == expected


def test_declared_class_names_apply_to_label_sets() -> None:
    data = SimpleNamespace(classes=["ant", "bee", "cat"])
    assert read([{2}, {0, 1}], data) == ("multilabel", ("ant", "bee", "cat"), [[0, 0, 1], [1, 1, 0]])
    with pytest.raises(VitralError, match="label 3 is not one of 3 classes"):
        read([{3}, {0, 1}], data)


def test_a_given_task_overrides_the_detected_one() -> None:
    assert read([3, 4], options=LabelOptions(task="regression", targets=("age",)))[:2] == ("regression", ("age",))
    with pytest.raises(VitralError, match="item 1: unsupported label"):
        read([(1.0, 2.0), (3.0,)])


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=20))
def test_multi_hot_labels_survive_a_round_trip(label_sets: list[set[int]]) -> None:
    array = labels_array([tuple(sorted(labels)) for labels in label_sets], "multilabel", 6)
    assert [set(row) for row in label_values(array, "multilabel")] == label_sets


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000))
def test_every_label_gets_its_share_of_a_multi_label_holdout(seed: int) -> None:
    rng = np.random.RandomState(seed)
    labels = (rng.rand(400, 6) < np.array([0.4, 0.3, 0.2, 0.1, 0.08, 0.05])).astype(np.float32)
    is_validation, is_test, _ = holdout_masks(labels, validation=0.25, test=0.0)
    assert not is_test.any()
    assert is_validation.sum() == 100
    shares = labels[is_validation].sum(axis=0) / labels.sum(axis=0)
    rare = labels.sum(axis=0).argmin()
    assert abs(labels[is_validation, rare].sum() - 0.25 * labels[:, rare].sum()) <= 1
    assert (np.abs(shares - 0.25) < 0.2).all()


def test_regression_holdout_covers_the_range_of_the_target() -> None:
    labels = np.random.RandomState(0).lognormal(size=(200, 1)).astype(np.float32)
    is_validation, _, _ = holdout_masks(labels, validation=0.2, test=0.0)
    deciles = label_strata(labels)
    assert np.bincount(deciles[is_validation]).tolist() == [4] * 10
    assert labels[deciles == 0].max() <= labels[deciles == 9].min()
