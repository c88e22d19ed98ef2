"""Real images to compare implementations of a model on, and other images to calibrate int8 with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.classes import to_model_labels
from vitral.data.datasets import Dataset, Split
from vitral.data.decode import SUPPORTED_FORMATS
from vitral.data.files.packed import is_packed
from vitral.data.files.walk import SkippedFiles, find_images, subfolders
from vitral.data.preprocess import to_model_input
from vitral.errors import VitralError
from vitral.evaluation.data import (
    FileImages,
    evenly_spaced_indices,
    load_dataset_for,
    run_recipe,
    training_dataset_name,
    unreadable_note,
)
from vitral.inference.bench import CALIBRATION_STRIDE
from vitral.inference.predictor import ImageInput, Predictor

MIN_IMAGES = 100  # smaller validation splits are extended by other images of the dataset
MAX_VALIDATION_IMAGES = 1_000  # of the training dataset, if no other number is requested
MAX_IMAGES = 10_000  # of --data, if no other number is requested
MIN_CALIBRATION_IMAGES, MAX_CALIBRATION_IMAGES = 16, 256


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparisonImages:
    """Images at the model's input size, decoded as for a prediction."""

    images: Tensor  # (N, C, H, W) to compare on
    sources: Sequence[ImageInput]  # the same images before resizing and cropping
    labels: Tensor | None  # the model's class indices, where they are known
    calibration: Tensor  # (M, C, H, W), none of them in `images`
    notes: tuple[str, ...] = ()  # files that were skipped or could not be read

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sources:
    sources: Sequence[ImageInput]
    labels: Tensor | None = None
    notes: tuple[str, ...] = ()

    def select(self, indices: Tensor) -> _Sources:
        labels = None if self.labels is None else self.labels[indices]
        return replace(self, sources=[self.sources[index] for index in indices.tolist()], labels=labels)


def load_comparison_images(
    predictor: Predictor, data: str | None, count: int | None = None, *, calibrate: bool = True
) -> ComparisonImages:
    """Images of `data`, or of the validation split of the training dataset, and other images to calibrate on.

    Args:
        data: dataset or folder. All images are used: those of the test split, if it has one.
        count: maximum number of images, evenly spaced. Default: 10,000 images of `data`, 1,000 validation images.
        calibrate: also load calibration images: training images or, if those are not available, every fourth image.
    """
    if count is not None and count < 2:
        raise VitralError(f"--images must be at least 2, got {count}", "Omit it to compare on all images")
    if data is None:
        dataset = _load_dataset(training_dataset_name(predictor), predictor, "Name a dataset or folder with --data")
        splits, with_labels = _held_out_splits(dataset)
        compared = _dataset_sources(dataset, splits, predictor, count or MAX_VALIDATION_IMAGES, with_labels)
        train = None if any(split is dataset.train for split in splits) else dataset.train
    else:
        compared = _requested_sources(data, predictor, count or MAX_IMAGES)
        train = _training_split(predictor) if calibrate else None
    calibration = list[ImageInput]()
    if calibrate:
        calibration, compared = _hold_out_calibration(compared, train, predictor)
    name = data or predictor.model_config.trained_on
    images, positions, errors = _decode(predictor, compared.sources, name)
    compared = compared.select(positions)
    return ComparisonImages(
        images=images,
        sources=compared.sources,
        labels=compared.labels,
        calibration=_decode(predictor, calibration, name)[0] if calibrate else images[:0],
        notes=(*compared.notes, *([unreadable_note(errors)] if errors else [])),
    )


def _load_dataset(name: str, predictor: Predictor, hint: str | None = None, *, hold_out: bool = True) -> Dataset:
    try:
        return load_dataset_for(name, predictor, run_recipe(predictor), hold_out=hold_out)
    except VitralError as error:
        raise VitralError(f"no images to measure with: {error.what}", hint or error.hint) from error


def _training_split(predictor: Predictor) -> Split | None:
    """The training images, if they are known and available here."""
    try:
        return _load_dataset(training_dataset_name(predictor), predictor).train
    except VitralError:
        return None


def _hold_out_calibration(
    compared: _Sources, train: Split | None, predictor: Predictor
) -> tuple[list[ImageInput], _Sources]:
    """Training images that are not compared; if there are not enough of them, every fourth of the compared images."""
    files = {source.resolve() for source in compared.sources if isinstance(source, Path)}
    if train is not None:
        sources = _split_sources(train, evenly_spaced_indices(len(train), 4 * MAX_CALIBRATION_IMAGES), predictor)
        other = [source for source in sources if not (isinstance(source, Path) and source.resolve() in files)]
        if len(other) >= MIN_CALIBRATION_IMAGES:
            return [other[i] for i in evenly_spaced_indices(len(other), MAX_CALIBRATION_IMAGES).tolist()], compared
    positions = torch.arange(len(compared.sources))
    is_calibration = positions % CALIBRATION_STRIDE == 0
    calibration = compared.select(positions[is_calibration][:MAX_CALIBRATION_IMAGES])
    return list(calibration.sources), compared.select(positions[~is_calibration])


def _held_out_splits(dataset: Dataset) -> tuple[tuple[Split, ...], bool]:
    """Splits with at least MIN_IMAGES images together, the validation split first, and whether their labels are of use.

    The accuracy on training images means little, so their labels are not.
    """
    if len(dataset.validation) >= MIN_IMAGES:
        return (dataset.validation,), True
    if len(dataset.validation) + len(dataset.test) >= MIN_IMAGES:
        return (dataset.validation, dataset.test), True
    return (dataset.validation, dataset.test, dataset.train), False


def _requested_sources(data: str, predictor: Predictor, count: int) -> _Sources:
    folder = Path(data)
    if folder.is_dir() and not is_packed(folder) and not subfolders(folder):
        skipped = SkippedFiles()
        sources = find_images([folder], skipped.add)
        files = _Sources(sources=sources, notes=tuple(filter(None, [skipped.summary()])))
        return files.select(evenly_spaced_indices(len(files.sources), count))
    dataset = _load_dataset(data, predictor, hold_out=False)
    splits = (dataset.test,) if len(dataset.test) else (dataset.train, dataset.validation)
    return _dataset_sources(dataset, splits, predictor, count, True)


def _dataset_sources(
    dataset: Dataset, splits: Sequence[Split], predictor: Predictor, count: int, with_labels: bool
) -> _Sources:
    """At most `count` evenly spaced images of the splits."""
    sizes = [len(split) for split in splits]
    chosen = evenly_spaced_indices(sum(sizes), count)
    sources: list[ImageInput] = []
    start = 0
    for split, size in zip(splits, sizes, strict=True):
        sources += _split_sources(split, chosen[(chosen >= start) & (chosen < start + size)] - start, predictor)
        start += size
    if not with_labels or not {*dataset.classes} <= {*predictor.classes}:
        return _Sources(sources=sources, notes=dataset.notes)
    labels = torch.cat([split.labels for split in splits])[chosen]
    labels = to_model_labels(labels, dataset.classes, predictor.classes)
    return _Sources(sources=sources, labels=labels, notes=dataset.notes)


def _split_sources(split: Split, indices: Tensor, predictor: Predictor) -> list[ImageInput]:
    if not len(indices):
        return []
    if isinstance(split.images, FileImages):
        return [split.images.locations[index].read() for index in indices.tolist()]
    images = split.images[indices].unbind(0)
    # Packed validation images are cropped already: pad them, so that decoding returns exactly their pixels.
    pad = predictor.model_config.preprocessing.pad_for_roundtrip
    return [pad(image) for image in images] if split.is_model_input else list(images)


def _decode(predictor: Predictor, sources: Sequence[ImageInput], name: str) -> tuple[Tensor, Tensor, list[str]]:
    """Images (N, C, H, W), the positions (N,) of their sources, and error messages of those that are unreadable."""
    preprocessing = predictor.model_config.preprocessing
    stretched = replace(preprocessing, resize="stretch")  # native inputs differ in size
    images = torch.empty(len(sources), *preprocessing.shape, dtype=preprocessing.torch_dtype)
    positions: list[int] = []
    errors: list[str] = []
    decoded = chain.from_iterable(predictor.decode_batches(iter(sources)))
    for position, (_, pixels) in enumerate(decoded):
        if isinstance(pixels, Tensor):
            is_native = preprocessing.resize == "native"
            images[len(positions)] = to_model_input(pixels[None], stretched)[0] if is_native else pixels
            positions.append(position)
        else:
            errors.append(pixels)
    if not positions:
        raise VitralError(f"no readable images in {name}", SUPPORTED_FORMATS)
    return images[: len(positions)], torch.tensor(positions), errors
