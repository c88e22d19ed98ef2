"""A model before labelled images: which images it is asked about, and what they teach about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from vitral import bundled as box
from vitral.data.datasets import Dataset, Split
from vitral.data.datasets import load as load_dataset
from vitral.data.decode import NotAnImage, decode, image_files
from vitral.data.files.file_dataset import PREFIX
from vitral.data.files.listing import load_files, looks_like_files
from vitral.data.files.shards import looks_like_shards
from vitral.data.lazy_images import Joined, Pixels
from vitral.data.preprocess import adapt
from vitral.data.registry.sources import KNOWN
from vitral.errors import VitralError, few
from vitral.evaluation.calibration import FALSE_ALARMS, Calibration, Score, calibrate, known_score
from vitral.evaluation.compare import PairedComparison, compare
from vitral.evaluation.ood import Mahalanobis, Unknown, judge_score
from vitral.evaluation.report import Evaluation, assess
from vitral.evaluation.robustness import WAYS, Robustness, robustness
from vitral.evaluation.selective_prediction import AnswerAt, answer_at
from vitral.inference.predictor import Predictor, is_checkpoint
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import model_folder, write_card
from vitral.weights.io import FAMILIES

T = TypeVar("T")
SplitName = Literal["test", "validation", "train"]
Watch = Callable[[str], None]
MOST_IMAGES = 10_000  # of training images that distances are measured from, of unknown images, of images to damage


def unwatched(what: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A model and the images it is asked about: as it wants them, and labelled with its own class numbers."""

    predictor: Predictor
    plan: Recipe | None  # None: a model folder without its run
    dataset: Dataset
    name: str  # of the split
    split: Split

    @cached_property
    def held_out(self) -> Split:
        """The validation images of what the model was trained on, if there are any."""
        trained_on = learned_from(self.predictor, "thresholds are chosen on the validation images of that")
        same = self.dataset.name == trained_on
        dataset = self.dataset if same else images_of(trained_on, self.predictor, self.plan)
        by_name = torch.tensor([self.predictor.classes.index(c) for c in dataset.classes])
        images = adapt(dataset.validation.images, self.predictor.card.preprocessing)
        return Split(images=images, labels=by_name[dataset.validation.labels])


def question(model: str | Path | Predictor, data: str | None, split: SplitName | None) -> Asked:
    """A split of what a model was trained on, or of another set or folder with classes that it knows.

    None: the test images, or the validation images where there are none. Where another folder has no such split, all
    of its images are asked.
    """
    predictor = model if isinstance(model, Predictor) else Predictor.load(model)
    plan = recipe_of(predictor)
    if not data:
        check_there(predictor)
    dataset = images_of(data or learned_from(predictor), predictor, plan)
    if strange := [c for c in dataset.classes if c not in predictor.classes]:
        near = [f"{c} → {match[0]}" for c in strange if (match := get_close_matches(c, predictor.classes, n=1))]
        raise VitralError(
            f"{dataset.name} has classes that the model does not know: {few(strange)}",
            (f"did you mean {few(near)}? " if near else "")
            + f"The model knows {few(predictor.classes)}; names for a checkpoint without any: --labels FILE",
        )
    if split is None:
        split = "test" if data or len(dataset.test) else "validation"
    asked: Split = getattr(dataset, split)
    if not len(asked) and data:
        both = (dataset.train, dataset.validation)
        images = Joined(*(part.images for part in both))
        asked = Split(images=images, labels=torch.cat([part.labels for part in both]))
    elif not len(asked):
        raise VitralError(
            f"{dataset.name} has no {split} images", "leave --split out, or give another folder with --data"
        )
    by_name = torch.tensor([predictor.classes.index(c) for c in dataset.classes])  # a missing class shifts nothing
    asked = Split(images=adapt(asked.images, predictor.card.preprocessing), labels=by_name[asked.labels])
    return Asked(predictor=predictor, plan=plan, dataset=dataset, name=split, split=asked)


def recipe_of(predictor: Predictor) -> Recipe | None:
    """Of the run that the model came from; None for a model folder alone, or another library's checkpoint."""
    file = predictor.path / "recipe.toml" if predictor.path is not None else None
    return read_recipe(file) if file is not None and file.is_file() else None


def learned_from(predictor: Predictor, hint: str = "name a set or folder with --data") -> str:
    """The set or folder that the model was trained on; other libraries' checkpoints do not say."""
    name = predictor.card.trained_on
    if not name or name.partition(": ")[0] in FAMILIES:
        source = f"{predictor.path} is a model from elsewhere, so it" if predictor.path else "the model"
        raise VitralError(f"{source} does not say what it was trained on", hint)
    return name


def check_there(predictor: Predictor) -> None:
    """A run knows its photographs by the path they had where it was trained."""
    name = learned_from(predictor)
    elsewhere = name in KNOWN or name.startswith(PREFIX) or looks_like_shards(name)
    if not elsewhere and not Path(name).exists():
        raise VitralError(
            f"{predictor.path or 'the model'} was trained on {name}, which is not there",
            "name the images with --data, or call vitral in the folder where the training was begun",
        )


def images_of(name: str, predictor: Predictor, plan: Recipe | None) -> Dataset:
    """A known set, or a person's files, with the validation images held out that the run held out."""
    seen = predictor.card.preprocessing
    if looks_like_files(name):
        if plan is None:
            return load_files(name, seen)
        return load_files(name, seen, validation=plan.data.validation, how=plan.data.how)
    return load_dataset(name) if plan is None else load_dataset(name, validation=plan.data.validation)


def calibrate_model(
    predictor: Predictor, validation: Split, score: Score = "energy", false_alarms: float = FALSE_ALARMS
) -> Calibration:
    """Fit temperature and threshold on validation images as the model wants them; it has them from then on, in its
    folder too."""
    if predictor.path is None or is_checkpoint(predictor.path):
        raise VitralError(
            "only a model of vitral's own can keep a calibration", "vitral convert SOURCE FOLDER --to vitral makes one"
        )
    if name := box.name_of(predictor.path):
        raise VitralError(
            f"{name} comes with vitral and stays as it is",
            f'calibrate a copy of it: cp -r "$(vitral box where {name})" mine; vitral evaluate mine --calibrate',
        )
    logits = predictor.logits(validation.images) if len(validation) else torch.empty(0, len(predictor.classes))
    found = calibrate(logits, validation.labels, score=score, false_alarms=false_alarms)
    predictor.card = replace(predictor.card, calibration=found)
    write_card(model_folder(predictor.path), predictor.card)
    return found


def evaluate(
    asked: Asked,
    *,
    max_error: float | None = None,
    against: str | None = None,
    damaged: int = 0,
    watch: Watch = unwatched,
) -> tuple[Evaluation, Tensor]:
    """All that the images say about the model, and its logits for them.

    With `max_error`, from what confidence on to answer; `against`, a set or folder of images it should not know;
    `damaged`, how many of the images are asked again, noisy, blurred, pale, compressed and turned. `watch` hears what
    is going on.
    """
    if max_error is not None and not len(asked.held_out):
        raise VitralError(
            f"{learned_from(asked.predictor)} has no validation images to choose a confidence on: without --max-error",
            "vitral train DATA --data.validation 0.1 holds some out",
        )
    watch(asking := f"asking {len(asked.split):,} {asked.name} images")
    logits = asked.predictor.logits_together(asked.split.images, lambda done: watch(f"{asking}: {done:,} answered"))
    found = assess(
        logits,
        asked.split.labels,
        asked.predictor.classes,
        asked.predictor.card.calibration,
        answer_at=None if max_error is None else when_to_answer(asked, logits, max_error),
        unknown=None if against is None else against_unknown(asked, logits, against, watch),
        robustness=against_damage(asked, damaged, watch) if damaged else None,
        split=asked.name,
    )
    return found, logits


def when_to_answer(asked: Asked, logits: Tensor, wished: float) -> AnswerAt:
    calibration, validation = asked.predictor.card.calibration, asked.held_out

    def sure_and_right(logits_NK: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        confidence, said = calibration.probabilities(logits_NK.double()).max(dim=1)
        return confidence, said == labels_N

    chosen_on = sure_and_right(asked.predictor.logits(validation.images), validation.labels)
    return answer_at(wished, chosen_on, sure_and_right(logits, asked.split.labels))


def against_unknown(asked: Asked, logits: Tensor, against: str, watch: Watch) -> Unknown:
    watch(f"asking images of {against}")
    predictor, validation = asked.predictor, asked.held_out
    if against == predictor.card.trained_on:
        raise VitralError(f"{against} is what the model was trained on", "--unknown wants images it should not know")
    strange = strange_images(against, predictor)
    train = images_of(predictor.card.trained_on, predictor, asked.plan).train
    some = spread(len(train), MOST_IMAGES)
    distance = Mahalanobis(
        predictor.features(adapt(train.images[some], predictor.card.preprocessing)), train.labels[some]
    )
    held = len(validation) > 0
    answers = (predictor.logits(validation.images) if held else logits[:0], logits, predictor.logits(strange))
    names: tuple[Score, ...] = ("max-logit", "energy")
    own = {} if held else {predictor.card.calibration.score: predictor.card.calibration.unknown_below}
    scores = [
        judge_score(name, _each(answers, partial(known_score, score=name)), below=own.get(name)) for name in names
    ]
    images: tuple[Pixels, Pixels, Pixels] = (validation.images, asked.split.images, strange)
    scores.append(
        judge_score(
            "mahalanobis",
            _each(images, lambda some: distance.score(predictor.features(some)) if len(some) else torch.empty(0)),
        )
    )
    return Unknown(against=against, images=len(strange), known_images=len(logits), scores=tuple(scores))


def _each(three: tuple[T, T, T], score: Callable[[T], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    validation, known, strange = three
    return score(validation), score(known), score(strange)


def strange_images(name: str, predictor: Predictor) -> Tensor:
    """Images of another known set, or of a folder in whatever order, as the model wants them."""
    if not looks_like_files(name):
        test = load_dataset(name).test
        return adapt(test.images[spread(len(test), MOST_IMAGES)], predictor.card.preprocessing)
    if not Path(name).exists():
        raise VitralError(f"there is no folder {name}", "--unknown wants a folder of images or a known set")
    files = image_files([Path(name)])
    chosen = [files[index] for index in spread(len(files), MOST_IMAGES).tolist()]

    def pixels(file: Path) -> Tensor | None:
        try:
            return predictor.card.preprocessing.pixels(decode(file, at_least=predictor.card.preprocessing.image_size))
        except NotAnImage:
            return None

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = [image for image in pool.map(pixels, chosen) if image is not None]
    if not found:
        raise VitralError(f"no readable images in {name}", "--unknown wants a folder of images or a known set")
    return torch.stack(found)


def against_damage(asked: Asked, most: int, watch: Watch) -> Robustness:
    some, done = spread(len(asked.split), most), count()

    def answer(images: Tensor) -> Tensor:
        watch(f"asking {len(images):,} of them damaged, in {next(done)} of {WAYS} ways")
        return asked.predictor.logits(images).argmax(dim=1)

    return robustness(asked.split.images[some], asked.split.labels[some], answer)


def spread(there: int, most: int) -> Tensor:
    """At most so many of the places that there are, evenly."""
    return torch.arange(min(there, most)) * there // max(min(there, most), 1)


def compare_models(first: Asked, second: Asked) -> PairedComparison:
    """Both asked the same images."""
    if set(first.predictor.classes) != set(second.predictor.classes):
        only = set(first.predictor.classes) ^ set(second.predictor.classes)
        raise VitralError(
            f"the two models have different classes: {few(sorted(only))} only in one of them",
            "models can be compared when they choose between the same classes",
        )
    if len(first.split) != len(second.split):
        raise VitralError(
            f"the two models would be asked different images: {len(first.split):,} of {first.dataset.name}, "
            f"{len(second.split):,} of {second.dataset.name}",
            "choose the images for both with --data and --split",
        )
    names = first.predictor.classes
    place = torch.tensor([names.index(c) for c in second.predictor.classes])
    labels = first.split.labels
    if not torch.equal(place[second.split.labels], labels):
        raise VitralError(
            f"the two models were trained on different data: {first.dataset.name} and {second.dataset.name}",
            "choose the images for both with --data",
        )
    said = (asked.predictor.logits(asked.split.images).argmax(dim=1) for asked in (first, second))
    said_first, said_second = said
    return compare(said_first, place[said_second], labels, names)
