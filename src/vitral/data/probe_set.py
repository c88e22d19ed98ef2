"""A few labelled images for a k-NN check of features during pretraining: `load_probe_set("labelled/", preprocessing)`.

The test split of the labelled data is not used, so that it stays unseen until the final evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.data.datasets import VALIDATION_SEED, Dataset, load_builtin_dataset, stratified_holdout
from vitral.data.files.file_dataset import ReadOptions, list_images, load_file_dataset, read_listing
from vitral.data.files.listing import DatasetListing
from vitral.data.files.packed import is_packed
from vitral.data.files.pixel_detection import check_pixel_format
from vitral.data.lazy_images import Images
from vitral.data.names import check_dataset_exists, is_file_dataset
from vitral.data.preprocess import Preprocessing, to_model_input
from vitral.data.sequence import ItemSequence, is_sequence, load_sequence
from vitral.data.targets import DETECT_LABELS, LabelOptions, TaskName
from vitral.data.variable_images import VariableSizeImages, select_rows
from vitral.errors import VitralError

MAX_IMAGES = 5000  # their features are computed after every epoch
MAX_NEIGHBOURS = 20  # the usual number in papers on self-supervised learning


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeSet:
    """Labelled images in memory, at the model's input size."""

    name: str
    classes: tuple[str, ...]
    images: Images  # pixels (N, C, H, W), not normalised; VariableSizeImages for native inputs
    labels: Tensor  # int64 (N,)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_neighbours(self) -> int:
        """k of k-NN: at most the other images of a class of median size.

        With more, other classes outvote the right one: of two classes with five images each, all images have more
        neighbours in the other class.
        """
        counts = self.labels.bincount()
        return min(MAX_NEIGHBOURS, max(int(counts[counts > 0].median()) - 1, 1))


def load_probe_set(
    source: str | Path | ItemSequence,
    preprocessing: Preprocessing,
    *,
    max_images: int = MAX_IMAGES,
    read_options: ReadOptions | None = None,
    label_options: LabelOptions = DETECT_LABELS,
) -> ProbeSet:
    """Load labelled images, preprocessed as for predictions.

    Args:
        source: Built-in dataset, class folders, CSV list, shards, packed folder or a sequence of (image, label).
            Training and validation images are used.
        preprocessing: That of the model.
        max_images: Of more images, this number is drawn, from each class its share, the same in every run.

    Raises:
        VitralError: The source does not exist, has no classes, or has several labels or real values per image.
    """
    options = read_options or ReadOptions()
    if is_sequence(source):
        dataset = load_sequence(
            source, preprocessing, validation=0.0, read_options=options, label_options=label_options
        )
        return _from_dataset(dataset, preprocessing, max_images)
    name = str(source)
    check_dataset_exists(name)
    if not is_file_dataset(name):
        return _from_dataset(load_builtin_dataset(name, validation=0.0), preprocessing, max_images)
    if is_packed(Path(name)):
        return _from_dataset(load_file_dataset(name, preprocessing), preprocessing, max_images)
    listing = list_images(name, 0.0, label_options=label_options)
    return _from_listing(listing, preprocessing, max_images, options)


def check_labelled(source: str | Path) -> None:
    """Raise VitralError if the source does not exist or does not have one class per image. Decodes no image."""
    name = str(source)
    check_dataset_exists(name)
    if is_file_dataset(name) and not is_packed(Path(name)):
        listing = list_images(name, 0.0)
        _check_task(listing.name, listing.task)


def _from_dataset(dataset: Dataset, preprocessing: Preprocessing, max_images: int) -> ProbeSet:
    _check_task(dataset.name, dataset.task)
    rows = _sample(dataset.train.labels, max_images)
    images = to_model_input(select_rows(dataset.train.images, rows), preprocessing)
    return _probe_set(dataset.name, dataset.classes, images, dataset.train.labels[rows])


def _from_listing(
    listing: DatasetListing, preprocessing: Preprocessing, max_images: int, options: ReadOptions
) -> ProbeSet:
    """Decode only the images that are drawn, and exactly as a prediction does: as validation images."""
    _check_task(listing.name, listing.task)
    items = [*listing.splits["train"], *listing.splits["validation"]]
    labels = torch.tensor([label for _, label in items])
    drawn = [items[row] for row in _sample(labels, max_images).tolist()]
    part = replace(listing, splits={"train": [], "validation": drawn, "test": []})
    check_pixel_format([location for location, _ in drawn], listing.name, preprocessing.pixel_format)
    # Streamed, because a pack of this part would replace that of the whole dataset in the cache.
    split = read_listing(part, preprocessing, replace(options, pack=0.0)).validation.to_model_input(preprocessing)
    return _probe_set(listing.name, listing.classes, split.images, split.labels)


def _probe_set(name: str, classes: tuple[str, ...], images: Images, labels: Tensor) -> ProbeSet:
    if not len(labels) or int(labels.bincount().max()) == 1:
        raise VitralError(
            f"{name} has one image per class, but k-NN compares each image with others of its class",
            "Label at least two images per class",
        )
    if isinstance(images, VariableSizeImages):
        images = VariableSizeImages(images.stored[:], images.sizes, images.stored_sizes)
    else:
        images = images[:]
    return ProbeSet(name=name, classes=classes, images=images, labels=labels)


def _check_task(name: str, task: TaskName) -> None:
    if task != "classification":
        raise VitralError(
            f"measuring features needs one class per image; {name} is for {task}",
            "Name a dataset with one class per image",
        )


def _sample(labels_N: Tensor, max_images: int) -> Tensor:
    """Rows of at most `max_images` images, from each class its share, in order."""
    if len(labels_N) <= max_images:
        return torch.arange(len(labels_N))
    mask = stratified_holdout(labels_N.numpy(), max_images / len(labels_N), seed=VALIDATION_SEED)
    return torch.from_numpy(np.flatnonzero(mask))
