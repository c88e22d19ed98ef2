"""Recommend a training command for a dataset, and estimate its time and memory on this machine from a few steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from vitral.data.files.location import ImageLocation
from vitral.data.files.pixel_detection import PHOTO, detect_pixels
from vitral.data.imbalance import REMEDY, find_imbalance
from vitral.data.pixels import PixelFormat
from vitral.device.cpu import busy_warning
from vitral.device.select import select_hardware
from vitral.doctor.backbones import (
    DEFAULT_BUDGET,
    DataFacts,
    affordable_backbones,
    find_checkpoint,
    finetune_recipe,
)
from vitral.doctor.diagnosis import Diagnosis
from vitral.doctor.estimates import estimate_memory, estimate_seconds
from vitral.doctor.tuning import MIN_SCRATCH_IMAGES, advise_tuning
from vitral.errors import VitralError, shell_quote
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.training.pixel_format import with_pixel_format
from vitral.training.setup import with_checkpoint_architecture
from vitral.utils.serialization import to_dict
from vitral.weights.hub import SCHEME

MIN_SCRATCH_PHOTOS = 50_000  # training images; with fewer, fine-tuning is clearly better (ViT paper, section 4.3)
SMALL_SIDE = 64  # maximum shorter side in pixels of images that are assumed not to be photographs


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    summary: str  # "fine-tune Ti/16 at 224 px for 20 epochs"
    reason: str
    command: str
    seconds: float  # estimated duration of the training on this machine, with the load during the benchmark
    seconds_low: float
    seconds_high: float
    memory_bytes: float  # estimated peak
    hardware: str
    timed_steps: int
    tuning: str | None  # the recommended --tune and why; None for training from scratch
    busy_warning: str | None  # set if other processes slowed down the timed steps

    def as_dict(self) -> dict[str, Any]:
        return dict(to_dict(self))


def recommend(diagnosis: Diagnosis, *, init_from: str | None = None) -> Recommendation:
    """Recommend how to train on a dataset. `init_from`: a checkpoint to fine-tune instead of one from the hub."""
    validation_fraction = 0 if "validation" in diagnosis.splits else 0.15
    num_train = round(diagnosis.splits.get("train", 0) * (1 - validation_fraction))
    median_side = statistics.median(min(image.size) for image in diagnosis.images if image.error is None)
    from_scratch, reason = _decide_from_scratch(num_train, median_side, init_from)
    if from_scratch:
        strategy, recipe, flags = _scratch_recipe(median_side)
    else:
        strategy, recipe, flags, note = _finetune_recipe(diagnosis, num_train, median_side, init_from)
        reason = ". ".join(filter(None, (reason, note)))
    epochs = recipe.epochs if num_train < 5_000 else max(recipe.epochs // 2, 3)
    if epochs != recipe.epochs:
        flags.append(f"--epochs {epochs}")
    if find_imbalance(diagnosis.train_counts) is not None:
        flags.append(REMEDY)
    recipe, _ = with_pixel_format(recipe, _pixel_format(diagnosis))
    recipe = replace(
        recipe,
        epochs=epochs,
        batch_size=min(recipe.batch_size, max(num_train, 1)),
        model=replace(recipe.model, num_classes=max(len(diagnosis.train_counts), 1)),
        data=replace(recipe.data, mean=(0.5,) * recipe.model.channels, std=(0.5,) * recipe.model.channels),
    )
    advice = None if from_scratch else advise_tuning(recipe, num_train, select_hardware())
    if advice is not None and advice.tune != recipe.tune:
        recipe = replace(recipe, tune=advice.tune)
        flags.append(f"--tune {advice.tune}")
    warning = busy_warning()  # before the benchmark adds to the load
    estimate = estimate_seconds(recipe, num_train, diagnosis.num_images)
    return Recommendation(
        summary=f"{strategy} at {recipe.model.image_size[0]} px for {epochs} epochs",
        reason=reason,
        command=" ".join(["vitral train", shell_quote(diagnosis.path), *flags]),
        seconds=estimate.seconds,
        seconds_low=estimate.low,
        seconds_high=estimate.high,
        memory_bytes=estimate_memory(recipe, diagnosis.num_images, estimate.hardware),
        hardware=estimate.hardware.name,
        timed_steps=estimate.timed_steps,
        tuning=None if advice is None else f"--tune {advice.tune}: {advice.reason}",
        busy_warning=_busy_text(warning, estimate.disturbance),
    )


def _pixel_format(diagnosis: Diagnosis) -> PixelFormat:
    """Channels and type of the images; those of photographs if they differ, which is reported as an error."""
    locations = [ImageLocation(str(image.path)) for image in diagnosis.images if image.error is None]
    try:
        return detect_pixels(locations, diagnosis.path).format
    except VitralError:
        return PHOTO


def _busy_text(warning: str | None, disturbance: str | None) -> str | None:
    if disturbance is None:
        return warning
    what = warning.partition(";")[0] if warning else "this machine is busy"
    return f"{what}: {disturbance}. The low end of the estimate is for an idle machine; repeat it then"


def _decide_from_scratch(num_train: int, median_side: float, init_from: str | None) -> tuple[bool, str]:
    """Whether to train from scratch, and the reason."""
    if init_from is not None:
        return False, "A checkpoint was given"
    if num_train >= MIN_SCRATCH_PHOTOS:
        return True, f"{num_train:,} training images are enough to train from scratch"
    if median_side <= SMALL_SIDE and num_train >= MIN_SCRATCH_IMAGES:
        return True, f"{num_train:,} small images ({median_side:.0f} px): pretraining on photographs helps little"
    return False, f"{num_train:,} training images are too few to train a ViT from scratch"


def _scratch_recipe(median_side: float) -> tuple[str, Recipe, list[str]]:
    """Strategy, recipe and flags for training from scratch, at no more than the size of the images."""
    default = get_recipe("folder-scratch")
    side, patch = default.model.image_size[0], default.model.patch_size
    if median_side >= side:
        return "train from scratch", default, []
    if median_side < 7 * patch:  # keep a grid of at least 7×7 patches
        patch = 8 if median_side >= 56 else 4
    side = max(int(median_side) // patch * patch, 4 * patch)
    recipe = replace(default, model=replace(default.model, image_size=(side, side), patch_size=patch))
    flags = []
    if recipe.model.image_size != default.model.image_size:
        flags.append(f"--model.image-size {side}")
    if recipe.model.patch_size != default.model.patch_size:
        flags.append(f"--model.patch-size {patch}")
    return "train from scratch", recipe, flags


def _finetune_recipe(
    diagnosis: Diagnosis, num_train: int, median_side: float, init_from: str | None
) -> tuple[str, Recipe, list[str], str]:
    """Strategy, recipe, flags and a remark for fine-tuning: the given checkpoint, or that of `--init-from auto`."""
    default = get_recipe("folder-finetune")
    if init_from is not None:
        recipe = with_checkpoint_architecture(default, init_from)
        return "fine-tune this checkpoint", recipe, [f"--init-from {shell_quote(init_from)}"], ""
    num_classes = max(len(diagnosis.train_counts), 1)
    data = DataFacts(
        num_train=num_train, num_images=diagnosis.num_images, num_classes=num_classes, median_side=median_side
    )
    candidates = affordable_backbones(data, default, DEFAULT_BUDGET)
    try:
        choice = find_checkpoint(candidates, data, DEFAULT_BUDGET)
        backbone, remark = choice.backbone, ". ".join(choice.lines())
        source = f"{SCHEME}{backbone.repository}"
    except VitralError as error:
        backbone, remark = candidates[0].backbone, f"{error.what[0].upper()}{error.what[1:]}. {error.hint}"
        source = "FILE"
    recipe = finetune_recipe(default, backbone, data)
    return f"fine-tune {backbone.preset}", recipe, [f"--init-from {source}"], remark
