"""Evaluation data: a split of the training dataset of a model, or of another dataset or folder."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from vitral.data.classes import to_model_labels
from vitral.data.datasets import Dataset, Split, load_builtin_dataset
from vitral.data.files.file_dataset import list_images, load_file_dataset
from vitral.data.files.folders import check_single_label
from vitral.data.files.listing import DatasetListing
from vitral.data.files.location import ImageLocation
from vitral.data.files.packed import is_packed
from vitral.data.files.unreadable import check_unreadable_fraction
from vitral.data.folds import ALL_FOLDS
from vitral.data.lazy_images import Images, LazyImages
from vitral.data.names import SEQUENCE_PREFIX, is_file_dataset, is_shard_pattern
from vitral.data.preprocess import Preprocessing
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.data.resize_crop import write_row
from vitral.data.targets import LabelOptions
from vitral.data.variable_images import VariableSizeImages, concat_images
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError, error_reason, nearest_name, truncate_list
from vitral.inference.engine import EngineName
from vitral.inference.predictor import Predictor
from vitral.recipes.schema import Recipe, read_recipe
from vitral.utils.atomic import reserve_disk_space
from vitral.utils.text import count_text
from vitral.weights.io import FORMATS

SplitName = Literal["test", "validation", "train"]
DEFAULT_FILE_VALIDATION = 0.15  # share of a folder without splits that is held out, as in training
MAX_UNREADABLE = 0.01  # share of unreadable files above which an evaluation would be misleading
MAX_BYTES_IN_MEMORY = 2 * 2**30  # larger splits are decoded into a temporary file


class FileImages(LazyImages):
    """Images of a folder, list or shards, decoded by the predictor exactly as for a prediction."""

    def __init__(
        self, locations: Sequence[ImageLocation], predictor: Predictor, max_unreadable: float = MAX_UNREADABLE
    ) -> None:
        self.locations, self.predictor, self.max_unreadable = locations, predictor, max_unreadable
        preprocessing = predictor.model_config.preprocessing
        self.shape, self.dtype = (len(locations), *preprocessing.shape), preprocessing.torch_dtype

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        for indices in chosen:
            images, errors = self.decode(indices)
            if errors:
                raise VitralError(next(iter(errors.values())), "Remove or replace the file")
            yield cast(Tensor, images)

    def decode(self, indices: Tensor) -> tuple[Images, dict[int, str]]:
        """The readable images (N, C, H, W) at these indices, and error messages by position of the others."""
        count = len(indices)
        images = _buffer((count, *self.shape[1:]), self.predictor.model_config.preprocessing)
        sizes = torch.tensor(self.shape[2:]).repeat(count, 1)
        errors: dict[int, str] = {}

        def decode_one(position: int, location: ImageLocation) -> None:
            try:
                source = location.read()
            except (OSError, VitralError) as error:
                errors[position] = str(error)
                return
            _, pixels = self.predictor.decode_image(source)
            if isinstance(pixels, str):
                errors[position] = pixels if isinstance(source, Path) else f"{location}: {pixels}"
            else:
                write_row(images[position].numpy(), pixels.numpy())
                sizes[position] = torch.tensor(pixels.shape[1:])

        with ThreadPoolExecutor(max(2, available_cpus()), thread_name_prefix="decode") as pool:
            for _ in pool.map(decode_one, range(count), (self.locations[index] for index in indices.tolist())):
                pass
        readable = [position for position in range(count) if position not in errors]
        if errors:  # in place: the images may be too large for memory
            for row, position in enumerate(readable):
                images[row], sizes[row] = images[position], sizes[position]
            images, sizes = images[: len(readable)], sizes[: len(readable)]
        is_native = self.predictor.model_config.preprocessing.resize == "native"
        return VariableSizeImages(images, sizes) if is_native else images, errors


def _buffer(shape: tuple[int, ...], preprocessing: Preprocessing) -> Tensor:
    num_bytes = math.prod(shape) * preprocessing.torch_dtype.itemsize
    if num_bytes <= MAX_BYTES_IN_MEMORY:
        return torch.zeros(shape, dtype=preprocessing.torch_dtype)
    try:
        with tempfile.TemporaryFile() as file:  # the mapping keeps the unlinked file alive
            reserve_disk_space(file, num_bytes)
            return torch.from_numpy(np.memmap(file, dtype=preprocessing.dtype, mode="w+", shape=shape))
    except OSError as error:
        size = f"{num_bytes / 2**30:.1f} GiB"
        raise VitralError(
            f"the decoded images need {size} in {tempfile.gettempdir()}: {error_reason(error)}",
            f"Set TMPDIR to a folder with {size} of free disk space",
        ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class EvalTarget:
    """A model and the images to evaluate it on, at the model's input size and with the model's class indices."""

    predictor: Predictor
    recipe: Recipe | None  # None for a model folder without its run, or a checkpoint of another library
    dataset: Dataset
    split_name: str
    split: Split  # its locations are those of the readable files
    source_splits: tuple[Split, ...] = ()  # all images before resizing, in the same order
    notes: tuple[str, ...] = ()  # files that were skipped or could not be read

    @property
    def noun(self) -> str:
        """`test images`, or `images` if the dataset has no such split and all of its images are used."""
        is_split = self.source_splits and self.source_splits[0] is getattr(self.dataset, self.split_name)
        return f"{self.split_name} images" if is_split else "images"

    @cached_property
    def validation_split(self) -> Split:
        """Validation images of the training dataset; may be empty. Thresholds are chosen on them."""
        name = training_dataset_name(self.predictor, "Thresholds are chosen on its validation images")
        if self.dataset.name == name and self.source_splits and self.source_splits[0] is self.dataset.validation:
            return self.split
        dataset = self.dataset if self.dataset.name == name else load_dataset_for(name, self.predictor, self.recipe)
        return load_split(dataset.validation, self.predictor, classes=dataset.classes)

    @cached_property
    def validation_logits(self) -> Tensor:
        """Logits (N, K) of the validation images."""
        if not len(self.validation_split):
            return torch.empty(0, len(self.predictor.classes))
        return self.predictor.logits(self.validation_split.images)

    def require_validation_images(self, flag: str) -> None:
        """Raise VitralError if there are no images to choose what `flag` requests on."""
        if not len(self.validation_split):
            raise VitralError(
                f"{flag} needs validation images, and {training_dataset_name(self.predictor)} has none",
                "Hold some out: vitral train DATA --data.validation 0.1",
            )

    def known_logits(self, images: Images) -> Tensor | None:
        """The logits of the validation images if these are the images, and their logits have been computed."""
        is_computed = "validation_logits" in vars(self) and images is self.validation_split.images
        return self.validation_logits if is_computed else None


def load_eval_target(
    model: str | Path | Predictor,
    data: str | None = None,
    split: SplitName | None = None,
    *,
    engine: EngineName = "auto",
    dataset: Dataset | None = None,
    max_files: int | None = None,
) -> EvalTarget:
    """Load a model and a split of its training dataset, or of another dataset or folder with the same classes.

    `split` defaults to the test images, or the validation images if there are none. If another folder has no such
    split, all of its images are used. `dataset` is the training dataset, if it is already loaded; images of files are
    decoded again, because training may decode them at a reduced size. With `max_files`, about this many files are
    decoded, chosen at random, instead of all.
    """
    predictor = model if isinstance(model, Predictor) else Predictor.load(model, engine=engine)
    predictor.require_head()
    recipe = run_recipe(predictor)
    if dataset is None or (is_file_dataset(dataset.name) and not dataset.name.startswith(SEQUENCE_PREFIX)):
        if not data and dataset is None:
            check_training_data_exists(predictor)
        name = data or (dataset.name if dataset is not None else training_dataset_name(predictor))
        is_own_data = name.rstrip("/") == predictor.model_config.trained_on.rstrip("/")
        dataset = load_dataset_for(name, predictor, recipe, hold_out=is_own_data or split not in (None, "test"))
    check_classes(dataset, predictor)
    hint = "Omit --split, or name another folder with --data"
    if split is None:
        hint = "Name images that were not used for training with --data"
        if recipe is not None and recipe.data.parsed_fold == ALL_FOLDS:
            hint = f"The report of the cross-validation estimates its accuracy. {hint}"
        split = "test" if data or len(dataset.test) else "validation"
    labelled: Split = getattr(dataset, split)
    if not len(labelled) and not data:
        raise VitralError(f"{dataset.name} has no {split} images", hint)
    parts = [part for part in ((labelled,) if len(labelled) else (dataset.train, dataset.validation)) if len(part)]
    notes = list(dataset.notes)
    loaded = [
        load_split(part, predictor, classes=dataset.classes, indices=indices, notes=notes)
        for part, indices in zip(parts, sample_files(parts, max_files), strict=True)
    ]
    images = loaded[0].images if len(loaded) == 1 else concat_images([part.images for part in loaded])
    labels = torch.cat([part.labels for part in loaded])
    files = [part.locations for part in loaded if part.locations is not None]
    locations = [location for part in files for location in part] if len(files) == len(loaded) else None
    return EvalTarget(
        predictor=predictor,
        recipe=recipe,
        dataset=dataset,
        split_name=split,
        split=Split(images=images, labels=labels, is_model_input=True, locations=locations),
        source_splits=tuple(parts),
        notes=tuple(notes),
    )


def sample_files(parts: Sequence[Split], max_files: int | None) -> list[Tensor | None]:
    """Random indices of the same fraction of each part, at most `max_files` or one more per part; None for all."""
    fraction = math.inf if max_files is None else max_files / max(sum(map(len, parts)), 1)
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randperm(len(part), generator=rng)[: math.ceil(fraction * len(part))].sort().values
        if fraction < 1 and isinstance(part.images, FileImages)
        else None
        for part in parts
    ]


def load_split(
    split: Split,
    predictor: Predictor,
    *,
    classes: tuple[str, ...] | None = None,
    indices: Tensor | None = None,
    notes: list[str] | None = None,
) -> Split:
    """A split, or the images of it at `indices`, at the model's input size. Unreadable files are left out.

    `classes` are the class names of the labels, which are converted to the model's class indices. A sentence about
    unreadable files is added to `notes`.
    """
    labels = split.labels if indices is None else split.labels[indices]
    if classes is not None:
        labels = to_model_labels(labels, classes, predictor.classes)
    if isinstance(split.images, FileImages):
        images, errors = split.images.decode(torch.arange(len(split)) if indices is None else indices)
        # Too many in a sample are too many if all other files can be read.
        count = len(split) if len(images) else len(errors)
        check_unreadable_fraction(errors.values(), count, split.images.max_unreadable)
        if errors and notes is not None:
            notes.append(unreadable_note([errors[position] for position in sorted(errors)]))
        rows = range(len(split)) if indices is None else indices.tolist()
        readable = [position for position in range(len(rows)) if position not in errors]
        locations = [split.images.locations[rows[position]] for position in readable]
        return Split(images=images, labels=labels[readable], is_model_input=True, locations=locations)
    selected = split.images if indices is None else split.images[indices]
    kept = split if indices is None else replace(split, locations=None, fingerprints=None)
    return replace(kept, images=selected, labels=labels).to_model_input(predictor.model_config.preprocessing)


def unreadable_note(errors: Sequence[str]) -> str:
    """`left out 2 unreadable files: a.jpg: not an image, b.jpg: truncated`"""
    return f"left out {count_text(len(errors), 'unreadable file')}: {truncate_list(errors, 3)}"


def check_classes(dataset: Dataset, predictor: Predictor) -> None:
    unknown = [name for name in dataset.classes if name not in predictor.classes]
    if not unknown:
        return
    suggestions = [
        f"{name} → {match}" for name in unknown if (match := nearest_name(name, predictor.classes)) is not None
    ]
    raise VitralError(
        f"{dataset.name} has classes that the model does not have: {truncate_list(unknown)}",
        (f"Did you mean {truncate_list(suggestions)}? " if suggestions else "")
        + f"The model has {truncate_list(predictor.classes)}; to name its classes: --labels FILE",
    )


def load_dataset_for(name: str, predictor: Predictor, recipe: Recipe | None, *, hold_out: bool = True) -> Dataset:
    """A built-in dataset, or the user's files, with the same validation split as in the training run.

    Without `hold_out`, files without a validation split get none, and are not searched for near-duplicates.
    """
    preprocessing, label_options = predictor.model_config.preprocessing, model_label_options(predictor, recipe)
    if not is_file_dataset(name):
        check_single_label(name, label_options)
        if recipe is None:
            return load_builtin_dataset(name)
        fold = recipe.data.parsed_fold if name == recipe.data.name else None
        return load_builtin_dataset(name, validation=recipe.data.validation, fold=fold)
    if name.startswith(SEQUENCE_PREFIX) or is_packed(Path(name)):
        return load_file_dataset(name, preprocessing)
    if recipe is None:
        listing = list_images(name, DEFAULT_FILE_VALIDATION if hold_out else 0.0, label_options=label_options)
        return dataset_from_listing(listing, predictor, MAX_UNREADABLE)
    is_own_data = name.rstrip("/") == recipe.data.name.rstrip("/")  # a folder may be written with a slash
    listing = list_images(
        name,
        recipe.data.validation if hold_out else 0.0,
        test_split=recipe.data.test_split if is_own_data else 0.0,
        exclude=recipe.data.exclude if is_own_data else (),
        label_options=label_options,
        fold=recipe.data.parsed_fold if is_own_data else None,
    )
    return dataset_from_listing(listing, predictor, recipe.data.read_options.unreadable)


def model_label_options(predictor: Predictor, recipe: Recipe | None) -> LabelOptions:
    """How the labels of a list are read for a model: as those of its task."""
    config = predictor.model_config
    targets = config.classes if config.task == "regression" and config.classes != ("target",) else ()
    if recipe is not None and recipe.data.targets:
        targets = recipe.data.targets
    return LabelOptions(
        task=config.task, targets=targets, separator="" if recipe is None else recipe.data.label_separator
    )


def dataset_from_listing(listing: DatasetListing, predictor: Predictor, max_unreadable: float) -> Dataset:
    """A dataset whose images are decoded by the predictor when they are read."""

    def split(name: str) -> Split:
        labels = torch.from_numpy(listing.labels(name))
        images = FileImages([location for location, _ in listing.splits[name]], predictor, max_unreadable)
        return Split(images=images, labels=labels, is_model_input=True, locations=images.locations)

    return Dataset(
        name=listing.name,
        classes=listing.classes,
        train=split("train"),
        validation=split("validation"),
        source=listing.source,
        fingerprint="",
        load_test=lambda: split("test"),
        notes=listing.notes,
        held_out=listing.held_out,
        task=listing.task,
    )


def run_recipe(predictor: Predictor) -> Recipe | None:
    """Recipe of the run that the model is from; None for a model folder or a checkpoint of another library."""
    file = predictor.path / "recipe.toml" if predictor.path is not None else None
    return read_recipe(file) if file is not None and file.is_file() else None


def training_dataset_name(predictor: Predictor, hint: str = "Name a dataset or folder with --data") -> str:
    """Name of the dataset or folder that the model was trained on. Unknown for checkpoints of other libraries."""
    name = predictor.model_config.trained_on
    if not name or name.partition(": ")[0] in (*FORMATS, "custom"):
        model = f"{predictor.path}, a checkpoint of another library," if predictor.path else "the model"
        raise VitralError(f"{model} does not record its training dataset", hint)
    return name


def check_training_data_exists(predictor: Predictor) -> None:
    """A run refers to its images by the path they had during training, which may be relative or gone."""
    name = training_dataset_name(predictor)
    is_remote = name in BUILTIN_DATASETS or name.startswith(SEQUENCE_PREFIX) or is_shard_pattern(name)
    if not is_remote and not Path(name).exists():
        raise VitralError(
            f"{predictor.path or 'the model'} was trained on {name}, which does not exist here",
            "Name the images with --data, or run vitral in the folder where the training was started",
        )


def evenly_spaced_indices(count: int, max_count: int) -> Tensor:
    """At most `max_count` indices, evenly spaced over `count` items."""
    return torch.arange(min(count, max_count)) * count // max(min(count, max_count), 1)
