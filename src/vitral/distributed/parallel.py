"""One model on several processes: each a whole one (ddp), or each a part of every tensor (fsdp).

Both give the gradient of the whole batch: each process computes its share of it, divided by the whole batch's size and
times the number of processes, because gradients are averaged over them. The model itself knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitral.analysis.cost import GPUS, Plan
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe

# Tables of positions are the same everywhere and never change. Newer versions of torch call the switch otherwise.
NAMES = signature(DistributedDataParallel).parameters
BUFFERS: dict[str, Any] = {next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in NAMES): False}

Name = Literal["alone", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the processes divide a training, and why."""

    name: Name
    reason: str


def way_of(recipe: Recipe, hardware: Hardware) -> Way:
    """ddp where everything fits each process, fsdp where it does not, unless the recipe says."""
    size = hardware.world.size
    if size == 1:
        return Way(name="alone", reason="one process")
    if recipe.batch // recipe.accumulate < size:
        raise VitralError(
            f"a batch of {recipe.batch} in {recipe.accumulate} part{'s' * (recipe.accumulate > 1)} is too small for "
            f"{size} processes: each needs an image at least",
            "a larger --batch, fewer --accumulate, or fewer processes",
        )
    if recipe.parallel != "auto":
        return Way(name=recipe.parallel, reason="as asked")
    if hardware.memory is None:
        return Way(name="ddp", reason="on CPUs memory is shared anyway")
    plan = Plan(
        config=recipe.model,
        gpus=size,
        batch=recipe.batch,
        accumulate=recipe.accumulate,
        precision=hardware.precision,
        optimizer=recipe.optim.name,
        ema=recipe.ema > 0 or recipe.ema_decay > 0,
        gpu=GPUS["H100"].with_memory(hardware.memory),
    )
    needed, usable = plan.memory("ddp", recipe.recompute).total / 2**30, plan.gpu.usable / 2**30
    if needed <= usable:
        return Way(name="ddp", reason=f"about {needed:.1f} GiB fit each GPU's {usable:.1f}")
    return Way(name="fsdp", reason=f"whole copies would need {needed:.1f} GiB of a GPU's {usable:.1f}")


def divide(model: nn.Module, way: Way, hardware: Hardware) -> None:
    """With fsdp: each process keeps its rows of every tensor, and blocks are whole only while they compute."""
    if way.name != "fsdp":
        model.to(hardware.device)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(hardware.device.type, (hardware.world.size,))
    bf16 = hardware.precision == "bf16"  # gathered as bf16: half the bytes, and no copy made by autocast that stays
    numbers = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if bf16
        else MixedPrecisionPolicy()
    )
    for block in model.get_submodule("encoder.blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=numbers)
    fully_shard(model, mesh=mesh, mp_policy=numbers)


def forward_of(
    model: nn.Module,
    way: Way,
    hardware: Hardware,
    recompute: bool,
    say: Callable[[str], None] = lambda sentence: None,
    images: int = 16,
) -> tuple[Callable[[Tensor], Tensor], Hardware]:
    """What the training step calls, with so many images: with ddp, gradients are averaged while the backward pass
    goes on. And the hardware as it is used: without FP8 that nobody asked for, where it turned out to be impossible."""
    alone = way.name == "alone"
    if recompute or not alone:
        reason = "activations are computed again" if recompute else way.reason
    elif hardware.fused and isinstance(model, ViT):
        from vitral.kernels import fused_model as fused

        if not (reason := fused.why_not(model, hardware, batch=images)):
            return fused.forward(model, hardware, say, images), hardware
        if not hardware.yields:
            say(f"without fused kernels: {reason}")
    else:
        reason = "it needs fused kernels"
    if hardware.yields:
        say(f"products of bf16, not of FP8: {reason}")
        return forward_of(model, way, hardware.without_fp8(reason), recompute, say, images)
    if hardware.fp8:
        raise VitralError(f"no FP8 products: {reason}", "--precision bf16, or auto")
    if way.name == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS)
    return hardware.forward(model) if alone and not recompute else hardware.compiled(model), hardware


@contextmanager
def last_part(forward: Any, last: bool) -> Iterator[None]:
    """Of a batch in parts, only the last one's backward pass speaks with the other processes."""
    if hasattr(forward, "set_requires_gradient_sync"):  # fsdp
        forward.set_requires_gradient_sync(last)
    with forward.no_sync() if hasattr(forward, "no_sync") and not last else nullcontext():  # ddp
        yield
