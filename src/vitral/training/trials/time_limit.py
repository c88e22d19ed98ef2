"""Fit a run into a time limit: choose the number of epochs by measured speed, and stop in time if that was too many.

The number of epochs is chosen before the first step and recorded in the recipe. The learning-rate schedule therefore
ends with the run and a resumed run continues exactly; a schedule over the time that has passed would do neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from vitral.data.preprocess import to_model_input
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.inference.forward import compute_logits
from vitral.recipes.options import parse_duration
from vitral.training.head_init import fits_head, sample_rows
from vitral.training.setup import TrainingSetup
from vitral.training.timing import WARMUP_STEPS, TimeBudget
from vitral.training.trainer import Trainer
from vitral.training.trials.trainer import endless_batches, trial_trainer
from vitral.utils.progress import format_duration

MEASURED_FRACTION = 0.02  # of the time limit, at most, for timed steps
MAX_MEASURED_SECONDS = 5.0
MARGIN = 0.1  # of the time for epochs, because the speed varies
REPORT_SECONDS = 10.0  # figures and report on an idle machine; longer if the process waits for a busy CPU
VALIDATION_SAMPLE = 256  # images whose evaluation is timed
TEST_PASSES = 4  # evaluation, figures, report and calibration each compute predictions


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured durations in seconds."""

    startup: float  # until the first step is done at full speed, after the fit of a new head
    step: float
    validation: float
    evaluation: float  # calibration, evaluation, figures and report after training; 0 for pretraining


def fit_to_time_limit(
    setup: TrainingSetup, hardware: Hardware, parallel: ParallelPlan, started: float, *, is_new: bool
) -> tuple[TrainingSetup, TimeBudget | None, str | None]:
    """Reduce the epochs of a new run to those that fit; returns the setup, the budget of the run and a message."""
    recipe = setup.recipe
    if not recipe.time_limit:
        return setup, None, None
    limit = parse_duration(recipe.time_limit)
    speed = measure_speed(setup, hardware, parallel, min(MEASURED_FRACTION * limit, MAX_MEASURED_SECONDS))
    epoch_seconds = setup.steps_per_epoch * speed.step + speed.validation
    budget = TimeBudget(limit=limit, started=started, reserve=speed.validation + speed.evaluation)
    if not is_new:
        return setup, budget, None
    available = limit - (time.perf_counter() - started) - speed.startup - speed.evaluation
    epochs = min(int(available * (1 - MARGIN) / epoch_seconds), recipe.epochs)
    duration = f"{format_duration(epoch_seconds)} each"
    if speed.evaluation:
        duration += f", {format_duration(speed.evaluation)} for evaluation and report"
    if epochs >= 1:
        message = f"Time limit {recipe.time_limit}: {epochs} of {recipe.epochs} epochs ({duration})"
    else:
        epochs = 1
        message = (
            f"Time limit {recipe.time_limit}: less than one epoch fits ({duration}), so training will stop in the "
            "first one, before the learning rate has decayed"
        )
    return replace(setup, recipe=replace(recipe, epochs=epochs)), budget, message


def measure_speed(setup: TrainingSetup, hardware: Hardware, parallel: ParallelPlan, seconds: float) -> Speed:
    """Time training steps for `seconds` after the warm-up, and the evaluation of a few images. All ranks take part."""
    started, cpu_started = time.perf_counter(), time.process_time()
    trainer = trial_trainer(setup, hardware, parallel)
    batches = endless_batches(trainer)
    for images, labels in islice(batches, WARMUP_STEPS):
        trainer.step_runner.run(images, labels)
    hardware.synchronize()
    startup = time.perf_counter() - started
    step = _seconds_per_step(trainer, batches, seconds)
    per_image = _seconds_per_image(trainer)
    waiting = max((time.perf_counter() - started) / max(time.process_time() - cpu_started, 1e-3), 1.0)
    num_validation = trainer.num_evaluated_images
    # The test images are not opened before training ends, so their number is a guess, from common datasets.
    num_test = max(num_validation, len(setup.dataset.train) // 5)
    is_pretraining = setup.recipe.pretrain is not None
    report = REPORT_SECONDS * (waiting if hardware.gpu_memory_bytes is None else 1.0)
    if setup.initial_weights is not None and fits_head(setup.recipe, setup.initial_weights):
        startup += per_image * (len(sample_rows(len(setup.dataset.train))) + num_validation) / hardware.world.size
    speeds = Speed(
        startup=startup,
        step=step,
        validation=per_image * num_validation / hardware.world.size,
        evaluation=0.0 if is_pretraining else per_image * (num_validation + TEST_PASSES * num_test) + report,
    )
    return max(hardware.world.all_gather_objects([speeds]), key=lambda speed: speed.step)


def _seconds_per_step(trainer: Trainer, batches: Iterator[tuple[Tensor, Tensor]], seconds: float) -> float:
    """Mean duration of at least one step. The number of steps is a power of two, so that all ranks do equally many."""
    steps, elapsed = 1, 0.0
    while True:
        started = time.perf_counter()
        for images, labels in islice(batches, steps):
            trainer.step_runner.run(images, labels)
        trainer.hardware.synchronize()
        elapsed = max(trainer.world.all_gather_objects([time.perf_counter() - started]))
        if elapsed >= seconds / 2:
            return elapsed / steps
        steps *= 2


def _seconds_per_image(trainer: Trainer) -> float:
    """Duration of the evaluation of one image, the second time: on a GPU the first one compiles kernels."""
    images = trainer.dataset.train.images[torch.arange(min(VALIDATION_SAMPLE, len(trainer.dataset.train)))]
    images = to_model_input(images, trainer.preprocessing)
    trainer.state.eval_model.eval()
    elapsed = 0.0
    for _ in range(2):
        started = time.perf_counter()
        compute_logits(trainer.eval_forward(), images, trainer.preprocessing, trainer.hardware)
        trainer.hardware.synchronize()
        elapsed = time.perf_counter() - started
    return elapsed / len(images)
