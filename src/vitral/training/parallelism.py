"""Choose the parallelism of a run from its recipe and hardware."""

from __future__ import annotations

from vitral.analysis.cost import ddp_memory
from vitral.device.cuda_graphs import collective_capture_failure
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan, choose_parallelism
from vitral.recipes.schema import Recipe
from vitral.utils.progress import LogFn, no_log


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


def check_cuda_graphs(hardware: Hardware, plan: ParallelPlan, log: LogFn = no_log) -> Hardware:
    """The hardware without CUDA graphs if the ranks' collectives cannot be captured on it. All ranks must call this."""
    if plan.mode == "single" or not hardware.cuda_graphs:
        return hardware
    if plan.mode == "fsdp":
        return hardware.without_cuda_graphs("FSDP gathers parameters while it computes")
    reason = hardware.world.first_reason(collective_capture_failure(hardware.device, hardware.world.size))
    if reason is None:
        return hardware
    log(f"no CUDA graphs: {reason}")
    return hardware.without_cuda_graphs(reason)
