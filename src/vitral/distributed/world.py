"""The ranks of a distributed run: this process's rank, its part of the work, and the collectives.

torchrun sets RANK and WORLD_SIZE, also under Slurm and Kubernetes. A process started without it is a world of size 1,
in which nothing is communicated.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from vitral.errors import VitralError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # a rank that does not respond for this long is considered dead


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all ranks.

    All methods except `shard_range` are collectives: every rank must call them in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # rank within this machine

    @property
    def is_rank0(self) -> bool:
        """Rank 0 writes files and prints."""
        return self.rank == 0

    def shard_range(self, count: int) -> range:
        """This rank's indices of `count` items. The shards partition the items; their sizes differ by at most 1."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def all_gather_objects(self, items: Sequence[T]) -> list[T]:
        """Concatenate every rank's picklable items in rank order, on every rank."""
        if self.size == 1:
            return list(items)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, list(items))
        return [item for rank_items in gathered for item in rank_items]

    def first_reason(self, reason: str | None) -> str | None:
        """The first rank's reason that is not None, so that all ranks take the same decision."""
        return next((item for item in self.all_gather_objects([reason]) if item is not None), None)

    def broadcast_from_rank0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every rank. If it fails, every rank raises its error."""
        if self.size == 1:
            return function()
        attempt = _Attempt(lambda: pickle.dumps(function()), self.rank) if self.is_rank0 else None
        (outcome,) = self.all_gather_objects([] if attempt is None else [(attempt.result, attempt.failure)])
        if attempt is not None:
            attempt.raise_error()
        result, failure = outcome
        if failure is not None:
            raise VitralError(*failure)
        return cast(T, pickle.loads(result))

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank, first on local rank 0 of each machine. If it fails on one rank, all raise."""
        if self.size == 1:
            return function()
        attempt = None
        for is_turn in (self.local_rank == 0, self.local_rank != 0):
            if is_turn:
                attempt = _Attempt(function, self.rank)
            failures = self.all_gather_objects([attempt.failure if attempt and is_turn else None])
            if attempt is not None:
                attempt.raise_error()
            if failure := next(filter(None, failures), None):
                raise VitralError(*failure)
        assert attempt is not None
        return cast(T, attempt.result)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's tensor (equal shapes) along the first dimension, in rank order."""
        if self.size == 1:
            return tensor
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor.contiguous())
        return torch.cat(gathered)

    def all_gather_rows(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Concatenate the ranks' tensors, whose numbers of rows may differ; returns the index of this rank's first row.

        The numbers of rows are exchanged on the CPU, so that the device is not synchronised.
        """
        counts: list[int] = self.all_gather(torch.tensor([len(tensor)])).tolist()
        if len({*counts}) == 1:
            return self.all_gather(tensor), self.rank * len(tensor)
        padded = torch.cat([tensor, tensor.new_zeros(max(counts) - len(tensor), *tensor.shape[1:])])
        gathered = self.all_gather(padded).split(max(counts))
        rows = torch.cat([rank_rows[:count] for rank_rows, count in zip(gathered, counts, strict=True)])
        return rows, sum(counts[: self.rank])

    @contextmanager
    def rank_failure_guard(self, resume_command: str) -> Iterator[None]:
        """Turn the communication error that follows the death of another rank into a VitralError."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _is_communication_error(error):
                raise
            raise VitralError(
                f"rank {self.rank} of {self.size} lost the connection to another rank ({_first_line(error)})",
                f"torchrun reports the rank that failed first. Resume with: {resume_command}",
            ) from error


SINGLE_PROCESS = World()


def world_from_env() -> World:
    """Rank and world size from the environment variables that torchrun sets."""
    size = _int_from_env("WORLD_SIZE", 1)
    if size == 1:
        return SINGLE_PROCESS
    rank = _int_from_env("RANK", -1)
    if not 0 <= rank < size:
        raise VitralError(
            f"WORLD_SIZE is {size}, but RANK is {os.environ.get('RANK') or 'not set'}",
            "Start the processes with torchrun, or unset WORLD_SIZE",
        )
    return World(rank=rank, size=size, local_rank=_int_from_env("LOCAL_RANK", rank))


def init_distributed(world: World, device: torch.device) -> None:
    """Join the process group and make `device` the current GPU. Does nothing for one process or a second time.

    Tensors on GPUs are exchanged over NCCL; flags and pickled objects, which are on the CPU, over gloo.
    """
    if world.size == 1 or dist.is_initialized():
        return
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store keeps addresses of dead processes
    try:
        store, rank, size = next(rendezvous("env://", world.rank, world.size, timeout=TIMEOUT))
        store = PrefixStore(f"vitral/{restarts}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise VitralError(
            f"rank {world.rank} of {world.size} cannot join the process group: {_first_line(error)}",
            "Start the processes with torchrun, which sets MASTER_ADDR and MASTER_PORT",
        ) from error
    atexit.register(_leave_process_group)


@cache
def communication_backend(device: torch.device) -> str:
    """The backend that exchanges tensors on this device: nccl or gloo."""
    return str(dist.group.WORLD._get_backend(device).name())  # type: ignore[union-attr]


def _leave_process_group() -> None:
    """Destroy the process group before the interpreter exits; its threads would abort the exit otherwise."""
    if dist.is_initialized():
        gc.collect()  # models in reference cycles may hold the group
        dist.destroy_process_group()


class AsyncFlags:
    """Boolean flags that any rank raises and all ranks observe at the same step, without waiting for each other.

    The all-reduce overlaps with the next step: flags raised before a step are visible to all ranks after it.
    """

    def __init__(self, world: World, flags: int) -> None:
        self.world, self.flags = world, flags
        self.pending: tuple[Tensor, Any] | None = None

    def exchange(self, *raised: bool) -> tuple[bool, ...]:
        """Raise flags; returns those that any rank raised in the previous call. One process sees its own at once."""
        if self.world.size == 1:
            return raised
        previous = self._finish_pending()
        flags = torch.tensor(raised, dtype=torch.int32)
        self.pending = flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)
        return previous

    def flush(self, *raised: bool) -> tuple[bool, ...]:
        """Raise flags and wait: returns all flags raised since the previous exchange, including these."""
        previous = self.exchange(*raised)
        if self.pending is None:
            return previous
        return tuple(now or before for now, before in zip(self._finish_pending(), previous, strict=True))

    def _finish_pending(self) -> tuple[bool, ...]:
        if self.pending is None:
            return (False,) * self.flags
        (flags, work), self.pending = self.pending, None
        work.wait()
        return tuple(bool(flag) for flag in flags.tolist())


class _Attempt:
    """A call on this rank. If it fails, `failure` is what the other ranks raise, as message and hint.

    An exception is not sent itself: another rank may not be able to unpickle it.
    """

    def __init__(self, function: Callable[[], Any], rank: int) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.failure: tuple[str, str] | None = None
        try:
            self.result = function()
        except VitralError as error:
            self.error, self.failure = error, (error.what, error.hint)
        except OSError as error:
            self.failure = f"{error.filename or 'system error'}: {error.strerror or error}", ""
            self.error = VitralError(*self.failure)
        except BaseException as error:  # of any kind: the other ranks wait for the outcome
            cause = ": ".join(filter(None, (type(error).__name__, str(error))))
            self.error = error
            self.failure = f"rank {rank} failed with {cause}", f"The traceback is in the output of rank {rank}"

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


def _int_from_env(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    try:
        return int(value) if value else default
    except ValueError as error:
        raise VitralError(
            f"{name} must be an integer, got {value!r}", "Start the processes with torchrun, which sets this variable"
        ) from error


def _is_communication_error(error: RuntimeError) -> bool:
    """Gloo raises plain RuntimeErrors that name its source files."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        marker in text for marker in ("gloo", "Connection closed by peer", "NCCL")
    )


def _first_line(error: Exception) -> str:
    """The first line of an error message without gloo's leading source location."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2][:120]
