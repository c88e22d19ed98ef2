"""`vitral.data.load`: any dataset by name or path, as a `Dataset`."""

from __future__ import annotations

from pathlib import Path

from vitral.data.datasets import Dataset, load_builtin_dataset
from vitral.data.files.file_dataset import load_file_dataset
from vitral.data.files.packed import is_packed, read_index, read_split
from vitral.data.files.walk import IMAGE_SUFFIXES
from vitral.data.names import SEQUENCE_PREFIX, check_dataset_exists, is_file_dataset
from vitral.data.preprocess import Preprocessing
from vitral.data.sequence import check_data_argument, is_sequence
from vitral.errors import VitralError

DEFAULT_IMAGE_SIZE = 224
RUN_FILES = ("recipe.toml", "config.json", "model/config.json")  # in a run or model folder


def load(
    name: str | Path,
    *,
    validation: float | None = None,
    image_size: int | tuple[int, int] | None = None,
    progress: bool = False,
) -> Dataset:
    """Load a built-in dataset, a folder with one subfolder per class, a CSV list, shards or a packed folder.

    Args:
        name: Built-in dataset ("mnist", downloaded if necessary), path, or shard pattern.
        validation: Fraction of the training images to hold out, if there is no validation split. Default: 0.1 of a
            built-in dataset, 0.15 of files.
        image_size: Height and width, or one number for both, to which image files are resized and cropped, in RGB.
            Default: 224, or the size of a packed folder. Built-in datasets keep their size.
        progress: Show a progress bar.
    """
    _check_argument(name)
    path, size = str(name), (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is not None and min(size) < 1:
        raise VitralError(f"image_size must be at least 1, got {image_size}", f"The default is {DEFAULT_IMAGE_SIZE}")
    if validation is not None and not 0 <= validation < 1:
        raise VitralError(
            f"validation is {validation}, expected a fraction of the training images from 0 to below 1",
            "For example 0.1",
        )
    if is_file_dataset(path):
        preprocessing = _preprocessing(Path(path), size)
        fraction = 0.15 if validation is None else validation
        return load_file_dataset(path, preprocessing, validation=fraction, progress=progress)
    if size is not None:
        raise VitralError(
            f"image_size applies to image files, and {name} is a built-in dataset",
            "Resize its images with Split.to_model_input(preprocessing)",
        )
    return load_builtin_dataset(path, validation=0.1 if validation is None else validation, progress=progress)


def _preprocessing(path: Path, size: tuple[int, int] | None) -> Preprocessing:
    """Size and crop of the images: as requested, as they were packed, or the default."""
    if size is None and is_packed(path):
        index = read_index(path)
        held_out = next((name for name in ("validation", "test") if name in index.splits), None)
        packed = read_split(path, held_out) if held_out is not None else None
        return index.stored if packed is None else packed.preprocessing
    half = (0.5,) * 3  # images are not normalised
    size = size or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
    return Preprocessing(image_size=size, channels=3, mean=half, std=half)


def _check_argument(name: object) -> None:
    """Raise VitralError, with the right call, for anything but a dataset's name or path."""
    check_data_argument(name)
    if is_sequence(name):
        raise VitralError(
            f"{type(name).__name__} is a sequence of images already", "Train on it directly: vitral.train(data)"
        )
    if not isinstance(name, str | Path):
        raise VitralError("no dataset given", 'Pass a name or a path: vitral.data.load("mnist")')
    path = Path(name)
    if any((path / file).is_file() for file in RUN_FILES) and not is_packed(path):
        raise VitralError(f"{name} is a trained model, not a dataset", f'Load it with vitral.load("{name}")')
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        raise VitralError(
            f"{name} is an image, not a dataset", f'Predict its label: vitral.load(MODEL).predict("{name}")'
        )
    if not str(name).startswith(SEQUENCE_PREFIX):
        check_dataset_exists(str(name))
