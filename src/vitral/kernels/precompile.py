"""Parallel compilation of kernels before they are needed. Triton would compile each one at its first launch.

A dry run executes the code that launches the kernels, but each launch only requests the specialisation that its
arguments need.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import triton

from vitral.device.cpu import available_cpus

dry_run_active: ContextVar[bool] = ContextVar("dry_run_active", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`launch(kernel, grid)(*args)` is `kernel[grid](*args)`; in a dry run it only compiles the kernel."""
    return partial(kernel.warmup, grid=grid) if dry_run_active.get() else kernel[grid]


def precompile(dry_run: Callable[[], object]) -> None:
    """Compile all kernels that `dry_run` launches, one thread per CPU.

    Errors are ignored: a kernel that cannot be compiled fails again, with its message, when it is launched.
    """
    with suppress(Exception):
        copy_context().run(_precompile, dry_run)  # the copy restores `dry_run_active` whatever happens


def _precompile(dry_run: Callable[[], object]) -> None:
    dry_run_active.set(True)
    with _CompileThreads(available_cpus()) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        dry_run()


class _CompileThreads(ThreadPoolExecutor):
    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_compile_with_launcher, compile_kernel)


def _compile_with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """Also build the C launcher, which Triton finds in its cache when the kernel is loaded."""
    kernel = compile_kernel()
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
