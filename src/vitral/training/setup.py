"""From what a person asked for to everything a training needs: recipe, images, preprocessing, first weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from vitral import weights
from vitral.data.datasets import KNOWN, Dataset, Split, load
from vitral.data.files.file_dataset import pack_folder, read, stored_like
from vitral.data.files.listing import listed_files, load_files, looks_like_files
from vitral.data.files.packed import is_packed, read_index
from vitral.data.preprocess import Preprocessing, adapt, measure
from vitral.data.registry.sources import check_name
from vitral.data.sequence import Items, load_sequence
from vitral.errors import VitralError
from vitral.models.variants import architecture
from vitral.recipes.builtin import RECIPES, named
from vitral.recipes.schema import Recipe, read_recipe
from vitral.training.init_schemes import why_not
from vitral.weights.adapt import transfer

REGULARISATION = ("dropout", "dropout_attention", "dropout_embedding", "drop_path")


def plan_for(
    data: str | None,
    recipe: Recipe | str | Path | None,
    init: str | None = None,
    preset: str | None = None,
    heads: int | None = None,
) -> Recipe:
    """The recipe that is meant, pointed at the data that is meant, shaped like the checkpoint it begins from."""
    if isinstance(recipe, Recipe):
        plan = recipe
    elif recipe is not None:
        plan = read_recipe(Path(recipe)) if str(recipe).endswith(".toml") else named(str(recipe))
    elif data is None:
        raise VitralError(
            "what should it learn from?", f"a folder with class folders, or a known set: {', '.join(KNOWN)}"
        )
    elif looks_like_files(data) or init:
        plan = named("folder-finetune" if init else "folder-scratch")
    else:
        check_name(data)
        plan = named(data)
    if data not in (None, plan.data.name):
        plan = pointed_at(plan, str(data))
    if preset and init:
        raise VitralError("--preset and --init both say what the model is", "a checkpoint brings its own shape")
    if preset:
        plan = of_preset(plan, preset)
    return shaped_like(plan, init, heads) if init else plan


def of_preset(plan: Recipe, name: str) -> Recipe:
    """The recipe with a model of the tables, plain or hybrid; what the images decide and regularisation stay.

    Where the patches do not divide the image size, images are scaled up to the next one that they do.
    """
    kept = {name: getattr(plan.model, name) for name in ("channels", "classes", *REGULARISATION)}
    variant, model = architecture(name, **kept)
    sides = [-(-side // model.patch_size) * model.patch_size for side in plan.model.image_size]
    model = replace(model, image_size=(sides[0], sides[1]))
    start = tuple(name for name in plan.start if not why_not((name,), variant, model))  # the recipe's model had others
    return replace(plan, variant=variant, model=model, start=start)


def pointed_at(plan: Recipe, data: str) -> Recipe:
    """A recipe for one set, used for another: a known set brings its own channels and, if they fit, its image size."""
    plan = replace(plan, data=replace(plan.data, name=data, mean=None, std=None))
    if looks_like_files(data):
        return plan
    check_name(data)
    own = RECIPES[data]().model
    model = replace(plan.model, channels=own.channels)
    if all(side % plan.model.patch_size == 0 for side in own.image_size):
        model = replace(model, image_size=own.image_size)
    return replace(plan, model=model)


def shaped_like(plan: Recipe, init: str, heads: int | None = None) -> Recipe:
    """The recipe with the architecture and the preprocessing of a checkpoint; regularisation stays the recipe's."""
    checkpoint = weights.read(init, heads=heads)
    seen = checkpoint.preprocessing
    ours = {name: getattr(plan.model, name) for name in REGULARISATION}
    if plan.own_size:
        ours["image_size"] = plan.model.image_size
    return replace(
        plan,
        init=init,
        start=(),
        variant=checkpoint.variant,
        model=replace(checkpoint.config, **ours, head="linear"),
        data=replace(plan.data, mean=seen.mean, std=seen.std, crop=seen.crop, interpolation=seen.interpolation),
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a training needs. `recipe` is complete: written down, it repeats the run."""

    recipe: Recipe
    dataset: Dataset
    preprocessing: Preprocessing
    start: dict[str, Tensor] | None  # the first weights; None: drawn at random
    notes: tuple[str, ...]  # for people


def prepare(plan: Recipe, progress: bool = False, items: Items | None = None) -> Prepared:
    """Read the images, fill in what only they can say, and fit the checkpoint's weights to the model."""
    dataset, plan = images_for(plan, progress, items)
    preprocessing = preprocessing_of(plan)
    start: dict[str, Tensor] | None = None
    notes: tuple[str, ...] = ()
    if plan.init:
        checkpoint = weights.read(plan.init, heads=plan.model.heads)
        moved = transfer(checkpoint, plan.variant, plan.model, dataset.classes)
        start, notes = moved.state, (*checkpoint.notes, *moved.notes)
    train = dataset.train if plan.augment.crop else of_size(dataset.train, preprocessing)
    dataset = replace(dataset, train=train, validation=of_size(dataset.validation, preprocessing))
    return Prepared(recipe=plan, dataset=dataset, preprocessing=preprocessing, start=start, notes=notes)


def images_for(plan: Recipe, progress: bool = False, items: Items | None = None) -> tuple[Dataset, Recipe]:
    """The data set, from its name or from a sequence, and the recipe with classes, mean and deviation filled in."""
    C = plan.model.channels
    if items is not None:
        seen = preprocessing_of(with_blank_mean(plan))
        dataset = load_sequence(items, seen, validation=plan.data.validation, how=plan.data.how, progress=progress)
    elif looks_like_files(plan.data.name):
        seen = preprocessing_of(with_blank_mean(plan))
        held, how = plan.data.validation, plan.data.how
        dataset = load_files(plan.data.name, seen, validation=held, how=how, progress=progress)
    else:
        dataset = load(plan.data.name, validation=plan.data.validation, progress=progress)
        if Path(plan.data.name).is_dir():
            dataset = replace(dataset, source=f"{dataset.source}; the folder of that name is ./{plan.data.name}")
    mean, std = plan.data.mean, plan.data.std
    if mean is None or std is None:
        mean, std = measure(dataset.train.images)
    if len(mean) != C and {len(mean), C} == {1, 3}:  # gray seen in colour, or the other way round: green is nearest
        mean, std = (mean * 3, std * 3) if C == 3 else (mean[1:2], std[1:2])
    model = replace(plan.model, classes=len(dataset.classes))
    return dataset, replace(plan, data=replace(plan.data, mean=mean, std=std), model=model)


def pack(plan: Recipe, out: Path | None = None, progress: bool = False) -> tuple[Path, Dataset]:
    """Decode the photographs a recipe trains on, all splits of them, into the cache or a folder of one's own."""
    if not looks_like_files(plan.data.name):
        raise VitralError(f"{plan.data.name} is a known set: it needs no packing", "vitral data pack FOLDER")
    listed = listed_files(plan.data.name, plan.data.validation, progress)
    seen = preprocessing_of(with_blank_mean(plan))
    folder, index = pack_folder(listed, stored_like(seen))
    if out is not None:
        if out.exists() and not (is_packed(out) and read_index(out).fingerprint == index.fingerprint):
            raise VitralError(f"{out} exists already", "name a folder that does not")
        folder = out
    dataset = read(listed, seen, replace(plan.data.how, pack=float("inf")), into=folder, progress=progress)
    _ = dataset.test  # which decodes it
    return folder, dataset


def with_blank_mean(plan: Recipe) -> Recipe:
    """The recipe with some mean and deviation, where they are yet to be measured on what it reads."""
    half = (0.5,) * plan.model.channels
    return plan if plan.data.mean else replace(plan, data=replace(plan.data, mean=half, std=half))


def preprocessing_of(plan: Recipe) -> Preprocessing:
    assert plan.data.mean is not None
    assert plan.data.std is not None
    try:
        return Preprocessing(
            image_size=plan.model.image_size,
            channels=plan.model.channels,
            mean=plan.data.mean,
            std=plan.data.std,
            crop=plan.data.crop,
            interpolation=plan.data.interpolation,
        )
    except ValueError as error:
        raise VitralError(
            str(error).replace("preprocessing.", "data."), "vitral train --help lists the flags"
        ) from error


def of_size(split: Split, preprocessing: Preprocessing) -> Split:
    return Split(images=adapt(split.images, preprocessing), labels=split.labels)
