"""`vitral.data.load`: any dataset by name or path, as a `Dataset`."""

from __future__ import annotations

from pathlib import Path

from vitral.data.datasets import Dataset, check_validation, load_builtin_dataset
from vitral.data.files.file_dataset import ReadOptions, list_images, load_file_dataset, read_listing
from vitral.data.files.packed import is_packed, read_index, read_split
from vitral.data.files.pixel_detection import detect_listing_pixels
from vitral.data.files.walk import IMAGE_SUFFIXES
from vitral.data.names import SEQUENCE_PREFIX, check_dataset_exists, is_file_dataset, is_model_dir
from vitral.data.pixels import PixelFormat
from vitral.data.preprocess import Preprocessing
from vitral.data.sequence import check_data_argument, is_sequence
from vitral.errors import VitralError

DEFAULT_IMAGE_SIZE = 224


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
        image_size: Height and width, or one number for both, to which image files are resized and cropped: in RGB, or
            with the channels and type of the files if they are not photographs. Default: 224, or the size of a packed
            folder. Built-in datasets keep their size.
        progress: Show a progress bar.

    Examples:
        >>> dataset = vitral.data.load("photos/")
        >>> dataset.classes, len(dataset.train), len(dataset.validation)
    """
    _check_argument(name)
    path, size = str(name), (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is not None and min(size) < 1:
        raise VitralError(f"image_size must be at least 1, got {image_size}", f"The default is {DEFAULT_IMAGE_SIZE}")
    if validation is not None:
        check_validation(validation)
    if is_file_dataset(path):
        fraction = 0.15 if validation is None else validation
        if is_packed(Path(path)):
            return load_file_dataset(path, _packed_preprocessing(Path(path), size), validation=fraction)
        listing = list_images(path, fraction, progress)
        pixel_format = detect_listing_pixels(listing).format
        return read_listing(listing, _preprocessing(size, pixel_format), ReadOptions(), progress=progress)
    if size is not None:
        raise VitralError(
            f"image_size applies to image files, and {name} is a built-in dataset",
            "Resize its images with Split.to_model_input(preprocessing)",
        )
    return load_builtin_dataset(path, validation=0.1 if validation is None else validation, progress=progress)


def _packed_preprocessing(folder: Path, size: tuple[int, int] | None) -> Preprocessing:
    """Size and crop of packed images: as requested, or as they were packed."""
    index = read_index(folder)
    if size is not None:
        return _preprocessing(size, index.stored.pixel_format)
    held_out = next((name for name in ("validation", "test") if name in index.splits), None)
    packed = read_split(folder, held_out) if held_out is not None else None
    return index.stored if packed is None else packed.preprocessing


def _preprocessing(size: tuple[int, int] | None, pixel_format: PixelFormat) -> Preprocessing:
    channels, dtype, layout, names = pixel_format
    half = (0.5,) * channels  # images are not normalised
    return Preprocessing(
        image_size=size or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE),
        channels=channels,
        mean=half,
        std=half,
        dtype=dtype,
        layout=layout,
        channel_names=names,
    )


def _check_argument(name: object) -> None:
    """Raise VitralError, with the right call, for anything but a dataset's name or path."""
    check_data_argument(name)
    if is_sequence(name):
        raise VitralError(
            f"{type(name).__name__} is a sequence of images already", "Train on it directly: vitral.train(data)"
        )
    if not isinstance(name, str | Path):
        raise VitralError("no dataset given", 'Pass a name or a path: vitral.data.load("mnist")')
    check_not_a_model(name)
    path = Path(name)
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        raise VitralError(
            f"{name} is an image, not a dataset", f'Predict its label: vitral.load(MODEL).predict("{name}")'
        )
    if not str(name).startswith(SEQUENCE_PREFIX):
        check_dataset_exists(str(name))


def check_not_a_model(name: str | Path) -> None:
    """Raise VitralError for a run folder or a model folder."""
    if is_model_dir(Path(name)):
        raise VitralError(f"{name} is a trained model, not a dataset", f'Load it with vitral.load("{name}")')
