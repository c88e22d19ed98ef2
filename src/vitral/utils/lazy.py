"""Imports outside the usual order: names that are imported on first use, and modules that are imported in advance.

`import vitral` does not import torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import NoReturn

from vitral.errors import VitralError


def lazy_attributes(
    package: str,
    modules: Mapping[str, str],
    subpackages: Sequence[str] = (),
    right_calls: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    `modules` maps each attribute to the module inside the package that defines it; `subpackages` are imported whole.
    `right_calls` maps names that do not exist to what to call instead.
    """

    def get(name: str) -> object:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in modules:
            hint = f"; use {right_calls[name]}" if name in right_calls else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules, *subpackages})


def name_right_call(package: str, right_call: str) -> None:
    """Let `package(...)`, which fails because a module is not callable, name what to call instead."""

    class UncallableModule(ModuleType):
        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise VitralError(f"{package} is a module, not a function", f"Use {right_call}")

    sys.modules[package].__class__ = UncallableModule


@contextmanager
def import_meanwhile(module: str) -> Iterator[None]:
    """Import a module in another thread, for use after the context.

    Saves time where the context waits for files or other processes. If importing fails, so will the later import.
    """

    def load() -> None:
        with suppress(Exception):
            import_module(module)

    thread = threading.Thread(target=load, name=f"import {module}", daemon=True)
    thread.start()
    yield
    thread.join()  # two threads that import parts of one package could see it half initialised
