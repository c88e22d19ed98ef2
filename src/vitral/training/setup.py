"""Everything the Trainer needs, from a recipe and a dataset name.

resolve_recipe    name, file or Recipe + data + checkpoint -> Recipe
setup_training    Recipe -> complete Recipe, dataset, preprocessing, initial weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral import weights
from vitral.data.datasets import BUILTIN_DATASETS, Dataset, Split, load_builtin_dataset
from vitral.data.files.exclude import read_exclude_list
from vitral.data.files.file_dataset import (
    list_images,
    load_file_dataset,
    pack_location,
    read_listing,
    storage_preprocessing,
)
from vitral.data.files.folders import check_single_label
from vitral.data.files.listing import DatasetListing
from vitral.data.files.packed import is_packed, read_index
from vitral.data.files.pixel_detection import detect_listing_pixels, packed_pixels
from vitral.data.loader import Loader, to_device_if_fits, training_images
from vitral.data.names import SEQUENCE_PREFIX, is_file_dataset
from vitral.data.preprocess import Preprocessing, channel_stats, to_model_channels
from vitral.data.registry.fetch import check_dataset_name
from vitral.data.sequence import ItemSequence, detect_sequence_pixels, load_sequence
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.models.variants import resolve_preset
from vitral.recipes.builtin import RECIPES, get_recipe
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.options import init_scheme_unsupported_reason
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import resume_command
from vitral.ssl.teacher import Teacher
from vitral.training.distillation.teachers import load_label_teacher
from vitral.training.head_init import fits_head
from vitral.training.loggers import check_loggers
from vitral.training.pixel_format import pretrained_spread, with_pixel_format
from vitral.weights.adapt import adapt_weights
from vitral.weights.adapter import BaseWeights

# Model fields that a checkpoint or preset does not replace.
REGULARISATION = ("dropout", "dropout_attention", "dropout_embedding", "patch_drop", "drop_path")


def resolve_recipe(
    data: str | None,
    recipe: Recipe | str | Path | None,
    init_from: str | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
) -> Recipe:
    """Find the recipe, point it at `data`, and give it the architecture of `preset` or of the checkpoint `init_from`.

    Without a recipe, the one named like the built-in dataset is used, or one for fine-tuning or training on folders.
    """
    if preset and init_from:
        raise VitralError("--preset and --init-from exclude each other", "A checkpoint determines the architecture")
    if isinstance(recipe, Recipe):
        resolved = recipe
    elif recipe is not None:
        resolved = read_recipe(Path(recipe)) if str(recipe).endswith(".toml") else get_recipe(str(recipe))
    elif data is None:
        raise VitralError(
            "no data to train on", f"Name a folder with class folders or a dataset: {', '.join(BUILTIN_DATASETS)}"
        )
    elif is_file_dataset(data) or init_from:
        resolved = get_recipe("folder-finetune" if init_from else "folder-scratch")
    else:
        check_dataset_name(data)
        resolved = get_recipe(data)
    if data not in (None, resolved.data.name):
        resolved = with_dataset(resolved, str(data))
    if preset:
        resolved = with_preset(resolved, preset)
    return with_checkpoint_architecture(resolved, init_from, options) if init_from else resolved


def check_learns_labels(recipe: Recipe, run: str | Path | None = None) -> None:
    """Refuse a recipe that learns without labels, or a run with such a recipe."""
    if recipe.pretrain is None:
        return
    has_teacher = recipe.pretrain.method == "distill"
    if run is not None:
        command = "distill" if has_teacher else "pretrain"
        raise VitralError(f"{run} is a run of vitral {command}", f"Resume it with: {resume_command(Path(run))}")
    usage = "distill IMAGES --teacher MODEL" if has_teacher else "pretrain IMAGES"
    raise VitralError(
        f"the recipe {recipe.name} learns without labels",
        f"Use it with vitral {usage}, or choose another --recipe (see vitral recipes)",
    )


def with_dataset(recipe: Recipe, data: str) -> Recipe:
    """Use a recipe for another dataset. A built-in one sets channels and, if it is divisible into patches, the size."""
    recipe = replace(
        recipe, data=replace(recipe.data, name=data, more=(), fold="", mean=None, std=None, exclude=(), dtype="auto")
    )
    if is_file_dataset(data):
        return recipe
    check_dataset_name(data)
    dataset_model = RECIPES[data]().model
    model = replace(recipe.model, channels=dataset_model.channels)
    if all(side % recipe.model.patch_size == 0 for side in dataset_model.image_size):
        model = replace(model, image_size=dataset_model.image_size)
    return replace(recipe, model=model)


def with_excluded_files(recipe: Recipe, file: str | Path | None) -> Recipe:
    """Record the files of a list in the recipe, so that repeated runs and evaluations leave them out too."""
    if file is None:
        return recipe
    if not is_file_dataset(recipe.data.name) or recipe.data.name.startswith(SEQUENCE_PREFIX):
        raise VitralError("--exclude needs a folder or CSV file of images", "Omit --exclude for other datasets")
    return replace(recipe, data=replace(recipe.data, exclude=read_exclude_list(Path(file), recipe.data.name)))


def with_preset(recipe: Recipe, name: str) -> Recipe:
    """Replace the architecture by a preset; channels, classes and regularisation stay the recipe's.

    The image size is rounded up to a multiple of the preset's patch size. Init schemes that the preset does not
    support are dropped.
    """
    from_recipe = {name: getattr(recipe.model, name) for name in ("channels", "num_classes", *REGULARISATION)}
    variant, model = resolve_preset(name, **from_recipe)
    height, width = (-(-side // model.patch_size) * model.patch_size for side in recipe.model.image_size)
    model = replace(model, image_size=(height, width))
    schemes = tuple(
        scheme for scheme in recipe.init_schemes if init_scheme_unsupported_reason((scheme,), variant, model) is None
    )
    return replace(recipe, variant=variant, model=model, init_schemes=schemes)


def with_checkpoint_architecture(recipe: Recipe, init_from: str, options: CheckpointOptions = NO_OPTIONS) -> Recipe:
    """Take architecture and preprocessing from a checkpoint; regularisation stays the recipe's."""
    checkpoint = weights.read(init_from, options)
    preprocessing = checkpoint.preprocessing
    from_recipe = {name: getattr(recipe.model, name) for name in REGULARISATION}
    pixels: dict[str, Any] = {}
    if not preprocessing.pixel_format.is_photo:
        pixels = {name: getattr(preprocessing, name) for name in ("dtype", "layout", "channel_names")}
    if recipe.keep_image_size:
        from_recipe["image_size"] = recipe.model.image_size
    return replace(
        recipe,
        init_from=init_from,
        init_options=options,
        init_schemes=(),
        variant=checkpoint.variant,
        model=replace(checkpoint.config, **from_recipe, head="linear"),
        data=replace(
            recipe.data,
            mean=preprocessing.mean,
            std=preprocessing.std,
            crop=preprocessing.crop,
            interpolation=preprocessing.interpolation,
            **pixels,
            resize=preprocessing.resize if recipe.data.resize == "crop" else recipe.data.resize,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Everything the Trainer needs, except hardware and run folder."""

    recipe: Recipe  # complete: written to a file, it repeats the run
    dataset: Dataset  # resized to the model's image size, except training images that are cropped at random
    loaded_dataset: Dataset  # all images as loaded
    preprocessing: Preprocessing
    initial_weights: dict[str, Tensor] | None  # None: drawn at random
    notes: tuple[str, ...]  # adaptations to the channels of the images and of the checkpoint's weights
    base: BaseWeights | None = None  # the checkpoint, if some of its weights stay frozen
    teacher: Teacher | None = None  # of a distillation
    method_state: dict[str, Tensor] | None = None  # of a pretraining that is continued: heads, teacher, centre
    optimizer_states: list[dict[str, Any]] | None = None  # of the same pretraining: moments of each optimizer

    @property
    def steps_per_epoch(self) -> int:
        return make_loader(self.recipe, self.dataset.train).steps_per_epoch


def setup_training(recipe: Recipe, progress: bool = False, items: ItemSequence | None = None) -> TrainingSetup:
    """Load the data, complete the recipe from it, and adapt the weights of `init_from` to the model.

    `items`: a sequence of (image, label) to use instead of the dataset that the recipe names.
    """
    check_learns_labels(recipe)
    check_loggers(recipe)
    if recipe.tune != "full" and not recipe.init_from:
        raise VitralError(
            f"--tune {recipe.tune} needs a checkpoint: without one, the frozen weights would be random",
            "Name one with --init-from, or omit --tune",
        )
    dataset, recipe, notes = load_training_data(recipe, progress, items)
    preprocessing = make_preprocessing(recipe)
    initial_weights: dict[str, Tensor] | None = None
    base: BaseWeights | None = None
    if recipe.init_from:
        checkpoint = weights.read(recipe.init_from, recipe.init_options)
        adapted = adapt_weights(checkpoint, recipe.variant, recipe.model, dataset.classes)
        initial_weights, notes = adapted.state, (*notes, *checkpoint.notes, *adapted.notes)
        if fits_head(recipe, initial_weights):
            notes = (*notes, "the new head is fitted to features of the training images by least squares (--head-init)")
        if recipe.tune != "full":
            base = BaseWeights(source=recipe.init_from, sha256=checkpoint.sha256())
    teacher: Teacher | None = None
    if recipe.distill is not None:
        teacher, teacher_notes = load_label_teacher(
            recipe.distill.teacher, recipe.teacher_options, dataset.classes, recipe.model, preprocessing
        )
        notes = (*notes, *teacher_notes)
    if recipe.augment.crop and recipe.data.resize != "pad":  # random crops keep the padding outside
        train = replace(dataset.train, images=to_model_channels(dataset.train.images, preprocessing))
    else:
        train = dataset.train.to_model_input(preprocessing)
    return TrainingSetup(
        recipe=recipe,
        dataset=replace(dataset, train=train, validation=dataset.validation.to_model_input(preprocessing)),
        loaded_dataset=dataset,
        preprocessing=preprocessing,
        initial_weights=initial_weights,
        notes=notes,
        base=base,
        teacher=teacher,
    )


def make_loader(recipe: Recipe, train: Split, hardware: Hardware | None = None) -> Loader:
    """The training batches, on the device of `hardware` if given."""
    images, labels = training_images(train.images, recipe.batch_size), train.labels
    if hardware is not None:
        images, labels = to_device_if_fits(images, hardware), labels.to(hardware.device)
    return Loader(
        images=images,
        labels=labels,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        sampling=recipe.sampling,
        repeat=recipe.augment.repeat,
    )


def load_training_data(
    recipe: Recipe, progress: bool = False, items: ItemSequence | None = None
) -> tuple[Dataset, Recipe, tuple[str, ...]]:
    """Load the dataset and complete the recipe with the task, pixel format, number of classes, mean and std.

    The notes state what the pixel format changed in the recipe.
    """
    data = recipe.data
    if data.more:
        raise VitralError(
            f"data.more names further images ({data.more[0]}), which only pretraining uses", "Train on one dataset"
        )
    notes: tuple[str, ...] = ()
    if items is not None or is_file_dataset(data.name):
        dataset, recipe, notes = _load_images(recipe, progress, items)
    else:
        if data.test_split:
            raise VitralError(f"{data.name} has a test split of its own", "Omit --test-split")
        check_single_label(data.name, recipe.label_options)
        dataset = load_builtin_dataset(data.name, validation=data.validation, fold=data.parsed_fold, progress=progress)
        if Path(recipe.data.name).is_dir():
            dataset = replace(
                dataset, source=f"{dataset.source}; write ./{recipe.data.name} for the folder of that name"
            )
    if recipe.label_options.task not in (None, dataset.task):
        raise VitralError(f"{data.name} is a dataset for {dataset.task}, but the task is {recipe.task}", "Omit --task")
    recipe = recipe.with_task(dataset.task)
    recipe = with_channel_stats(recipe, dataset, pretrained_std=data.std)
    model = replace(recipe.model, num_classes=len(dataset.classes))
    return dataset, replace(recipe, model=model), notes


def with_channel_stats(recipe: Recipe, dataset: Dataset, pretrained_std: tuple[float, ...] | None) -> Recipe:
    """Complete the recipe with mean and std of the training images, for the channels of the model.

    `pretrained_std` is that of the checkpoint, whose inputs had pixels of another format; None without a checkpoint.
    """
    mean, std = recipe.data.mean, recipe.data.std
    if mean is None or std is None:
        mean, std = channel_stats(dataset.train.images)
        if recipe.init_from and pretrained_std is not None:
            std = pretrained_spread(std, pretrained_std)
    C = recipe.model.channels
    if len(mean) != C and {len(mean), C} == {1, 3}:  # grey images for an RGB model or the reverse: green is closest
        mean, std = (mean * 3, std * 3) if C == 3 else (mean[1:2], std[1:2])
    return replace(recipe, data=replace(recipe.data, mean=mean, std=std))


def _load_images(recipe: Recipe, progress: bool, items: ItemSequence | None) -> tuple[Dataset, Recipe, tuple[str, ...]]:
    """Detect the pixel format of files or of a sequence, then load them for the recipe with that format."""
    data = recipe.data
    options: dict[str, Any] = {name: getattr(data, name) for name in ("validation", "test_split", "read_options")}
    options |= {"label_options": recipe.label_options, "fold": data.parsed_fold}
    load_images: Callable[..., Dataset]
    if items is not None:
        detected, load_images = detect_sequence_pixels(items, data.layout), partial(load_sequence, items, **options)
    elif data.name.startswith(SEQUENCE_PREFIX) or is_packed(Path(data.name)):
        detected = packed_pixels(Path(data.name))
        load_images = partial(load_file_dataset, data.name, exclude=data.exclude, **options)
    else:
        listing = list_recipe_images(recipe, progress)
        detected = detect_listing_pixels(listing, data.layout)
        load_images = partial(read_listing, listing, read_options=data.read_options, fingerprints=True)
    recipe, notes = with_pixel_format(recipe, detected.format)
    dataset = load_images(make_preprocessing(with_placeholder_stats(recipe)), progress=progress)
    return dataset, recipe, notes if detected.note is None else (detected.note, *notes)


def list_recipe_images(recipe: Recipe, progress: bool = False) -> DatasetListing:
    """List the image files of a recipe, with its splits."""
    data = recipe.data
    return list_images(
        data.name, data.validation, progress, data.test_split, data.exclude, recipe.label_options, data.parsed_fold
    )


def pack_dataset(recipe: Recipe, out: Path | None = None, progress: bool = False) -> tuple[Path, Dataset]:
    """Decode all splits of a recipe's image files into the cache, or into the folder `out`."""
    if not is_file_dataset(recipe.data.name):
        raise VitralError(
            f"{recipe.data.name} is a built-in dataset and needs no packing", "Use: vitral data pack FOLDER"
        )
    listing = list_recipe_images(recipe, progress)
    recipe, _ = with_pixel_format(recipe, detect_listing_pixels(listing, recipe.data.layout).format)
    preprocessing = make_preprocessing(with_placeholder_stats(recipe))
    folder, index = pack_location(listing, storage_preprocessing(preprocessing))
    if out is not None:
        if out.exists() and not (is_packed(out) and read_index(out).fingerprint == index.fingerprint):
            raise VitralError(f"{out} already exists", "Choose a folder that does not exist")
        folder = out
    read_options = replace(recipe.data.read_options, pack=float("inf"))
    dataset = read_listing(listing, preprocessing, read_options, pack_folder=folder, progress=progress)
    _ = dataset.test  # decoded on first access
    return folder, dataset


def with_placeholder_stats(recipe: Recipe) -> Recipe:
    """Fill in a mean and standard deviation for reading images from which they will be computed."""
    half = (0.5,) * recipe.model.channels
    return recipe if recipe.data.mean else replace(recipe, data=replace(recipe.data, mean=half, std=half))


def make_preprocessing(recipe: Recipe) -> Preprocessing:
    assert recipe.data.mean is not None
    assert recipe.data.std is not None
    try:
        return Preprocessing(
            image_size=recipe.model.image_size,
            channels=recipe.model.channels,
            mean=recipe.data.mean,
            std=recipe.data.std,
            crop=recipe.data.crop if recipe.data.resize == "crop" else 1.0,
            interpolation=recipe.data.interpolation,
            dtype="uint8" if recipe.data.dtype == "auto" else recipe.data.dtype,
            layout=recipe.data.layout,
            channel_names=recipe.data.channel_names,
            resize=recipe.data.resize,
            patch_size=recipe.model.patch_size if recipe.data.resize == "native" else 1,
        )
    except ValueError as error:
        message = str(error).replace("preprocessing.", "data.")
        raise VitralError(message, "`vitral train --help` lists the flags") from error
