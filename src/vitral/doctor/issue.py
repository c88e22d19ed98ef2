"""Something that a training would suffer from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    kind: str
    level: Level
    what: str  # for people, one line
    todo: str
    files: tuple[str, ...] = ()  # empty where it is about the whole folder
    details: tuple[str, ...] = ()  # one a file, where they differ


def listed(
    kind: str,
    level: Level,
    what: str,
    files: Sequence[str],
    todo: str,
    thing: str = "image",
    *,
    details: Sequence[str] = (),
) -> Trouble:
    """`3 images unreadable   photos/a.jpg (truncated), photos/b.jpg …`"""
    count = f"{len(files):,} {thing}{'s' if len(files) > 1 else ''}"
    first = f"{files[0]} ({details[0].split(';')[0]})" if details else files[0]
    shown = first + (f", {files[1]}" if len(files) > 1 else "") + (" …" if len(files) > 2 else "")
    return Trouble(kind=kind, level=level, what=f"{count} {what}   {shown}", todo=todo, files=tuple(files),
                   details=tuple(details))  # fmt: skip
