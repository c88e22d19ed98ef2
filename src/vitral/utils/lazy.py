"""Names of a package that are looked up when first used, so that importing it costs no import of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazily(
    package: str, lives_in: Mapping[str, str], packages: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: names, and the modules in it where they live; packages inside it."""

    def get(name: str) -> object:
        if name in packages:
            return import_module(f"{package}.{name}")
        if name not in lives_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{lives_in[name]}"), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *lives_in, *packages})
