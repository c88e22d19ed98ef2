"""Data parallelism: DDP (a full replica per rank) or FSDP2 (every tensor sharded over the ranks).

Both yield the gradient of the global batch. Gradients are averaged over the ranks, so each rank scales the loss of
its part of the batch by world size / global batch size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from vitral.distributed.gradients import REDUCE_DTYPES, GradientReducer, ReduceDtype, make_ddp_reducer
from vitral.distributed.world import World
from vitral.errors import VitralError

ParallelMode = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a run is parallelised, and why."""

    mode: ParallelMode
    reason: str


def choose_parallelism(
    *,
    world_size: int,
    batch_size: int,
    grad_accum: int = 1,
    requested: Literal["auto", "ddp", "fsdp"] = "auto",
    ddp_bytes: float | None = None,
    usable_bytes: float | None = None,
) -> ParallelPlan:
    """DDP if a full replica fits each GPU, FSDP otherwise, unless one of them is requested.

    `ddp_bytes` and `usable_bytes` are the memory per GPU that DDP needs and that is available; None on CPUs.
    """
    if world_size == 1:
        return ParallelPlan(mode="single", reason="one process")
    if batch_size // grad_accum < world_size:
        raise VitralError(
            f"batch size {batch_size} with --grad-accum {grad_accum} is too small for {world_size} processes: "
            "each needs at least one image per micro-batch",
            "Increase --batch-size, reduce --grad-accum, or start fewer processes",
        )
    if requested != "auto":
        return ParallelPlan(mode=requested, reason=f"--parallel {requested}")
    if ddp_bytes is None or usable_bytes is None:
        return ParallelPlan(mode="ddp", reason="ranks on CPUs share the host memory")
    needed, usable = ddp_bytes / 2**30, usable_bytes / 2**30
    if needed <= usable:
        return ParallelPlan(mode="ddp", reason=f"about {needed:.1f} GiB fit into the {usable:.1f} GiB of each GPU")
    return ParallelPlan(mode="fsdp", reason=f"a replica needs {needed:.1f} GiB, each GPU has {usable:.1f} GiB")


def place_model(
    model: nn.Module,
    parallel: ParallelPlan,
    *,
    device: torch.device,
    world_size: int,
    precision: Literal["fp32", "bf16"],
    reduce_dtype: ReduceDtype = "fp32",
) -> None:
    """Move the model to the device in place. With FSDP, each rank keeps its shard of every parameter and blocks are
    gathered only while they compute."""
    if parallel.mode != "fsdp":
        model.to(device)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(reduce_dtype=REDUCE_DTYPES[reduce_dtype])
    if precision == "bf16":  # all-gather in bf16: half the bytes, and no bf16 copy that autocast keeps alive
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=REDUCE_DTYPES[reduce_dtype], cast_forward_inputs=False
        )
    for name, blocks in model.named_modules():
        if name.endswith("encoder.blocks"):  # a pretraining method has two encoders or more
            for block in blocks.children():
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if hasattr(model, "output_logits"):  # a pretraining method: these methods gather the parameters, as forward does
        for method in ("features", "output_logits"):
            register_fsdp_forward_method(model, method)


def make_reducer(
    model: nn.Module, parallel: ParallelPlan, world: World, reduce_dtype: ReduceDtype = "fp32"
) -> GradientReducer | None:
    """With DDP, copy the weights of rank 0 to all ranks and return the reducer of their gradients; None otherwise."""
    if parallel.mode != "ddp":
        return None
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    return make_ddp_reducer(list(model.parameters()), world, reduce_dtype)


def gradient_sync(model: Any, reducer: GradientReducer | None, is_last: bool) -> AbstractContextManager[None]:
    """Context of one micro-batch: ranks exchange gradients only in the last backward pass of an accumulated batch."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(is_last)
    return nullcontext() if reducer is None else reducer.sync(is_last)


def reshard(model: Any) -> None:
    """Free the parameters that FSDP keeps gathered after a forward pass without a backward pass."""
    if hasattr(model, "reshard"):
        model.reshard()
