"""`Dataset` and `Split`, and the built-in datasets: `load_builtin_dataset("mnist")`.

Built-in datasets fit into memory: their splits are two tensors. Other datasets may read images on access
(`vitral.data.lazy_images`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.data.files.fingerprints import ImageFingerprints
from vitral.data.files.location import ImageLocation
from vitral.data.folds import ALL_FOLDS, Fold, assign_folds, group_members
from vitral.data.lazy_images import Images
from vitral.data.preprocess import Preprocessing, to_model_input
from vitral.data.registry.fetch import check_dataset_name, fetch_files
from vitral.data.registry.formats import READERS, Arrays, load_digits
from vitral.data.registry.sources import BUILTIN_DATASETS, CLASS_NAMES
from vitral.data.targets import TaskName, label_strata
from vitral.errors import VitralError

__all__ = ["BUILTIN_DATASETS", "Dataset", "Split", "load_builtin_dataset"]

# Fixed, independent of a run's seed: all runs hold out the same images, so that results are comparable and no earlier
# run has trained on them.
VALIDATION_SEED = 2010_11929
TEST_SEED = 2021  # of digits, which has no official test set, and of `test_split`


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Images and their labels, in the order of the source files."""

    images: Images  # pixels (N, C, H, W), uint8 for photographs
    labels: Tensor  # int64 (N,), or float32 (N, K) for other tasks than classification (`vitral.data.targets`)
    is_model_input: bool = False  # whether the images are resized and cropped for the model already
    locations: Sequence[ImageLocation] | None = None  # files, including unreadable ones; None: not read from files
    fingerprints: ImageFingerprints | None = None  # of images that were resized when they were read, if not from files
    rows: Tensor | None = None  # positions in the dataset before it was split, if not read from files

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images of {'×'.join(map(str, self.images.shape[1:]))})"

    def to_model_input(self, preprocessing: Preprocessing) -> Split:
        """The split with images of the model's input size."""
        if self.is_model_input:
            return self
        return replace(self, images=to_model_input(self.images, preprocessing), is_model_input=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Training, validation and test images. The test set is loaded on first access of `test`, not before."""

    name: str
    classes: tuple[str, ...]  # names of the classes, or of the targets of a regression
    train: Split
    validation: Split
    source: str  # for display: "from the package registry (official mirror: no route to host)"
    fingerprint: str  # identifies training pixels and labels before the split, wherever the files came from
    load_test: Callable[[], Split] = field(repr=False)
    notes: tuple[str, ...] = ()  # for display, one sentence each: what was skipped or merged
    test_locations: Sequence[ImageLocation] | None = None  # files of the test split, known before it is loaded
    held_out: tuple[str, ...] = ()  # splits that vitral took out of the training images
    task: TaskName = "classification"

    @cached_property
    def test(self) -> Split:
        return self.load_test()


def load_builtin_dataset(
    name: str, *, validation: float = 0.1, fold: Fold | None = None, progress: bool = False
) -> Dataset:
    """Load a built-in dataset by name, downloading it if necessary.

    `validation` is the fraction of the training images to hold out for validation. With a `fold`, this fold of the
    training images is the test split, and the official one is not used.
    """
    check_dataset_name(name)
    check_validation(validation)
    if name == "digits":
        images, labels = load_digits()
        train_all, test = _partition(_to_split((images, labels)), stratified_holdout(labels, 0.2, seed=TEST_SEED))
        source, load_test = "from scikit-learn", lambda: test
    else:
        read = READERS[name]
        files = fetch_files(name, "train", progress=progress)
        train_all, source = _to_split(read(files.paths)), files.source

        def load_test() -> Split:
            return _to_split(read(fetch_files(name, "test", progress=progress).paths))

    if fold == ALL_FOLDS:
        validation, fold = 0.0, None
    masks = holdout_masks(train_all.labels.numpy(), validation=validation, test=0.0, fold=fold)
    train, validation_split = _partition(train_all, masks.validation)
    fold_split = None
    if fold is not None:
        train = _take(train_all, ~(masks.validation | masks.test))
        fold_split, source = _take(train_all, masks.test), f"{source}; {fold_text(fold)}"
    return Dataset(
        name=name,
        classes=CLASS_NAMES[name],
        train=train,
        validation=validation_split,
        source=source,
        fingerprint=_fingerprint(train_all),
        load_test=load_test if fold_split is None else lambda: fold_split,
        held_out=("validation",) if fold is None else ("validation", "test"),
    )


def check_validation(fraction: float) -> None:
    """Raise VitralError for a value that is not a fraction of the training images."""
    if not 0 <= fraction < 1:
        raise VitralError(
            f"validation is {fraction}, expected a fraction of the training images from 0 to below 1", "For example 0.1"
        )


def stratified_holdout(
    labels: np.ndarray[Any, Any], fraction: float, *, seed: int, groups: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mask of the images to hold out: round(fraction · N) in total, from each class its share to within one image.

    Each class contributes its share rounded down; the remaining images come from the classes with the largest
    remainders. The last image of a class is never held out, so that every class can be trained on.
    Uses RandomState because NumPy guarantees that its stream never changes (NEP 19), unlike `default_rng`.
    Images with equal numbers in `groups` are copies of one image and stay together; a class may then contribute
    slightly fewer images.
    """
    random = np.random.RandomState(seed)
    class_members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    shares = np.array([fraction * len(members) for members in class_members])
    counts = np.floor(shares).astype(int)
    remaining = round(fraction * len(labels)) - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:remaining]] += 1
    counts = np.minimum(counts, [len(members) - 1 for members in class_members])
    if groups is not None and len(np.unique(groups)) < len(labels):
        quotas = dict(zip(np.unique(labels).tolist(), counts.tolist(), strict=True))
        return _hold_out_groups(labels, groups, quotas, random)
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for members, count in zip(class_members, counts, strict=True):
        held_out[random.permutation(members)[:count]] = True
    return held_out


class HoldoutMasks(NamedTuple):
    """Masks (N,) of the images that are not used for training."""

    validation: np.ndarray[Any, np.dtype[np.bool_]]
    test: np.ndarray[Any, np.dtype[np.bool_]]
    unused: np.ndarray[Any, np.dtype[np.bool_]]  # the test images of a dataset in the runs of its folds


def holdout_masks(
    labels: np.ndarray[Any, Any],
    *,
    validation: float,
    test: float,
    groups: np.ndarray[Any, Any] | None = None,
    fold: Fold | None = None,
) -> HoldoutMasks:
    """The images to hold out for validation and for testing. `validation` is a fraction of the other images.

    The test images depend on `test` alone, so that models selected on different validation splits stay comparable.
    `labels` are those of any task; each split gets its share of each class or quantile (`label_strata`).
    With a `fold`, they belong to no fold; the images of this fold take their place. With ALL_FOLDS, no validation
    images are held out.
    """
    strata = label_strata(labels)
    is_test = stratified_holdout(strata, test, seed=TEST_SEED, groups=groups)
    is_unused = np.zeros_like(is_test)
    if fold == ALL_FOLDS:
        return HoldoutMasks(is_unused, is_test, is_unused)
    if fold is not None:
        is_unused, rows = is_test, np.flatnonzero(~is_test)
        folds = assign_folds(labels[rows], fold.total, groups=None if groups is None else groups[rows])
        is_test = np.zeros_like(is_unused)
        is_test[rows] = folds == fold.number - 1
    others = np.flatnonzero(~(is_test | is_unused))
    is_validation = np.zeros_like(is_test)
    is_validation[others] = stratified_holdout(
        strata[others], validation, seed=VALIDATION_SEED, groups=None if groups is None else groups[others]
    )
    return HoldoutMasks(is_validation, is_test, is_unused)


def fold_text(fold: Fold) -> str:
    """The part of `Dataset.source` that names the fold."""
    if fold == ALL_FOLDS:
        return "trained on all folds"
    return f"tested on fold {fold.number} of {fold.total}"


def _hold_out_groups(
    labels: np.ndarray[Any, Any],
    groups: np.ndarray[Any, Any],
    quotas: dict[int, int],
    random: np.random.RandomState,
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Hold out whole groups in random order, as long as no class exceeds its quota."""
    held_out = np.zeros(len(labels), dtype=np.bool_)
    members = group_members(groups)
    for index in random.permutation(len(members)):
        class_counts = Counter(labels[members[index]].tolist())
        if all(count <= quotas[label] for label, count in class_counts.items()):
            held_out[members[index]] = True
            for label, count in class_counts.items():
                quotas[label] -= count
    return held_out


def _partition(split: Split, held_out: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Split, Split]:
    """(not held out, held out), each in the original order."""
    return _take(split, ~held_out), _take(split, held_out)


def _take(split: Split, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Split:
    rows = torch.from_numpy(np.flatnonzero(mask))
    return Split(images=split.images[rows], labels=split.labels[rows], rows=rows)


def _fingerprint(split: Split) -> str:
    assert isinstance(split.images, Tensor)
    digest = hashlib.sha256(repr(tuple(split.images.shape)).encode())
    digest.update(split.images.numpy().data)
    digest.update(split.labels.numpy().data)
    return digest.hexdigest()[:16]


def _to_split(arrays: Arrays) -> Split:
    images, labels = arrays
    return Split(
        images=torch.from_numpy(np.ascontiguousarray(images)), labels=torch.from_numpy(labels.astype(np.int64))
    )
