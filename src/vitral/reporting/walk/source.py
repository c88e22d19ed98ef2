"""Excerpts of the running source code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SourceExcerpt:
    location: str  # "vit.py · PatchEmbedding.forward"
    line: int
    text: str


def source_excerpt(function: Callable[..., Any]) -> SourceExcerpt:
    """The source of a function, without docstring and indentation."""
    lines, first_line = inspect.getsourcelines(function)
    text = inspect.cleandoc("".join(["\n", *lines]))
    if inspect.getdoc(function):
        signature, _, remainder = text.partition('"""')
        _, _, body = remainder.partition('"""')
        text = signature.rstrip() + "\n" + body.lstrip("\n")
    file = Path(inspect.getsourcefile(function) or "").name
    return SourceExcerpt(location=f"{file} · {function.__qualname__}", line=first_line, text=text.rstrip())
