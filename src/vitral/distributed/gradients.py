"""Reduction of gradients over the ranks in buckets, while the backward pass is still running.

    gradient final ─▶ its bucket full ─▶ pack into one buffer ─▶ asynchronous collective ─▶ `sync` waits and unpacks

Gradients become final when autograd has accumulated them, or earlier where a fused backward pass reports them
(`collect`). Collectives start in the fixed order of the buckets, so that all ranks agree on it. In a batch of several
micro-batches only the last backward pass communicates. All buffers are allocated once: a captured CUDA graph reads
them by address.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vitral.distributed.gather import reduce_scatter_flat, shard_bounds
from vitral.distributed.world import World, communication_backend

ReduceDtype = Literal["fp32", "bf16"]
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for the bandwidth, small enough to start early
ALIGNMENT = 64  # elements between gradients in a buffer, so that kernels can use vector loads


class Bucket(Protocol):
    """Parameters whose gradients are reduced together."""

    parameters: list[Tensor]

    def start(self) -> None:
        """Pack the gradients and start the collective."""

    def finish(self) -> None:
        """Wait for the collective and set the reduced gradients."""


class GradientReducer:
    """Average gradients over the ranks. The buckets are in the order in which their gradients become final."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.bucket_index = {parameter: i for i, bucket in enumerate(self.buckets) for parameter in bucket.parameters}
        self.pending: list[set[Tensor]] = []  # per bucket; empty outside the last backward pass of a step
        self.num_started = 0
        hook = _ReadyHook(self)
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in self.bucket_index]
        weakref.finalize(self, _remove_hooks, handles)

    @contextmanager
    def sync(self, is_last: bool) -> Iterator[None]:
        """Context of one micro-batch. Gradients are reduced in the last one and final when the context ends."""
        if not is_last:
            yield
            return
        self.pending, self.num_started = [set(bucket.parameters) for bucket in self.buckets], 0
        try:
            yield
            for bucket in self.buckets[self.num_started :]:  # with parameters that the loss does not depend on
                bucket.start()
            for bucket in self.buckets:
                bucket.finish()
        finally:
            self.pending = []

    @property
    def is_active(self) -> bool:
        """Whether the gradients of the current backward pass are exchanged."""
        return bool(self.pending)

    def collect(self, parameter: Tensor, grad: Tensor) -> None:
        """Accumulate a gradient of a fused backward pass, earlier than autograd would. Only while `is_active`."""
        if parameter.grad is None:
            parameter.grad = grad.to(parameter.dtype)  # as autograd does
        else:
            parameter.grad.add_(grad)
        self.mark_ready(parameter)

    def mark_ready(self, parameter: Tensor) -> None:
        """Start the collectives of all buckets that are complete, in order."""
        if not self.is_active:
            return
        self.pending[self.bucket_index[parameter]].discard(parameter)
        while self.num_started < len(self.buckets) and not self.pending[self.num_started]:
            self.buckets[self.num_started].start()
            self.num_started += 1


class _ReadyHook:
    """Reports accumulated gradients. Python's garbage collector does not see the hooks of a parameter, so a strong
    reference to the reducer would keep it, and the model, alive forever."""

    def __init__(self, reducer: GradientReducer) -> None:
        self.reducer = weakref.ref(reducer)

    def __call__(self, parameter: Tensor) -> None:
        if (reducer := self.reducer()) is not None:
            reducer.mark_ready(parameter)


def _remove_hooks(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def make_ddp_reducer(parameters: Sequence[Tensor], world: World, dtype: ReduceDtype = "fp32") -> GradientReducer:
    """All-reduce the gradients of replicated parameters, which are given in the order of the forward pass."""
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    groups = split_by_bytes(trained, REDUCE_DTYPES[dtype].itemsize)
    return GradientReducer([AllReduceBucket(group, world, REDUCE_DTYPES[dtype]) for group in groups])


def split_by_bytes(parameters: Sequence[Tensor], itemsize: int, bucket_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Consecutive groups that end as soon as they hold `bucket_bytes`."""
    groups: list[list[Tensor]] = []
    size = bucket_bytes
    for parameter in parameters:
        if size >= bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel() * itemsize
    return groups


class AllReduceBucket:
    """Gradients of replicated parameters: every rank receives their average.

    A gradient is freed when it has been packed; the buffer's part becomes the gradient after the reduction.
    """

    def __init__(self, parameters: list[Tensor], world: World, dtype: torch.dtype) -> None:
        self.parameters, self.world = parameters, world
        self.sizes = [aligned(parameter.numel()) for parameter in parameters]
        self.buffer = torch.zeros(sum(self.sizes), dtype=dtype, device=parameters[0].device)
        self.views = self.split(self.buffer)
        self.has_grad: list[bool] = []
        self.work: Any = None

    def split(self, buffer: Tensor) -> list[Tensor]:
        """The part of each parameter."""
        parts = zip(buffer.split(self.sizes), self.parameters, strict=True)
        return [part[: parameter.numel()].view(parameter.shape) for part, parameter in parts]

    @torch.no_grad()
    def start(self) -> None:
        self.has_grad = [parameter.grad is not None for parameter in self.parameters]
        pairs = [(p.grad, view) for p, view in zip(self.parameters, self.views, strict=True) if p.grad is not None]
        if len(pairs) < len(self.parameters):
            self.buffer.zero_()
        if pairs:
            torch._foreach_copy_([view for _, view in pairs], [grad for grad, _ in pairs])
        for parameter in self.parameters:
            parameter.grad = None
        self.work = dist.all_reduce(self.buffer, op=reduce_op(self.buffer.device, self.world), async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        wait_and_average(self.work, self.buffer, self.world)
        self.work = None
        for parameter, grad, has_grad in zip(
            self.parameters, self.split(self.buffer.float()), self.has_grad, strict=True
        ):
            parameter.grad = grad if has_grad else None


def aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def reduce_op(device: torch.device, world: World) -> Any:
    """NCCL averages; with gloo the sum is divided afterwards (`wait_and_average`).

    For a single rank, NCCL averages with a slow kernel, while its sum does nothing.
    """
    averages = communication_backend(device) == "nccl" and world.size > 1
    return dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM


def wait_and_average(work: Any, buffer: Tensor, world: World) -> None:
    """Order the current stream after a collective with `reduce_op`; with gloo, block the host."""
    work.wait()
    if world.size > 1 and communication_backend(buffer.device) != "nccl":
        buffer.mul_(1 / world.size)


def make_fsdp_reducer(
    parameters: Sequence[Tensor], sharded: Sequence[Tensor], world: World, dtype: ReduceDtype = "fp32"
) -> GradientReducer:
    """Reduce-scatter the gradients of full parameters into those of sharded ones (DTensors), in the same order."""
    shards = dict(zip(parameters, sharded, strict=True))
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    groups = split_by_bytes(trained, REDUCE_DTYPES[dtype].itemsize)
    inputs = ScatterInputs(REDUCE_DTYPES[dtype])
    return GradientReducer([ReduceScatterBucket(group, [shards[p] for p in group], world, inputs) for group in groups])


class ScatterInputs:
    """Two input buffers that all buckets share, so that full gradients exist for two buckets at a time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.size, self.turn = dtype, 0, 0
        self.buffers: list[Tensor] = []
        self.works: list[Any] = [None, None]

    def reserve(self, size: int) -> None:
        self.size = max(self.size, size)

    def next_buffer(self, size: int, device: torch.device) -> tuple[int, Tensor]:
        """Index and first `size` elements of a buffer, after waiting for the last collective that used it."""
        if not self.buffers:
            self.buffers = [torch.zeros(self.size, dtype=self.dtype, device=device) for _ in self.works]
        self.turn = 1 - self.turn
        if self.works[self.turn] is not None:
            self.works[self.turn].wait()
            self.works[self.turn] = None
        return self.turn, self.buffers[self.turn][:size]


class ReduceScatterBucket:
    """Gradients of full parameters whose shards the ranks own: each rank receives the average of its rows."""

    def __init__(self, parameters: list[Tensor], sharded: list[Any], world: World, inputs: ScatterInputs) -> None:
        self.parameters, self.sharded, self.world, self.inputs = parameters, sharded, world, inputs
        self.offsets = [0]
        for parameter in parameters:
            num_rows, row_size = len(parameter), parameter[0].numel()
            self.offsets.append(self.offsets[-1] + aligned(shard_bounds(num_rows, 0, world.size)[1] * row_size))
        device = parameters[0].device
        self.reduced = torch.zeros(self.offsets[-1], dtype=inputs.dtype, device=device)
        inputs.reserve(world.size * self.offsets[-1])
        self.has_grad: list[bool] = []
        self.work: Any = None

    @torch.no_grad()
    def start(self) -> None:
        size = self.world.size
        slot, buffer = self.inputs.next_buffer(size * self.offsets[-1], self.reduced.device)
        targets, sources = [], []
        for rank, message in enumerate(buffer.view(size, -1)):
            for parameter, offset in zip(self.parameters, self.offsets, strict=False):
                start, stop = shard_bounds(len(parameter), rank, size)
                row_size = parameter[0].numel()
                target = message[offset : offset + (stop - start) * row_size]
                if parameter.grad is None:
                    target.zero_()
                elif stop > start:
                    targets.append(target)
                    sources.append(parameter.grad[start:stop].reshape(-1))
        if targets:
            torch._foreach_copy_(targets, sources)
        self.has_grad = [parameter.grad is not None for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        op = reduce_op(buffer.device, self.world)
        self.work = self.inputs.works[slot] = reduce_scatter_flat(self.reduced, buffer, op=op, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        from torch.distributed.tensor import DTensor

        wait_and_average(self.work, self.reduced, self.world)
        self.work = None
        reduced = self.reduced.float()
        for shard, offset, has_grad in zip(self.sharded, self.offsets, self.has_grad, strict=False):
            if has_grad:
                local = shard.to_local()
                grad = reduced[offset : offset + local.numel()].view(local.shape)
                shard.grad = DTensor.from_local(
                    grad, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
                )
