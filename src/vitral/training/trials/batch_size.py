"""The batch size that fits into the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from vitral.device.memory import allocated_bytes, free_bytes, peak_bytes, release_cached_memory
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.training.out_of_memory import GIB, out_of_memory_error
from vitral.training.setup import TrainingSetup
from vitral.training.trainer import Trainer
from vitral.training.trials.trainer import trial_trainer

MEMORY_FRACTION = 0.8  # of the free GPU memory; the rest is for validation, captured graphs and fragmentation
MIN_STEPS_PER_EPOCH = 16  # larger batches leave too few updates


def resolve_batch_size(
    setup: TrainingSetup, hardware: Hardware, parallel: ParallelPlan
) -> tuple[TrainingSetup, str | None]:
    """Replace `--batch-size auto` by a number, so that the recipe is complete; returns a message about the choice too.

    On a CPU or with several processes, it is the recipe's own batch size.
    """
    recipe = setup.recipe
    if not recipe.auto_batch_size:
        return setup, None
    fixed = replace(recipe, auto_batch_size=False)
    setup = replace(setup, recipe=fixed)
    free = free_bytes(hardware.device)
    if free is None or hardware.world.size > 1:
        where = "on a CPU" if free is None else "with several processes"
        return setup, f"Batch size {recipe.batch_size}: the recipe's; it is not measured {where}"
    occupied = allocated_bytes(hardware.device)  # by tensors of the calling program, for example in a notebook
    budget = occupied + int(free * MEMORY_FRACTION)
    maximum = max(len(setup.dataset.train) // MIN_STEPS_PER_EPOCH, recipe.batch_size)
    # Eager steps need no compilation, and at least as much memory as captured and fused ones.
    eager = replace(hardware, compile=False, cuda_graphs=False, use_triton=False, fp8=False, fp8_is_auto=False)
    measure = partial(step_peak_bytes, trial_trainer(setup, eager, parallel))
    sizes = measure_sizes(measure, recipe.batch_size, maximum, budget)
    del measure  # and the model with it
    release_cached_memory(hardware.device)
    if not sizes:
        raise out_of_memory_error(replace(fixed, batch_size=1), hardware)
    size = max(sizes)
    message = (
        f"Batch size {size}: needs {(sizes[size] - occupied) / GIB:.1f} of {free / GIB:.0f} GiB of free GPU memory"
    )
    if 2 * size > maximum:
        message += f", and leaves at least {MIN_STEPS_PER_EPOCH} steps per epoch"
    if size != recipe.batch_size and not recipe.optim.lr_base_batch_size:
        message += f"; the learning rate stays {recipe.optim.lr:g} (scale it with --optim.lr-base-batch-size N)"
    return replace(setup, recipe=replace(fixed, batch_size=size)), message


def measure_sizes(peak_bytes: Callable[[int], int | None], start: int, maximum: int, budget: int) -> dict[int, int]:
    """Peak memory by batch size, of sizes that fit into `budget`.

    The size is doubled from `start` up to `maximum`, or halved until one fits. `peak_bytes` returns None if a batch
    does not fit into the GPU's memory.
    """
    fitting: dict[int, int] = {}
    size = start
    while size >= 1:
        peak = peak_bytes(size)
        if peak is not None and peak <= budget:
            fitting[size] = peak
        elif not fitting:
            size //= 2
            continue
        if size not in fitting or size < start or 2 * size > maximum:
            break
        size *= 2
    return fitting


def step_peak_bytes(trainer: Trainer, batch_size: int) -> int | None:
    """Peak GPU memory of a training step on random images; None if there is not enough memory."""
    device = trainer.hardware.device

    def two_steps() -> None:  # the first one allocates the optimizer's state
        shape = (batch_size, *trainer.dataset.train.images.shape[1:])
        images = torch.randint(0, 256, shape, device=device).to(trainer.dataset.train.images.dtype)
        labels = trainer.loader.labels[:1].expand(batch_size, *trainer.loader.labels.shape[1:]).contiguous()
        for _ in range(2):
            trainer.step_runner.run(images, labels)

    peak = peak_bytes(device, two_steps)
    trainer.state.model.zero_grad(set_to_none=True)
    return peak
