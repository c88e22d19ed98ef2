"""Choose the device, precision, CPU threads and parallelism of a run from its recipe."""

from __future__ import annotations

from dataclasses import replace

import torch

from vitral.analysis.cost import ddp_memory
from vitral.device.cuda_graphs import collective_capture_failure
from vitral.device.select import Hardware, select_hardware
from vitral.device.threads import select_threads
from vitral.distributed.parallel import ParallelPlan, choose_parallelism
from vitral.recipes.schema import Recipe
from vitral.training.setup import TrainingSetup
from vitral.utils.progress import LogFn, no_log


def training_hardware(setup: TrainingSetup, continues_fp8: bool = True) -> Hardware:
    """Select the hardware for a run.

    FP8 is not selected automatically for a resumed run that started without it (`continues_fp8=False`).
    """
    recipe = setup.recipe
    tokens = recipe.batch_size // recipe.grad_accum * recipe.model.num_tokens
    hardware = select_hardware(
        device=recipe.device,
        precision=recipe.precision,
        compile=recipe.compile,
        width=recipe.model.width,
        steps=setup.steps_per_epoch * recipe.epochs,
        fp8_tokens=tokens if continues_fp8 and _learns_as_well_in_fp8(recipe) else 0,
    )
    if recipe.data.resize == "native" and recipe.compile == "auto" and hardware.compile:
        reason = "native resizing has several patch grids, and each would be compiled"
        return replace(hardware, compile=False, reasons=hardware.reasons | {"compile": reason})
    return hardware


def _learns_as_well_in_fp8(recipe: Recipe) -> bool:
    """Whether learning curves showed it: with labels, from scratch or if all weights of a checkpoint are trained."""
    return recipe.pretrain is None and (not recipe.init_from or recipe.tune == "full")


def with_threads(setup: TrainingSetup, hardware: Hardware, recorded: int | None = None) -> tuple[Hardware, int]:
    """The number of CPU threads for a run, and the hardware with the reason. Sets nothing.

    `recorded` is the number that a resumed run was started with. On a GPU, and in each of several processes, it is the
    current number unless the recipe sets one.
    """
    recipe, model = setup.recipe, setup.recipe.model
    if not recipe.threads and (hardware.device.type != "cpu" or hardware.world.size > 1):
        return hardware, torch.get_num_threads()
    rows = min(recipe.batch_size, len(setup.dataset.train)) * model.num_tokens // recipe.grad_accum
    choice = select_threads(recipe.threads, width=model.width, rows=rows, recorded=recorded)
    return replace(hardware, reasons=hardware.reasons | {"threads": str(choice)}), choice.threads


def parallel_plan(recipe: Recipe, hardware: Hardware) -> ParallelPlan:
    """DDP or FSDP for several processes, decided by the estimated memory per GPU unless the recipe names one."""
    world_size, ddp_bytes, usable_bytes = hardware.world.size, None, None
    if world_size > 1 and recipe.parallel == "auto" and hardware.gpu_memory_bytes is not None:
        ddp_bytes, usable_bytes = ddp_memory(
            recipe.model,
            gpu_memory_bytes=hardware.gpu_memory_bytes,
            world_size=world_size,
            batch_size=recipe.batch_size,
            grad_accum=recipe.grad_accum,
            precision=hardware.precision,
            optimizer=recipe.optim.name,
            ema=recipe.ema > 0 or recipe.ema_decay > 0,
            activation_checkpointing=recipe.activation_checkpointing,
        )
    return choose_parallelism(
        world_size=world_size,
        batch_size=recipe.batch_size,
        grad_accum=recipe.grad_accum,
        requested=recipe.parallel,
        ddp_bytes=ddp_bytes,
        usable_bytes=usable_bytes,
    )


def check_cuda_graphs(hardware: Hardware, parallel: ParallelPlan, log: LogFn = no_log) -> Hardware:
    """The hardware without CUDA graphs if the ranks' collectives cannot be captured on it. All ranks must call this."""
    if parallel.mode == "single" or not hardware.cuda_graphs:
        return hardware
    if parallel.mode == "fsdp":
        return hardware.without_cuda_graphs("FSDP gathers parameters while it computes")
    reason = collective_capture_failure(hardware.device, hardware.world)
    if reason is None:
        return hardware
    log(f"no CUDA graphs: {reason}")
    return hardware.without_cuda_graphs(reason)
