"""The number of CPU threads: set by the user, or chosen by a short measurement.

On a busy machine, several threads can be many times slower than one, because each operation waits for its slowest
thread: with eight other processes on two cores, a training step of the digits recipe took 3.7 s with two threads and
0.2 s with one. Sums in another number of threads round differently, so a run keeps the number it was started with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vitral.device.cpu import available_cpus
from vitral.errors import VitralError
from vitral.utils.text import count_text

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SECONDS_PER_CANDIDATE = 0.12
MIN_SPEEDUP = 1.15  # of fewer threads over all, so that noise does not decide
MAX_GEMM_FLOPS = 5e7  # a few milliseconds on one core
IDLE_LOAD = 0.3  # load average below which only small models are measured


@dataclass(frozen=True, kw_only=True)
class ThreadChoice:
    """A number of threads and the reason for it."""

    threads: int
    reason: str

    def __str__(self) -> str:
        return f"{count_text(self.threads, 'thread')} ({self.reason})"


def select_threads(
    requested: int = 0, *, width: int, rows: int, recorded: int | None = None, backward: bool = True
) -> ThreadChoice:
    """The number of threads for a model of this width on batches of this many tokens (`rows`). Sets nothing.

    In this order: `requested` unless it is 0, the number that a resumed run `recorded`, the environment variables of
    VARIABLES, a measurement.
    """
    current = torch.get_num_threads()
    if requested < 0:
        raise VitralError(f"--threads must be at least 0, got {requested}", "0 measures which number is fastest")
    if requested:
        return ThreadChoice(threads=requested, reason="--threads")
    if recorded:
        return ThreadChoice(threads=recorded, reason="as the run was started")
    if variable := next((name for name in VARIABLES if os.environ.get(name)), None):
        return ThreadChoice(threads=current, reason=variable)
    maximum = min(current, available_cpus())
    if maximum == 1 or (load_average() < IDLE_LOAD and gemm_flops(width, rows) >= MAX_GEMM_FLOPS):
        return ThreadChoice(threads=maximum, reason="one per core")
    rows = max(min(rows, int(MAX_GEMM_FLOPS / gemm_flops(width, 1))), 8)
    return fastest_threads(_mlp_step(width, rows, backward), maximum)


def fastest_threads(step: Callable[[], object], maximum: int) -> ThreadChoice:
    """Time `step` with all threads, a half and a quarter of them, and one."""
    candidates = sorted({maximum, maximum // 2, maximum // 4, 1} - {0}, reverse=True)
    seconds = {}
    for threads in candidates:
        with thread_count(threads):
            seconds[threads] = _seconds_per_call(step)
    best = min(candidates, key=lambda threads: seconds[threads])
    if seconds[maximum] < MIN_SPEEDUP * seconds[best]:
        return ThreadChoice(threads=maximum, reason="measured: the fastest")
    busy = ", the machine is busy" if load_average() > available_cpus() / 2 else ""
    return ThreadChoice(threads=best, reason=f"measured: {maximum} threads are slower{busy}")


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Compute with this many threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_average() -> float:
    """Processes that ran or waited for a CPU, averaged over the last minute; 0 if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def gemm_flops(width: int, rows: int) -> float:
    """FLOPs of the first linear layer of an MLP block."""
    return 2.0 * rows * width * 4 * width


def _mlp_step(width: int, rows: int, backward: bool) -> Callable[[], object]:
    """An MLP block, which does most of the work of a ViT. Draws from a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator)
    expand = torch.randn(4 * width, width, generator=generator).requires_grad_(backward)
    project = torch.randn(width, 4 * width, generator=generator).requires_grad_(backward)

    def step() -> object:
        output = F.linear(F.gelu(F.linear(x, expand)), project).square().mean()
        return torch.autograd.grad(output, [expand, project]) if backward else output

    return step


def _seconds_per_call(step: Callable[[], object]) -> float:
    """Mean duration after a first call, which starts the threads; that call alone if it takes longer than allowed."""
    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    if first > SECONDS_PER_CANDIDATE:
        return first
    started, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < SECONDS_PER_CANDIDATE:
        step()
        calls += 1
    return elapsed / max(calls, 1)
