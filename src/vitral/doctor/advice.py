"""Recommend a training command for a dataset, and estimate its time and memory on this machine from a few steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from vitral.analysis.cost import activation_bytes, count_parameters
from vitral.data.imbalance import REMEDY, find_imbalance
from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import busy_warning
from vitral.device.select import Hardware, select_hardware
from vitral.device.threads import select_threads, thread_count
from vitral.doctor.diagnosis import Diagnosis
from vitral.doctor.time_estimate import time_steps
from vitral.errors import shell_quote
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.training.backend import make_backend
from vitral.training.parallelism import parallel_plan
from vitral.training.setup import make_preprocessing, with_checkpoint_architecture, with_preset
from vitral.training.state import init_state
from vitral.training.step import StepContext, StepRunner
from vitral.utils.serialization import to_dict

# Checkpoints trained on ImageNet-21k (arXiv 2106.10270).
CHECKPOINTS = {
    "Ti/16": "hf:timm/vit_tiny_patch16_224.augreg_in21k",
    "S/16": "hf:timm/vit_small_patch16_224.augreg_in21k",
    "B/16": "hf:timm/vit_base_patch16_224.augreg_in21k",
}
MIN_SCRATCH_IMAGES = 50_000  # training images; with fewer, fine-tuning is clearly better (ViT paper, section 4.3)
MIN_SCRATCH_SMALL_IMAGES = 5_000  # for digits, icons or microscope patches, which differ from photographs
SMALL_SIDE = 64  # maximum shorter side in pixels of images that are assumed not to be photographs
PROCESS_BYTES = 0.4e9  # memory of Python and PyTorch
BENCHMARK_SECONDS = 6.0
MIN_BENCHMARK_STEPS = 5
OVERHEAD_SECONDS = 15.0  # start, decoding, figures and report; two CPU cores
CPU_BENCHMARK_BATCH = 8  # time grows linearly with the batch size on a CPU, so a small batch suffices


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
    busy_warning: str | None  # set if other processes slowed down the timed steps

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = to_dict(self)
        return fields


def recommend(diagnosis: Diagnosis, *, init_from: str | None = None) -> Recommendation:
    """Recommend how to train on a dataset. `init_from`: a checkpoint to fine-tune instead of one from the hub."""
    validation_fraction = 0 if "validation" in diagnosis.splits else 0.15
    num_train = round(diagnosis.splits.get("train", 0) * (1 - validation_fraction))
    median_side = statistics.median(min(image.size) for image in diagnosis.images if image.error is None)
    from_scratch, reason = _decide_from_scratch(num_train, median_side, init_from)
    if from_scratch:
        strategy, recipe, flags = _scratch_recipe(median_side)
    else:
        strategy, recipe, flags = _finetune_recipe(num_train, init_from)
    epochs = recipe.epochs if num_train < 5_000 else max(recipe.epochs // 2, 3)
    if epochs != recipe.epochs:
        flags.append(f"--epochs {epochs}")
    if find_imbalance(diagnosis.train_counts) is not None:
        flags.append(REMEDY)
    recipe = replace(
        recipe,
        epochs=epochs,
        batch_size=min(recipe.batch_size, max(num_train, 1)),
        model=replace(recipe.model, num_classes=max(len(diagnosis.train_counts), 1)),
        data=replace(recipe.data, mean=(0.5,) * recipe.model.channels, std=(0.5,) * recipe.model.channels),
    )
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
        busy_warning=_busy_text(warning, estimate.disturbance),
    )


def _busy_text(warning: str | None, disturbance: str | None) -> str | None:
    if disturbance is None:
        return warning
    what = warning.partition(";")[0] if warning else "this machine is busy"
    return f"{what}: {disturbance}. The low end of the estimate is for an idle machine; repeat it then"


def _decide_from_scratch(num_train: int, median_side: float, init_from: str | None) -> tuple[bool, str]:
    """Whether to train from scratch, and the reason."""
    if init_from is not None:
        return False, "A checkpoint was given"
    if num_train >= MIN_SCRATCH_IMAGES:
        return True, f"{num_train:,} training images are enough to train from scratch"
    if median_side <= SMALL_SIDE and num_train >= MIN_SCRATCH_SMALL_IMAGES:
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


def _finetune_recipe(num_train: int, init_from: str | None) -> tuple[str, Recipe, list[str]]:
    """Strategy, recipe and flags for fine-tuning. More images and a GPU allow a larger model."""
    default = get_recipe("folder-finetune")
    if init_from is not None:
        recipe = with_checkpoint_architecture(default, init_from)
        return "fine-tune this checkpoint", recipe, [f"--init-from {shell_quote(init_from)}"]
    has_gpu = select_hardware().gpu_memory_bytes is not None
    preset = "B/16" if has_gpu and num_train >= 20_000 else "S/16" if has_gpu and num_train >= 2_000 else "Ti/16"
    return f"fine-tune {preset}", with_preset(default, preset), [f"--init-from {CHECKPOINTS[preset]}"]


class TimeEstimate(NamedTuple):
    """Duration of a training run in seconds."""

    low: float
    seconds: float
    high: float
    hardware: Hardware
    timed_steps: int
    disturbance: str | None  # how other processes disturbed the benchmark


def estimate_seconds(recipe: Recipe, num_train: int, num_images: int) -> TimeEstimate:
    """Estimate the duration of the whole training from steps on random pixels, with the threads of a real run."""
    steps = max(num_train // recipe.batch_size, 1)
    total_steps = steps * recipe.epochs
    hardware = select_hardware(
        device=recipe.device, precision=recipe.precision, compile="no", width=recipe.model.width, steps=total_steps
    )
    preprocessing, has_gpu = make_preprocessing(recipe), hardware.gpu_memory_bytes is not None
    batch_size = recipe.batch_size if has_gpu else min(recipe.batch_size, CPU_BENCHMARK_BATCH)
    images, labels = _random_batch(recipe, preprocessing, batch_size, hardware.device)
    state = init_state(recipe, hardware, total_steps)
    backend = make_backend(state.model, recipe, preprocessing, hardware, parallel_plan(recipe, hardware))
    runner = StepRunner(state, StepContext(recipe, backend), total_steps)
    rows = recipe.batch_size * (recipe.model.grid[0] * recipe.model.grid[1] + recipe.model.num_prefix_tokens)
    threads = None if has_gpu else select_threads(recipe.threads, width=recipe.model.width, rows=rows).threads

    def run_step() -> None:
        runner.run(images, labels)
        hardware.synchronize()

    with thread_count(threads or torch.get_num_threads()):
        times = time_steps(run_step, seconds=BENCHMARK_SECONDS, min_steps=MIN_BENCHMARK_STEPS, threads=threads)
    # Validation images need the forward pass only, about a third of the arithmetic of a step.
    images_per_epoch = steps * recipe.batch_size + (num_images - num_train) / 3
    num_steps = recipe.epochs * images_per_epoch / batch_size
    low, likely, high = (OVERHEAD_SECONDS + num_steps * step for step in times.step_range())
    return TimeEstimate(low, likely, high, hardware, len(times.seconds), times.disturbance())


def _random_batch(
    recipe: Recipe, preprocessing: Preprocessing, batch_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random uint8 images of the stored size, which is larger than the model input if training crops."""
    height, width = preprocessing.image_size
    if recipe.augment.crop:
        height, width = int(height / preprocessing.crop), int(width / preprocessing.crop)
    rng = torch.Generator().manual_seed(0)
    shape = (batch_size, preprocessing.channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng)
    labels = torch.randint(0, recipe.model.num_classes, (batch_size,), generator=rng)
    return images.to(device), labels.to(device)


def estimate_memory(recipe: Recipe, num_images: int, hardware: Hardware) -> float:
    """Peak memory in bytes: weights, gradients, two AdamW moments, EMA weights, activations and the decoded images."""
    num_parameters = count_parameters(recipe.model).total
    device: Literal["gpu", "cpu"] = "gpu" if hardware.gpu_memory_bytes else "cpu"
    bytes_per_image = activation_bytes(recipe.model, hardware.precision, device).total
    preprocessing = make_preprocessing(recipe)
    height, width = (side / preprocessing.crop for side in preprocessing.image_size)
    dataset_bytes = num_images * preprocessing.channels * height * width
    copies = 5 if recipe.ema else 4
    return PROCESS_BYTES + 4 * num_parameters * copies + recipe.batch_size * bytes_per_image + dataset_bytes
