"""Dataset listings: which image belongs to which class and split, before anything is decoded.

Built from class folders or CSV lists (folders.py) or from WebDataset shards (shards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitral.data.classes import class_index_map
from vitral.data.datasets import fold_text, holdout_masks
from vitral.data.files.location import ImageLocation
from vitral.data.folds import ALL_FOLDS, Fold
from vitral.data.targets import LabelValue, TaskName, labels_array
from vitral.errors import VitralError, did_you_mean, truncate_list
from vitral.utils.text import count_text

SPLIT_NAMES = {  # names of folders, shards and CSV values → split
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip

LabelledLocation = tuple[ImageLocation, LabelValue]  # an image with its class index, class indices or values
RawLabel = str | tuple[str, ...] | tuple[float, ...]  # a class name, several, or values
NamedLocation = tuple[ImageLocation, RawLabel]


@dataclass(frozen=True, kw_only=True)
class DatasetListing:
    """Images of a dataset with their labels, by split."""

    name: str
    classes: tuple[str, ...]  # or the names of the targets of a regression
    splits: Mapping[str, Sequence[LabelledLocation]]  # train, validation, test
    source: str  # for display
    state: object = None  # distinguishes versions of a dataset whose files do not change path, size or time
    notes: tuple[str, ...] = ()  # for display, one sentence each: skipped files, merged folders, classes of one image
    held_out: tuple[str, ...] = ()  # splits that were taken out of the training images
    task: TaskName = "classification"

    @property
    def locations(self) -> list[ImageLocation]:
        """Those of all images."""
        return [location for items in self.splits.values() for location, _ in items]

    def labels(self, split: str) -> np.ndarray[Any, Any]:
        """The labels of a split: int64 (N,), multi-hot or real values (N, K) (`vitral.data.targets`)."""
        return labels_array([label for _, label in self.splits[split]], self.task, len(self.classes))


def make_listing(
    name: str,
    images: Mapping[str, Sequence[NamedLocation]],
    *,
    source: str,
    hint: str,
    state: object = None,
    notes: Sequence[str] = (),
    class_key: Callable[[str], Any] | None = None,
    task: TaskName = "classification",
    classes: Sequence[str] = (),
) -> DatasetListing:
    """Assign class indices. The classes are those of the training images, sorted by `class_key`, unless given.

    Raises VitralError for fewer than two classes (with `hint`), for class names that are not valid Unicode, and for
    classes of the validation or test split without training images.
    """
    class_names = {split: {name for _, label in items for name in _names(label)} for split, items in images.items()}
    classes = tuple(classes) or tuple(sorted(class_names["train"], key=class_key))
    for label in classes:
        if not label.isascii() and label.encode(errors="ignore") != label.encode(errors="surrogateescape"):
            raise VitralError(f"the class name {label!r} is not valid Unicode", "Rename the class")
    if len(classes) < 2 and task != "regression":
        noun = "class" if len(classes) == 1 else "classes"
        raise VitralError(f"{name} has {len(classes)} {noun} with images, expected at least two", hint)
    for split in ("validation", "test"):
        if untrained := sorted(class_names[split] - set(classes)):
            raise VitralError(
                f"{name}: class {untrained[0]!r} of the {split} split has no training images"
                f"{did_you_mean(untrained[0], classes)}",
                f"Classes of the training split: {truncate_list(classes, 12)}",
            )
    index = class_index_map(classes)

    def value(label: Any) -> LabelValue:
        if task == "classification":
            return index[label]
        return tuple(label) if task == "regression" else tuple(sorted(index[name] for name in label))

    return DatasetListing(
        name=name,
        classes=classes,
        splits={split: [(location, value(label)) for location, label in items] for split, items in images.items()},
        source=source,
        state=state,
        notes=tuple(notes),
        task=task,
    )


def _names(label: RawLabel) -> tuple[str, ...]:
    """The class names of a label: one, several, or none for real values."""
    return (label,) if isinstance(label, str) else tuple(name for name in label if isinstance(name, str))


def hold_out_missing_splits(
    listing: DatasetListing,
    validation: float,
    test_split: float,
    fold: Fold | None,
    find_copies: Callable[[Sequence[ImageLocation]], np.ndarray[Any, Any] | None],
) -> DatasetListing:
    """Hold out a validation split unless the listing has one, and a test split of a fraction `test_split`.

    With a `fold` of the training and validation images, its images are the test split. `find_copies` is called with
    the training images if some of them are moved; it returns a number per image, equal for copies of one image, or
    None if copies cannot be detected. Refuses `test_split` for data that has a test split.
    """
    if fold is not None:  # of all images that can be trained on
        merged = [*listing.splits["train"], *listing.splits["validation"]]
        listing = replace(listing, splits={**listing.splits, "train": merged, "validation": []})
    if test_split and listing.splits["test"]:
        raise VitralError(
            f"{listing.name} has a test split of {len(listing.splits['test']):,} images", "Omit --test-split"
        )
    if listing.splits["validation"] and not test_split:
        return listing
    if not (validation > 0 or test_split > 0 or fold is not None):
        return _hold_out(listing, validation, test_split, fold, None)
    groups = find_copies([location for location, _ in listing.splits["train"]])
    listing = _hold_out(listing, validation, test_split, fold, groups)
    if groups is None:
        return replace(listing, source=f"{listing.source}, near-duplicates not detected in remote shards")
    return listing


def _hold_out(
    listing: DatasetListing,
    validation: float,
    test_split: float,
    fold: Fold | None,
    groups: np.ndarray[Any, Any] | None,
) -> DatasetListing:
    """Move stratified fractions of the training images to test and, unless there is a validation split, to validation.

    Copies of one image have the same number in `groups` and stay in one split. With a `fold`, its images become the
    test split, and test images, given or held out, are not used.
    """
    train = listing.splits["train"]
    labels = listing.labels("train")
    if has_validation := bool(listing.splits["validation"]):
        validation = 0.0
    masks = holdout_masks(labels, validation=validation, test=test_split, groups=groups, fold=fold)
    held_out = [f"{test_split:.0%} held out for testing"] * (test_split > 0)
    held_out += [] if fold is None else [fold_text(fold)]
    held_out += [f"{validation:.0%} held out for validation"] * (validation > 0 and fold != ALL_FOLDS)
    source = ", ".join([listing.source, *held_out])
    num_copies = 0 if groups is None else len(groups) - len(np.unique(groups))
    if num_copies:
        source += f", {count_text(num_copies, 'near-duplicate')} kept in one split"
        num_held_out, expected = int(masks.validation.sum() + masks.test.sum()), (validation + test_split) * len(train)
        if fold is None and num_held_out < 0.8 * expected:
            source += f", so only {num_held_out:,} instead of {expected:,.0f} images are held out"
    splits = {split: list(items) for split, items in listing.splits.items()} | {"train": []}
    splits |= {} if fold in (None, ALL_FOLDS) else {"test": []}
    for item, for_validation, for_test, is_unused in zip(train, *masks, strict=True):
        if not is_unused:
            splits["validation" if for_validation else "test" if for_test else "train"].append(item)
    single = _single_image_classes(listing.classes, labels) if listing.task != "regression" else []
    notes = (*listing.notes, _single_image_note(single)) if single and (validation or test_split) else listing.notes
    names = ("test",) * (test_split > 0 or fold not in (None, ALL_FOLDS)) + ("validation",) * (not has_validation)
    return replace(listing, splits=splits, source=source, notes=notes, held_out=names)


def _single_image_classes(classes: Sequence[str], labels: np.ndarray[Any, Any]) -> list[str]:
    counts = np.bincount(labels, minlength=len(classes)) if labels.ndim == 1 else labels.sum(axis=0)
    return [name for name, count in zip(classes, counts, strict=True) if count == 1]


def _single_image_note(classes: Sequence[str]) -> str:
    """What happens to classes with a single image when images are held out for validation."""
    number = "a single image" if len(classes) == 1 else "a single image each"
    return f"{truncate_list(classes)}: {number}, used for training; the validation split has none. Add more images"
