"""Lazy package attributes: names that are imported on first use, so that `import vitral` does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_attributes(
    package: str, modules: Mapping[str, str], subpackages: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    `modules` maps each attribute to the module inside the package that defines it; `subpackages` are imported whole.
    """

    def get(name: str) -> object:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules, *subpackages})
