"""CUDA streams and events: side streams for overlapping work, staging buffers for asynchronous uploads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class CudaEvent:
    """An event recorded on the current stream at construction."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()


class SideStream:
    """A CUDA stream whose work overlaps with the current stream until `wait`. On a CPU, work runs immediately."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], T], after: CudaEvent | None = None) -> T:
        """Launch `work` on this stream, ordered after `after` or, by default, after everything launched so far."""
        if self.stream is None:
            return work()
        self.stream.wait_event((after or CudaEvent()).event)
        with torch.cuda.stream(self.stream):
            return work()

    def wait(self) -> None:
        """Order later work of the current stream after this stream's. Does not block the host."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


@cache
def side_streams(device: torch.device, count: int) -> list[SideStream]:
    return [SideStream(device) for _ in range(count)]


class StagingBuffers:
    """A ring of pinned host buffers and their GPU counterparts, copied on a stream of their own.

    The protocol per slot: fill `host[slot]`, call `copy_to_device`, launch the work that reads the result, call
    `mark_consumed`. Call `wait_until_copied` before filling `host[slot]` again.
    """

    def __init__(self, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, count: int = 3) -> None:
        self.host = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(count)]
        self.on_device = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
        self.copied = [torch.cuda.Event(blocking=True) for _ in range(count)]
        self.consumed = [torch.cuda.Event() for _ in range(count)]
        self.device, self.stream = device, torch.cuda.Stream(device)
        # The allocator may hand out memory that kernels on the current stream are still using.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def copy_to_device(self, slot: int) -> Tensor:
        """Start the copy and order later work of the current stream after it. Does not block the host."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.consumed[slot])
            self.on_device[slot].copy_(self.host[slot], non_blocking=True)
            self.copied[slot].record()
        torch.cuda.current_stream(self.device).wait_event(self.copied[slot])
        return self.on_device[slot]

    def mark_consumed(self, slot: int) -> None:
        """Call once all work that reads `on_device[slot]` has been launched on the current stream."""
        self.consumed[slot].record(torch.cuda.current_stream(self.device))

    def wait_until_copied(self, slot: int) -> int:
        """Block the host until `host[slot]` may be overwritten; returns the slot."""
        self.copied[slot].synchronize()
        return slot
