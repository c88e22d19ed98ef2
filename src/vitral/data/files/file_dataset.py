"""Datasets of image files: class folders, CSV lists, shards and packed folders.

Decoded images are packed in the cache if they fit (packed.py), otherwise decoded in every epoch (stream.py). Large sets
are packed while they are read for the first time (packing_images.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vitral.data.datasets import Dataset, Split
from vitral.data.files.folders import check_single_label, list_folder
from vitral.data.files.listing import DatasetListing
from vitral.data.files.location import ImageLocation
from vitral.data.files.pack_writer import PackJob, pack_split
from vitral.data.files.packed import (
    FORMAT,
    DamagedPackError,
    PackedSplit,
    PackIndex,
    fingerprint,
    is_packed,
    read_index,
    read_split,
    remove_stale_packs,
    write_index,
)
from vitral.data.files.packing_images import packing_images
from vitral.data.files.remote import is_url
from vitral.data.files.shards import list_shards
from vitral.data.files.stream import StreamedImages
from vitral.data.folds import Fold
from vitral.data.lazy_images import Images, MappedImages
from vitral.data.names import SEQUENCE_PREFIX, is_shard_pattern
from vitral.data.preprocess import Preprocessing, to_model_input
from vitral.data.registry.cache import cache_dir
from vitral.data.targets import DETECT_LABELS, LabelOptions, TaskName, labels_array
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError, shell_quote
from vitral.utils.atomic import is_writable
from vitral.utils.text import count_text

GIB = 2**30
MIN_BYTES_TO_DEFER = 2 * GIB  # training images of at least this size are packed during the first pass over them


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How image files are read. Does not affect the result of a training run."""

    pack: float = 64.0  # GiB of disk for packed images; larger datasets are decoded in every epoch
    unreadable: float = 0.01  # fraction of unreadable files above which loading fails
    workers: int = 0  # images decoded at a time; 0: one per CPU

    def __post_init__(self) -> None:
        if not self.pack >= 0:
            raise ValueError(f"data.pack must be at least 0, got {self.pack}")
        if not 0 <= self.unreadable <= 1:
            raise ValueError(f"data.unreadable must be from 0 to 1, got {self.unreadable}")
        if self.workers < 0:
            raise ValueError(f"data.workers must be at least 0, got {self.workers}")


def load_file_dataset(
    path: Path | str,
    preprocessing: Preprocessing,
    *,
    validation: float = 0.15,
    test_split: float = 0.0,
    exclude: Sequence[str] = (),
    fold: Fold | None = None,
    read_options: ReadOptions | None = None,
    label_options: LabelOptions = DETECT_LABELS,
    progress: bool = False,
) -> Dataset:
    """Load a dataset of image files for a model with `preprocessing`.

    Training images are resized but not cropped, so that crops can be drawn. Validation and test images are model
    input, the same pixels as in a prediction. `exclude` are paths of files that are not used.
    """
    if str(path).startswith(SEQUENCE_PREFIX):
        raise VitralError(
            f"the training data was a Python sequence ({str(path).removeprefix(SEQUENCE_PREFIX)}), not files",
            "Resume from Python with vitral.train(sequence, resume=RUN), or evaluate on files with --data FOLDER",
        )
    if is_packed(Path(path)):
        if test_split:
            raise VitralError(f"{path} is packed, so its splits are fixed", "Use --test-split with the original images")
        if exclude:
            raise VitralError(f"--exclude names files, but {path} is packed", "Pack the folder again without them")
        if fold:
            raise VitralError(f"{path} is packed, so its splits are fixed", "Use --folds with the original images")
        return read_packed(Path(path), preprocessing)
    return read_listing(
        list_images(path, validation, progress, test_split, exclude, label_options, fold),
        preprocessing,
        read_options or ReadOptions(),
        progress=progress,
    )


def list_images(
    path: Path | str,
    validation: float,
    progress: bool = False,
    test_split: float = 0.0,
    exclude: Sequence[str] = (),
    label_options: LabelOptions = DETECT_LABELS,
    fold: Fold | None = None,
) -> DatasetListing:
    """List the images of class folders, a CSV file or shards, without those in `exclude` (exclude.py)."""
    if not is_shard_pattern(str(path)):
        return list_folder(Path(path), validation, progress, test_split, exclude, label_options, fold)
    if exclude:
        raise VitralError(f"--exclude names files, but {path} are shards", "Write the shards without these images")
    check_single_label(str(path), label_options)
    return list_shards(str(path), validation, progress, test_split, fold)


def storage_preprocessing(preprocessing: Preprocessing) -> Preprocessing:
    """Preprocessing of stored training images: the size before the crop, so that crops can be drawn."""
    if preprocessing.resize != "crop":
        return _without_normalisation(preprocessing)
    height, width = (int(side / preprocessing.crop) for side in preprocessing.image_size)
    return replace(_without_normalisation(preprocessing), image_size=(height, width), crop=1.0)


def _without_normalisation(preprocessing: Preprocessing) -> Preprocessing:
    """The same size and crop with placeholders for mean and std, which do not affect stored pixels."""
    half = (0.5,) * preprocessing.channels
    return replace(preprocessing, mean=half, std=half)


def pack_location(listing: DatasetListing, stored: Preprocessing) -> tuple[Path, PackIndex]:
    """Folder of the packed dataset in the cache, and its index. Changed files lead to another folder."""
    locations = listing.locations
    labels = {split: [label for _, label in items] for split, items in listing.splits.items()}
    parameters = [stored.image_size, stored.channels, stored.interpolation, listing.classes, labels, listing.state]
    parameters += [listing.task] * (listing.task != "classification")
    if not stored.pixel_format.is_photo:
        parameters.append(stored.pixel_format)
    if stored.resize != "crop":
        parameters += [stored.resize, stored.patch_size]
    digest = fingerprint(locations, *parameters)
    index = PackIndex(
        classes=listing.classes,
        stored=stored,
        fingerprint=digest,
        source=str(Path(listing.name).absolute()),
        splits=tuple(split for split, items in listing.splits.items() if items),
        task=listing.task,
    )
    stem = re.sub(r"[^\w.-]+", "-", Path(listing.name).name).strip("-.") or "dataset"
    return cache_dir() / "packed" / f"{stem[:60]}-{digest}-v{FORMAT}", index


def read_listing(
    listing: DatasetListing,
    preprocessing: Preprocessing,
    read_options: ReadOptions,
    *,
    pack_folder: Path | None = None,
    fingerprints: bool = False,
    progress: bool = False,
) -> Dataset:
    """Load a listed dataset: packed in the cache or in `pack_folder`, or streamed. Test images are decoded lazily.

    With `fingerprints`, those of the files are computed while they are packed, and cached (fingerprints.py).
    """
    stored = storage_preprocessing(preprocessing)
    folder, index = pack_location(listing, stored)
    reader = _SplitReader(
        listing=listing,
        stored=stored,
        model_input=_without_normalisation(preprocessing),
        folder=pack_folder or folder,
        index=index,
        must_pack=pack_folder is not None,
        fingerprints=fingerprints and not any(is_url(location.path) for location in listing.locations),
        options=read_options,
        progress=progress,
    )
    train, validation = reader.read("train"), reader.read("validation")
    reader.write_index()
    return Dataset(
        name=listing.name,
        classes=listing.classes,
        train=train,
        validation=validation,
        source="; ".join([listing.source, *reader.notes]),
        fingerprint=index.fingerprint,
        load_test=lambda: reader.read("test"),
        notes=listing.notes,
        test_locations=[location for location, _ in listing.splits["test"]],
        held_out=listing.held_out,
        task=listing.task,
    )


@dataclass(kw_only=True)
class _SplitReader:
    """Reads the splits of a listing, packed or streamed, and collects notes for display."""

    listing: DatasetListing
    stored: Preprocessing  # of training images
    model_input: Preprocessing  # of validation and test images
    folder: Path
    index: PackIndex
    must_pack: bool
    fingerprints: bool
    options: ReadOptions
    progress: bool
    notes: list[str] = field(default_factory=list)

    def read(self, split: str) -> Split:
        if not self.listing.splits[split]:
            return _empty_split(self._preprocessing(split), self.listing.task, len(self.listing.classes))
        if not self._should_pack(split):
            return self._streamed(split, self._not_packed_note())
        return self._deferred() if self._should_defer(split) else self._packed(split)

    def write_index(self) -> None:
        """Complete the pack if its training images are packed, and delete those of earlier states of the files."""
        if (self.folder / "train.json").is_file() and not _has_index(self.folder, self.index):
            write_index(self.folder, self.index)
            if not self.must_pack:
                remove_stale_packs(self.folder, self.index)

    def _preprocessing(self, split: str) -> Preprocessing:
        return self.stored if split == "train" else self.model_input

    def _should_pack(self, split: str) -> bool:
        if self.must_pack or (self.options.pack > 0 and (self.folder / f"{split}.json").is_file()):
            return True
        # Validation images are read after every epoch, so they are packed even if the whole dataset does not fit.
        size = self._num_bytes() if split == "train" else 4 * self._num_bytes(split)
        return size <= self._budget_bytes()

    def _num_bytes(self, *splits: str) -> int:
        """Bytes of the decoded images of `splits`; of all if none are given."""
        return self.stored.num_bytes * sum(len(self.listing.splits[split]) for split in splits or self.listing.splits)

    def _budget_bytes(self) -> float:
        return min(self.options.pack * GIB, _free_bytes(self.folder)) if is_writable(self.folder) else 0.0

    def _should_defer(self, split: str) -> bool:
        """Whether a split is packed while it is read. Other processes of a distributed run wait for a whole pack."""
        has_one_size = not self.stored.has_variable_sizes and self.listing.task == "classification"
        return (
            split == "train"
            and has_one_size  # otherwise a replaced image changes sizes or labels, which must be known at the start
            and not self.must_pack
            and self._num_bytes(split) >= MIN_BYTES_TO_DEFER
            and os.environ.get("WORLD_SIZE", "1") == "1"
        )

    def _job(self, split: str) -> PackJob:
        return PackJob(
            folder=self.folder,
            split=split,
            locations=self._locations(split),
            labels=self.listing.labels(split),
            stored=self._preprocessing(split),
            max_unreadable=self.options.unreadable,
            index=self.index,
            task=self.listing.task,
            workers=self.options.workers,
            fingerprints=self.fingerprints,
        )

    def _locations(self, split: str) -> tuple[ImageLocation, ...]:
        return tuple(location for location, _ in self.listing.splits[split])

    def _deferred(self) -> Split:
        """Training images that are packed during the first pass over them."""
        job = self._job("train")
        if job.read() is not None:
            return self._packed("train")
        images = packing_images(job, self.write_index)
        if images is None:
            return self._streamed("train", "another process is packing the images: decoded in every epoch")
        self.notes.append("packed during the first epoch")
        return Split(images=images, labels=torch.from_numpy(job.labels), is_model_input=False, locations=job.locations)

    def _not_packed_note(self) -> str:
        if self.options.pack > 0 and not is_writable(self.folder):
            return f"the cache {cache_dir()} is not writable: decoded in every epoch"
        return (
            f"decoded images need {self._num_bytes() / GIB:.3g} GiB, more than the "
            f"{self._budget_bytes() / GIB:.3g} GiB available for packing: decoded in every epoch"
        )

    def _streamed(self, split: str, note: str) -> Split:
        locations, labels = self._locations(split), self.listing.labels(split)
        images = StreamedImages(
            locations,
            labels,
            self._preprocessing(split),
            max_unreadable=self.options.unreadable,
            split=split,
            workers=self.options.workers,
        )
        if split == "train":
            self.notes.append(f"{note} by {images.workers} workers with a {images.buffer_bytes / 2**20:.0f} MiB buffer")
        stored: Images = images
        if images.sizes is not None:
            stored = VariableSizeImages(images, torch.tensor(images.sizes))
        return Split(
            images=stored,
            labels=torch.from_numpy(labels),
            is_model_input=self._is_model_input(split),
            locations=locations,
        )

    def _packed(self, split: str) -> Split:
        job = self._job(split)
        packed = pack_split(job, progress=self.progress)
        if packed.unreadable:
            self.notes.append(_unreadable_note(split, packed, has_classes=bool(self.listing.classes)))
        is_model_input = self._is_model_input(split)
        return Split(images=packed.images, labels=packed.labels, is_model_input=is_model_input, locations=job.locations)

    def _is_model_input(self, split: str) -> bool:
        """Training images are cropped later; padded ones are stored without the padding, whose colour is the mean."""
        return split != "train" and self.model_input.resize != "pad"


def _has_index(folder: Path, index: PackIndex) -> bool:
    """Whether the index of a pack is there and undamaged."""
    try:
        return is_packed(folder) and read_index(folder) == index
    except VitralError:
        return False


def _unreadable_note(split: str, packed: PackedSplit, *, has_classes: bool) -> str:
    count = len(packed.unreadable)
    replaced = "replaced by others of their class" if has_classes else "replaced by others"
    action = replaced if split == "train" else "dropped"
    return f"{count_text(count, f'unreadable {split} image')} {action}: {packed.unreadable[0]}"


def read_packed(folder: Path, preprocessing: Preprocessing) -> Dataset:
    """Load a packed folder, for example one copied from another machine, without the original files.

    Images that were packed for another model are resized again. Raises VitralError if they are smaller than the model
    input.
    """
    index, target = read_index(folder), storage_preprocessing(preprocessing)
    _check_packed_size(folder, index, preprocessing)
    if index.stored != target and (index.stored.resize, target.resize) != ("crop", "crop"):
        raise VitralError(
            f"{folder} was packed for --resize {index.stored.resize} at {_size_text(index.stored.image_size)} pixels, "
            f"the model needs --resize {target.resize} at {_size_text(target.image_size)}",
            f"Pack them for this model: vitral data pack {shell_quote(index.source)} --out FOLDER --resize "
            f"{target.resize} --image-size {target.image_size[0]} {target.image_size[1]}",
        )
    packed_for: list[str] = []  # sizes of other models, for which validation or test images were packed

    def load(split: str) -> Split:
        wanted = target if split == "train" else _without_normalisation(preprocessing)
        if split not in index.splits:
            return _empty_split(wanted, index.task, len(index.classes))
        packed = read_split(folder, split)
        if packed is None:
            raise DamagedPackError(folder / f"{split}.json", "missing")
        images: Images = packed.images
        if packed.preprocessing != wanted:  # stored images are cropped already
            resize = replace(wanted, crop=1.0)
            images = MappedImages(images, lambda batch: to_model_input(batch, resize), resize.shape)
            if split != "train":
                packed_for.append(_size_text(packed.preprocessing.image_size))
        is_model_input = split != "train" and preprocessing.resize != "pad"  # padded later, with the mean colour
        return Split(images=images, labels=packed.labels, is_model_input=is_model_input)

    train, validation = load("train"), load("validation")
    note = (
        "validation and test images were packed for a model of {} pixels and are resized, so accuracies may differ "
        "slightly from those on the original files"
    )
    resized = "" if index.stored == target else f", resized to {_size_text(target.image_size)}"
    return Dataset(
        name=str(folder),
        classes=index.classes,
        train=train,
        validation=validation,
        source=f"packed at {_size_text(index.stored.image_size)} from {index.source}{resized}",
        fingerprint=index.fingerprint,
        load_test=lambda: load("test"),
        notes=tuple(note.format(size) for size in packed_for),
        task=index.task,
    )


def _size_text(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _check_packed_size(folder: Path, index: PackIndex, preprocessing: Preprocessing) -> None:
    """Refuse packed images that are smaller than the model input: the detail that the model needs is missing."""
    stored, needed = index.stored.image_size, preprocessing.image_size
    if stored[0] < needed[0] or stored[1] < needed[1]:
        raise VitralError(
            f"{folder} holds images of {_size_text(stored)} pixels, too small for a model of {_size_text(needed)}",
            f"Pack them for this model: vitral data pack {shell_quote(index.source)} --out FOLDER "
            f"--image-size {needed[0]} {needed[1]}, or with the --init-from of the training",
        )


def _empty_split(stored: Preprocessing, task: TaskName, num_outputs: int) -> Split:
    images = torch.zeros(0, *stored.shape, dtype=stored.torch_dtype)
    return Split(images=images, labels=torch.from_numpy(labels_array([], task, num_outputs)), is_model_input=True)


def _free_bytes(folder: Path) -> float:
    """90% of the free disk space at `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free * 0.9
