"""Files to leave out of a dataset: the list that `vitral doctor --fix-list` writes, or any text file of paths."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from vitral.errors import VitralError, error_reason, truncate_list

T = TypeVar("T")
LIST_HINT = "Write one with: vitral doctor FOLDER --fix-list FILE.csv"


def read_exclude_list(file: Path, data: str) -> tuple[str, ...]:
    """Paths in a list, relative to the dataset `data` if they are below it, so that a recipe can be moved with it.

    The list is a CSV file with a column path, or a text file with one path per line. If it has a column action, only
    rows with the action "remove" count.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise VitralError(f"cannot read the list {file}: {error_reason(error)}", LIST_HINT) from error
    lines = [line for line in text.splitlines() if line.strip()]
    header = next(csv.reader(lines[:1], delimiter=_delimiter(lines)), [])
    names = [name.strip().lower() for name in header]
    if "path" in names:
        rows = csv.DictReader(io.StringIO(text), fieldnames=names, delimiter=_delimiter(lines))
        paths = [row["path"] for row in list(rows)[1:] if row["path"] and row.get("action", "remove") == "remove"]
    else:
        paths = [line.strip() for line in lines]
    root = _root(data)
    return tuple(dict.fromkeys(_relative(path, root) for path in paths))


def _delimiter(lines: Sequence[str]) -> str:
    return max(",;\t", key=lines[0].count) if lines else ","


def _root(data: str) -> Path:
    """The folder to which the paths of a recipe are relative."""
    path = Path(data)
    return path.parent if path.is_file() else path


def _relative(path: str, root: Path) -> str:
    """Relative to `root`: paths in a list are relative to the current folder or, if there is no such file, to root."""
    file = Path(path) if os.path.lexists(path) else root / path
    absolute, base = file.absolute(), root.absolute()  # not resolved: a link and its target are two files
    return str(absolute.relative_to(base) if absolute.is_relative_to(base) else absolute)


def exclude_files(
    files: dict[str, list[tuple[Path, T]]], exclude: Sequence[str], data: str
) -> tuple[dict[str, list[tuple[Path, T]]], int]:
    """The files of each split that are not excluded, and the number of those that are."""
    if not exclude:
        return files, 0
    root = _root(data).absolute()
    excluded = {root / path for path in exclude}
    remaining = {
        split: [(file, label) for file, label in items if file.absolute() not in excluded]
        for split, items in files.items()
    }
    count = sum(map(len, files.values())) - sum(map(len, remaining.values()))
    if not count:
        raise VitralError(
            f"none of the excluded files is in {data}: {truncate_list(exclude, 3)}",
            "Paths in the list are relative to the current folder or to the dataset",
        )
    return remaining, count
