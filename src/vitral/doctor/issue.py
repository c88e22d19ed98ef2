"""`Issue`, one problem of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Issue:
    kind: str  # stable identifier, such as "unreadable"
    level: Level
    message: str  # one line, with up to two of the files
    fix: str
    files: tuple[str, ...] = ()  # empty if the issue concerns the dataset as a whole
    details: tuple[str, ...] = ()  # one per file; empty if the message contains everything


def file_issue(
    kind: str,
    level: Level,
    description: str,
    files: Sequence[str],
    fix: str,
    *,
    details: Sequence[str] = (),
    count: int | None = None,
) -> Issue:
    """An issue of several files: `3 unreadable files   photos/a.jpg (truncated), photos/b.jpg, ...`

    description: Follows the count; "(s)" becomes "s" or nothing.
    count: The number of files if omitted.
    """
    count = len(files) if count is None else count
    first = f"{files[0]} ({details[0].split(';')[0]})" if details else files[0]
    examples = ", ".join([first, *files[1:2], *(["..."] if len(files) > 2 else [])])
    counted = f"{count:,} {description.replace('(s)', '' if count == 1 else 's')}"
    message = f"{counted}   {examples}"
    return Issue(kind=kind, level=level, message=message, fix=fix, files=tuple(files), details=tuple(details))
