"""Kernels compiled side by side, before they are needed: Triton compiles each by itself when it is first launched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import triton

from vitral.device.hardware import cores

rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What launches a kernel when it is called; in a rehearsal it only asks for the variant that the arguments need."""
    return partial(kernel.warmup, grid=grid) if rehearsing.get() else kernel[grid]


def compile_ahead(rehearsal: Callable[[], object]) -> None:
    """All kernels that `rehearsal` launches, on as many threads as there are cores. What fails here is left for later:
    whoever launches that kernel compiles it then, and is told why it cannot be."""
    with suppress(Exception):
        copy_context().run(_compile_ahead, rehearsal)  # whatever happens, nobody else is in a rehearsal afterwards


def _compile_ahead(rehearsal: Callable[[], object]) -> None:
    rehearsing.set(True)
    with _Compilers(cores()) as compilers, triton.AsyncCompileMode(compilers, ignore_errors=True):
        rehearsal()


class _Compilers(ThreadPoolExecutor):
    def submit(self, compile: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_with_launcher, compile)


def _with_launcher(compile: Callable[[], Any]) -> Any:
    """With the code in C that passes its arguments, which Triton finds again by its text when the kernel is loaded."""
    kernel = compile()
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
