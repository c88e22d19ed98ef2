"""Real images to calibrate int8 with, to benchmark on and to compare exported models on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.data.classes import class_indices
from vitral.data.datasets import Split
from vitral.data.decode import ImageDecodeError, decode_image
from vitral.data.files.walk import find_images, subfolders
from vitral.data.files.worker import read_location
from vitral.data.preprocess import to_model_input
from vitral.data.resize_crop import PIL_MODES
from vitral.errors import VitralError
from vitral.evaluation.data import (
    FileImages,
    evenly_spaced_indices,
    load_dataset_for,
    run_recipe,
    training_dataset_name,
)
from vitral.inference.predictor import READABLE_FORMATS, Predictor

MAX_ORIGINAL_SIDE = 1024  # larger photographs are downscaled, so that a few hundred of them fit into memory


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationImages:
    """uint8 images at the model's input size, with the model's class indices where the labels are known."""

    name: str
    images: Tensor  # (N, C, H, W)
    originals: Sequence[Tensor]  # (C, H, W) each, before resizing and cropping
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.images)

    def halves(self) -> tuple[CalibrationImages, CalibrationImages]:
        """Even and odd images: to calibrate on, and to compare on."""
        return self._every_second(0), self._every_second(1)

    def _every_second(self, start: int) -> CalibrationImages:
        return CalibrationImages(
            name=self.name,
            images=self.images[start::2],
            originals=self.originals[start::2],
            labels=None if self.labels is None else self.labels[start::2],
        )


def load_calibration_images(predictor: Predictor, data: str | None, count: int) -> CalibrationImages:
    """At most `count` evenly spaced images of `data`, or of the validation split of the training dataset.

    Without a validation split, training images are used without their labels: the accuracy on them means little.
    """
    if count < 2:
        raise VitralError(
            f"--images must be at least 2, got {count}", "Half of them calibrate, the others are compared"
        )
    name = data or training_dataset_name(predictor)
    folder = Path(name)
    if folder.is_dir() and not subfolders(folder):
        files = find_images([folder])
        selected = [files[index] for index in evenly_spaced_indices(len(files), count).tolist()]
        return _decode(predictor, name, selected, None)
    try:
        dataset = load_dataset_for(name, predictor, run_recipe(predictor))
    except VitralError as error:
        hint = error.hint if data else "Name a dataset or folder with --data"
        raise VitralError(f"no images to measure with: {error.what}", hint) from error
    has_validation = len(dataset.validation) > 0
    split = dataset.validation if has_validation else dataset.train
    indices = evenly_spaced_indices(len(split), count)
    labels = None
    if (has_validation or data is not None) and {*dataset.classes} <= {*predictor.classes}:
        labels = class_indices(dataset.classes, predictor.classes)[split.labels[indices]]
    if isinstance(split.images, FileImages):
        sources = [read_location(*split.images.locations[index]) for index in indices.tolist()]
        return _decode(predictor, dataset.name, sources, labels)
    return _from_tensor(predictor, dataset.name, split, indices, labels)


def _from_tensor(
    predictor: Predictor, name: str, split: Split, indices: Tensor, labels: Tensor | None
) -> CalibrationImages:
    stored = split.images[indices]
    images = to_model_input(stored, predictor.model_config.preprocessing)
    originals = stored.expand(-1, images.shape[1], -1, -1) if stored.shape[1] == 1 else stored
    return CalibrationImages(name=name, images=images, originals=originals.unbind(0), labels=labels)


def _decode(
    predictor: Predictor, name: str, sources: Sequence[Path | bytes], labels: Tensor | None
) -> CalibrationImages:
    """Decode files. Unreadable ones are left out."""
    preprocessing = predictor.model_config.preprocessing
    images, originals, positions = [], [], []
    for position, source in enumerate(sources):
        try:
            picture = decode_image(source).convert(PIL_MODES[preprocessing.channels])
        except ImageDecodeError:
            continue
        picture.thumbnail((MAX_ORIGINAL_SIDE, MAX_ORIGINAL_SIDE), Image.Resampling.BICUBIC)
        images.append(preprocessing.resize_and_crop(picture))
        array = np.array(picture).reshape(picture.height, picture.width, preprocessing.channels)
        originals.append(torch.from_numpy(array).permute(2, 0, 1))
        positions.append(position)
    if not images:
        raise VitralError(f"no readable images in {name}", READABLE_FORMATS)
    labels = None if labels is None else labels[torch.tensor(positions)]
    return CalibrationImages(name=name, images=torch.stack(images), originals=originals, labels=labels)
