"""The processes that work together: who this one is, its share of the work, and how they tell each other things.

torchrun, by itself or inside Slurm and Kubernetes, says RANK and WORLD_SIZE. A process that was started alone is a
world of one, and everything here costs it nothing.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from vitral.errors import VitralError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # a process that is silent for longer is taken for dead


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all of them. Every method but `share` must be called by all, in the same order."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine

    @property
    def first(self) -> bool:
        """The one that writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This process's part of `count` things: all parts together are each thing once, and differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, mine: Sequence[T]) -> list[T]:
        """Everybody's things, in the order of the ranks; every process gets all."""
        if self.size == 1:
            return list(mine)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(mine))
        return [thing for part in found for thing in part]

    def tell(self, make: Callable[[], T]) -> T:
        """What the first process makes, told to all; if it fails, all fail with its reason."""
        if self.size == 1:
            return make()
        return self.gather([_tried(make)] if self.first else [])[0].value()

    def each(self, make: Callable[[], T]) -> T:
        """Everybody makes it; if one fails, all fail with its reason. First on a machine comes first, alone."""
        if self.size == 1:
            return make()
        mine = _tried(make) if self.local_rank == 0 else None
        for outcome in self.gather([mine and mine.failed]):
            if outcome:
                raise VitralError(*outcome)
        return mine.value() if mine else make()

    def sum(self, tensor: Tensor) -> Tensor:
        """Added up over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def stack(self, mine: Tensor) -> Tensor:
        """Everybody's tensor of one shape, one below the other along the first dimension."""
        if self.size == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    @contextmanager
    def guarded(self, go_on: str) -> Iterator[None]:
        """In here, a process that is gone is an error that says so, and how to go on."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _lost(error):
                raise
            raise VitralError(
                f"process {self.rank} of {self.size} has lost the others: one of them ended ({_short(error)})",
                f"torchrun's report names the first that failed; go on with: {go_on}",
            ) from error


ALONE = World()


def from_environment() -> World:
    """Who this process is, as torchrun says."""
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return ALONE
    rank = _number("RANK", -1)
    if not 0 <= rank < size:
        raise VitralError(
            f"WORLD_SIZE is {size} and RANK is {os.environ.get('RANK', 'not set')}",
            "start the processes with torchrun, or unset WORLD_SIZE",
        )
    return World(rank=rank, size=size, local_rank=_number("LOCAL_RANK", rank))


def join(world: World, backend: str) -> None:
    """Meet the other processes, once."""
    if world.size == 1 or dist.is_initialized():
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store still has dead processes' addresses
    try:
        store, rank, size = next(rendezvous("env://", world.rank, world.size, timeout=PATIENCE))
        store = PrefixStore(f"vitral/{attempt}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise VitralError(
            f"process {world.rank} of {world.size} cannot meet the others: {_short(error)}",
            "start the processes with torchrun: it says where they meet (MASTER_ADDR, MASTER_PORT)",
        ) from error
    atexit.register(leave)


def leave() -> None:
    """Before the interpreter ends: a thread of the group's that has something to give back then would abort it."""
    if dist.is_initialized():
        gc.collect()  # models that hold the group in a circle
        dist.destroy_process_group()


class Agreement:
    """Flags that one process raises and all see, at the same step: nobody waits for it and no device is asked.

    The processes compare their flags while they compute; what was raised before a step is known to all after it.
    """

    def __init__(self, world: World, flags: int) -> None:
        self.world, self.flags = world, flags
        self.asked: tuple[Tensor, Any] | None = None

    def known(self, *mine: bool) -> tuple[bool, ...]:
        """Raise flags; returns those that all agree were raised. In a world of one: these, at once."""
        if self.world.size == 1:
            return mine
        found = (False,) * self.flags
        if self.asked is not None:
            raised, work = self.asked
            work.wait()
            found = tuple(bool(flag) for flag in raised.tolist())
        raised = torch.tensor(mine, dtype=torch.int32)
        self.asked = raised, dist.all_reduce(raised, op=dist.ReduceOp.MAX, async_op=True)
        return found

    def finish(self, *mine: bool) -> tuple[bool, ...]:
        """What was raised until now, where all meet anyway and may wait: at the end of an epoch."""
        before = self.known(*mine)
        if self.asked is None:
            return before
        (raised, work), self.asked = self.asked, None
        work.wait()
        return tuple(bool(now) or then for now, then in zip(raised.tolist(), before, strict=True))


@dataclass(frozen=True)
class _Outcome:
    """What a process made, or the two lines that say why it could not."""

    made: Any = None
    failed: tuple[str, str] | None = None

    def value(self) -> Any:
        if self.failed is not None:
            raise VitralError(*self.failed)
        return self.made


def _tried(make: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(made=make())
    except VitralError as error:
        return _Outcome(failed=(error.what, error.hint))
    except OSError as error:
        return _Outcome(failed=(f"{error.filename or 'the system'}: {error.strerror or error}", ""))


def _number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "")
    try:
        return int(value) if value else otherwise
    except ValueError as error:
        raise VitralError(f"{name} must be a whole number, not {value!r}", "torchrun sets it") from error


def _lost(error: RuntimeError) -> bool:
    """Gloo's errors are plain RuntimeErrors that name their source file."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "Connection closed by peer" in text or "NCCL" in text


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rpartition("] ")[2][:120]
