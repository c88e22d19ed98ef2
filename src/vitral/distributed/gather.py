"""All-gather of sharded tensors: a group of tensors per message, and the next group is prefetched.

A tensor is sharded along one dimension as FSDP2 shards parameters along the first: rank r holds the r-th of equal
chunks; the last chunks may be smaller or empty. Tensors of all dtypes are sent as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vitral.distributed.world import World

ALIGNMENT = 64  # bytes between tensors in a buffer
# Newer PyTorch versions renamed these functions.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last index + 1 of a rank's chunk of a dimension."""
    chunk = -(-length // world_size)
    return min(rank * chunk, length), min((rank + 1) * chunk, length)


class ShardSpec(NamedTuple):
    """A full tensor and the dimension along which it is sharded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def shard_shape(self, rank: int, world_size: int) -> tuple[int, ...]:
        start, stop = shard_bounds(self.shape[self.dim], rank, world_size)
        return *self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :]


class ShardGather:
    """Several sharded tensors that are gathered together. `shards` are this rank's parts; fill them before `start`."""

    def __init__(self, specs: Sequence[ShardSpec], world: World, device: torch.device) -> None:
        self.specs, self.world = list(specs), world
        sizes = [prod(spec.shard_shape(0, world.size)) * spec.dtype.itemsize for spec in specs]  # rank 0 has the most
        self.offsets = aligned_offsets(sizes)
        self.message = torch.zeros(self.offsets[-1], dtype=torch.uint8, device=device)
        self.shards = [self.shard(self.message, index, world.rank) for index in range(len(specs))]
        self.full_offsets = aligned_offsets([spec.num_bytes for spec in specs])

    def shard(self, message: Tensor, index: int, rank: int) -> Tensor:
        """A tensor's part in the message of a rank."""
        spec = self.specs[index]
        return carve(message, self.offsets[index], spec.shard_shape(rank, self.world.size), spec.dtype)

    def start(self, messages: Tensor) -> Any:
        """Gather the messages of all ranks into `messages`; returns a handle to wait for."""
        return all_gather_flat(messages, self.message, async_op=True)

    def empty_tensors(self, buffer: Tensor) -> list[Tensor]:
        """The full tensors in a buffer of bytes."""
        parts = zip(self.full_offsets, self.specs, strict=False)
        return [carve(buffer, offset, spec.shape, spec.dtype) for offset, spec in parts]

    @torch.no_grad()
    def unpack(self, messages: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy every rank's shards into the full tensors."""
        sources, targets = [], []
        size = self.world.size
        for rank, message in enumerate(messages.view(size, -1)):
            for index, (spec, tensor) in enumerate(zip(self.specs, tensors, strict=True)):
                start, stop = shard_bounds(spec.shape[spec.dim], rank, size)
                if stop > start:
                    sources.append(as_copyable(self.shard(message, index, rank)))
                    targets.append(as_copyable(tensor).narrow(spec.dim, start, stop - start))
        torch._foreach_copy_(targets, sources)


class GatherRing:
    """A few buffers for gathered tensors, reused for one group after another.

    `fetch` returns the full tensors of a group and starts to gather the next one, which overlaps with computation.
    """

    def __init__(self, groups: Sequence[ShardGather], num_slots: int = 3) -> None:
        self.groups = list(groups)
        world, device = groups[0].world, groups[0].message.device
        message_bytes = max(len(group.message) for group in groups) * world.size
        full_bytes = max(group.full_offsets[-1] for group in groups)
        self.free = [_Slot(message_bytes, full_bytes, device) for _ in range(num_slots)]
        self.slots: dict[int, _Slot] = {}  # by group, least recently used first

    def fetch(self, index: int, prefetch: int | None = None) -> list[Tensor]:
        """The tensors of a group, valid until `num_slots` - 1 other groups have been requested."""
        slot = self._request(index)
        tensors = slot.wait()
        if prefetch is not None:
            self._request(prefetch)
            self._request(index)  # most recently used again
        return tensors

    def discard(self) -> None:
        """Drop all gathered tensors, after the shards have changed."""
        for slot in self.slots.values():
            slot.wait()
        self.free += self.slots.values()
        self.slots.clear()

    def _request(self, index: int) -> _Slot:
        slot = self.slots.pop(index, None)
        if slot is None:
            slot = self.free.pop() if self.free else self.slots.pop(next(iter(self.slots)))
            slot.wait()
            slot.start(self.groups[index])
        self.slots[index] = slot
        return slot


class _Slot:
    def __init__(self, message_bytes: int, full_bytes: int, device: torch.device) -> None:
        self.messages = torch.empty(message_bytes, dtype=torch.uint8, device=device)
        self.buffer = torch.empty(full_bytes, dtype=torch.uint8, device=device)
        self.work: Any = None
        self.tensors: list[Tensor] = []

    def start(self, group: ShardGather) -> None:
        self.group, self.tensors = group, group.empty_tensors(self.buffer)
        self.filled = self.messages[: group.world.size * len(group.message)]
        self.work = group.start(self.filled)

    def wait(self) -> list[Tensor]:
        if self.work is not None:
            self.work.wait()
            self.group.unpack(self.filled, self.tensors)
            self.work = None
        return self.tensors


def carve(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a buffer of bytes."""
    return buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def aligned_offsets(sizes: Sequence[int]) -> list[int]:
    """Offsets of parts of these sizes in a buffer; the last one is the length of the buffer."""
    offsets = [0]
    for size in sizes:
        offsets.append(-(-(offsets[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return offsets


def as_copyable(tensor: Tensor) -> Tensor:
    """View FP8 as bytes, which every device can copy."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
