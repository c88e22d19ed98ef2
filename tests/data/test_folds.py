from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.photos import COLOURS, save_class_folders
from vitral.data.datasets import load_builtin_dataset
from vitral.data.files.file_dataset import list_images
from vitral.data.folds import ALL_FOLDS, Fold, assign_folds, parse_fold


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    folds=st.integers(2, 7),
    seed=st.integers(0, 99),
)
def test_every_fold_has_its_share_of_every_class(counts: list[int], folds: int, seed: int) -> None:
    assume(sum(counts) >= folds)
    labels = np.random.RandomState(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    assigned = assign_folds(labels, folds)
    assert np.array_equal(assigned, assign_folds(labels, folds))
    for label in range(len(counts)):
        sizes = np.bincount(assigned[labels == label], minlength=folds)
        assert sizes.max() - sizes.min() <= 1
    sizes = np.bincount(assigned, minlength=folds)
    assert sizes.max() - sizes.min() <= len(counts)


def test_copies_of_an_image_are_in_one_fold_and_classes_stay_balanced() -> None:
    labels = np.repeat([0, 1], 60)
    groups = np.arange(120) // 3  # 40 images with two copies each
    folds = assign_folds(labels, 5, groups=groups)
    assert all(len(set(folds[groups == group])) == 1 for group in range(40))
    for label in (0, 1):
        assert np.bincount(folds[labels == label]).tolist() == [12] * 5


def test_several_labels_per_image_are_spread_over_the_folds() -> None:
    random = np.random.RandomState(0)
    labels = (random.rand(200, 4) < np.array([0.5, 0.3, 0.1, 0.05])).astype(np.uint8)
    folds = assign_folds(labels, 4)
    for label in range(4):
        sizes = np.bincount(folds[labels[:, label] > 0], minlength=4)
        assert sizes.max() - sizes.min() <= 3
    assert np.ptp(np.bincount(folds)) <= 4


def test_numbers_to_predict_have_the_same_range_in_every_fold() -> None:
    values = np.random.RandomState(0).lognormal(size=100)
    folds = assign_folds(values[:, None], 5)
    means = [np.log(values[folds == fold]).mean() for fold in range(5)]
    assert np.bincount(folds).tolist() == [20] * 5
    assert np.ptp(means) < 0.2  # a random assignment differs by 0.5


@pytest.mark.parametrize("text", ["0/5", "6/5", "1/1", "2", "two/five", "-1/5", "2/5/7"])
def test_a_wrong_fold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2/5"):
        parse_fold(text)


def test_folds_are_parsed_as_they_are_written() -> None:
    assert parse_fold("") is None
    for fold in (Fold(2, 5), ALL_FOLDS):
        assert parse_fold(str(fold)) == fold


def test_every_training_image_of_a_folder_is_in_one_fold_and_test_images_are_in_none(tmp_path: Path) -> None:
    for seed, (split, count) in enumerate({"train": 9, "val": 3, "test": 4}.items()):
        save_class_folders(tmp_path / split, list(COLOURS)[:2], count, first_seed=1000 * seed)
    tested: list[str] = []
    for number in (1, 2, 3):
        splits = list_images(tmp_path, 0.2, fold=Fold(number, 3)).splits
        files = {name: {location.path for location, _ in items} for name, items in splits.items()}
        assert not any("/test/" in file for names in files.values() for file in names)
        assert sum(map(len, files.values())) == len(set.union(*files.values())) == 24
        assert files["validation"]
        tested += files["test"]
    assert len(tested) == len(set(tested)) == 24
    everything = list_images(tmp_path, 0.2, fold=ALL_FOLDS).splits
    assert [len(everything[name]) for name in ("train", "validation", "test")] == [24, 0, 8]


def test_a_held_out_test_split_is_in_no_fold(tmp_path: Path) -> None:
    save_class_folders(tmp_path, list(COLOURS)[:2], 10)
    test = {location for location, _ in list_images(tmp_path, 0.2, test_split=0.2).splits["test"]}
    for fold in (Fold(1, 2), Fold(2, 2)):
        splits = list_images(tmp_path, 0.2, test_split=0.2, fold=fold).splits
        assert not test & {location for items in splits.values() for location, _ in items}


def test_folds_of_a_built_in_dataset_name_the_rows_of_its_training_images() -> None:
    rows: list[int] = []
    for number in (1, 2, 3):
        dataset = load_builtin_dataset("digits", fold=Fold(number, 3))
        assert dataset.test.rows is not None
        rows += dataset.test.rows.tolist()
    official = load_builtin_dataset("digits", fold=ALL_FOLDS)
    assert sorted(rows) == list(range(len(official.train)))
    assert len(official.validation) == 0
    assert len(official.test) == len(load_builtin_dataset("digits").test)
