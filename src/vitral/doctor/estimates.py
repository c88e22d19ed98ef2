"""Estimate time and memory of a training run on this machine from a few of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from vitral.analysis.cost import activation_bytes
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware, select_hardware
from vitral.device.threads import select_threads, thread_count
from vitral.distributed.world import SINGLE_PROCESS
from vitral.doctor.step_times import time_steps
from vitral.recipes.schema import Recipe
from vitral.training.backend import make_backend
from vitral.training.hardware import parallel_plan
from vitral.training.setup import make_preprocessing
from vitral.training.state import init_state
from vitral.training.step import StepContext, StepRunner
from vitral.training.tuning import count_trained

PROCESS_BYTES = 0.4e9  # memory of Python and PyTorch
BENCHMARK_SECONDS = 6.0
MIN_BENCHMARK_STEPS = 5
OVERHEAD_SECONDS = 9.0  # start, decoding, figures and report of 398 photographs on two CPU cores
CPU_BENCHMARK_BATCH = 8  # time grows linearly with the batch size on a CPU, so a small batch suffices


class TimeEstimate(NamedTuple):
    """Duration of a training run in seconds."""

    low: float
    seconds: float
    high: float
    hardware: Hardware
    timed_steps: int
    disturbance: str | None  # how other processes disturbed the benchmark


def estimate_seconds(
    recipe: Recipe, num_train: int, num_images: int, max_seconds: float = BENCHMARK_SECONDS
) -> TimeEstimate:
    """Estimate the duration of the whole training in one process from steps on random pixels.

    They run with the threads of a real run.
    """
    steps = max(num_train // recipe.batch_size, 1)
    total_steps = steps * recipe.epochs
    hardware = select_hardware(
        device=recipe.device, precision=recipe.precision, compile="no", width=recipe.model.width, steps=total_steps
    )
    hardware = replace(hardware, world=SINGLE_PROCESS)  # one of several ranks chooses a checkpoint for all
    preprocessing, has_gpu = make_preprocessing(recipe), hardware.gpu_memory_bytes is not None
    batch_size = recipe.batch_size if has_gpu else min(recipe.batch_size, CPU_BENCHMARK_BATCH)
    images, labels = _random_batch(recipe, preprocessing, batch_size, hardware.device)
    state = init_state(recipe, hardware, total_steps)
    backend = make_backend(state.vit, recipe, preprocessing, hardware, parallel_plan(recipe, hardware))
    runner = StepRunner(state, StepContext(recipe, backend), total_steps)
    rows = recipe.batch_size * recipe.model.num_tokens
    threads = None if has_gpu else select_threads(recipe.threads, width=recipe.model.width, rows=rows).threads

    def run_step() -> None:
        runner.run(images, labels)
        hardware.synchronize()

    with thread_count(threads or torch.get_num_threads()):
        seconds = min(max_seconds, BENCHMARK_SECONDS)
        times = time_steps(run_step, seconds=seconds, min_steps=MIN_BENCHMARK_STEPS, threads=threads)
    # Validation images need the forward pass only, about a third of the arithmetic of a step.
    images_per_epoch = steps * recipe.batch_size + (num_images - num_train) / 3
    num_steps = recipe.epochs * images_per_epoch / batch_size
    low, likely, high = (OVERHEAD_SECONDS + num_steps * step for step in times.step_range())
    return TimeEstimate(low, likely, high, hardware, len(times.seconds), times.disturbance())


def _random_batch(
    recipe: Recipe, preprocessing: Preprocessing, batch_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images of the stored size, which is larger than the model input if training crops."""
    height, width = preprocessing.image_size
    if recipe.augment.crop:
        height, width = int(height / preprocessing.crop), int(width / preprocessing.crop)
    rng = torch.Generator().manual_seed(0)
    shape = (batch_size, preprocessing.channels, height, width)
    images = torch.randint(0, 256, shape, generator=rng).to(preprocessing.torch_dtype)
    labels = torch.randint(0, recipe.model.num_classes, (batch_size,), generator=rng)
    return images.to(device), labels.to(device)


def estimate_memory(recipe: Recipe, num_images: int, hardware: Hardware) -> float:
    """Peak memory in bytes: weights, activations and decoded images; of trained weights gradients, AdamW moments, EMA.

    Activations are those of training all weights, an upper bound.
    """
    trained, num_parameters = count_trained(recipe)
    device: Literal["gpu", "cpu"] = "gpu" if hardware.gpu_memory_bytes else "cpu"
    bytes_per_image = activation_bytes(recipe.model, hardware.precision, device).total
    preprocessing = make_preprocessing(recipe)
    height, width = (side / preprocessing.crop for side in preprocessing.image_size)
    dataset_bytes = num_images * preprocessing.channels * height * width * preprocessing.torch_dtype.itemsize
    num_values = num_parameters + trained * (4 if recipe.ema else 3)
    return PROCESS_BYTES + 4 * num_values + recipe.batch_size * bytes_per_image + dataset_bytes
