"""CSV lists of image files with their labels.

    path,label              one class per image
    path,labels             several, separated by | or ; as in "cat|dog"; none if empty
    path,cat,dog,bird       one column of 0 and 1 per class
    path,target             a real number per image; --data.targets age,weight names other columns

A column split is optional: train, val or test. Paths are relative to the list. Does not import torch.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitral.data.files.listing import SPLIT_NAMES, RawLabel
from vitral.data.targets import DETECT_LABELS, LabelOptions, TaskName
from vitral.errors import VitralError, did_you_mean, truncate_list

LabelledFiles = dict[str, list[tuple[Path, RawLabel]]]  # split → files with their labels
SEPARATORS = "|;"
BINARY = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
COLUMNS_HINT = (
    "Use a column label (one class), labels (several, separated by |), one column of 0 and 1 per class, "
    "or target (a number); name other columns with numbers: --data.targets age,weight"
)


@dataclass(frozen=True, kw_only=True)
class CsvList:
    """The files of a list by split, and what their labels are."""

    files: LabelledFiles
    task: TaskName
    classes: tuple[str, ...] = ()  # the columns with labels, in order; empty: the labels name the classes


@dataclass(frozen=True)
class _Row:
    line: int
    values: dict[str, str]  # by the name of the column; path, split, label, labels and target in lower case


def read_csv_list(path: Path, options: LabelOptions = DETECT_LABELS) -> CsvList:
    """Read files and labels from a CSV list. Does not check whether the files exist."""
    columns, rows = _read_rows(path)
    task, label_columns = _label_columns(path, columns, options)
    separator = _find_separator(path, rows, label_columns[0], options) if task == "multilabel" else None
    files: LabelledFiles = {"train": [], "validation": [], "test": []}
    for row in rows:
        split, file = _split_and_file(path, row)
        label: RawLabel
        if task == "classification":
            label = _class_name(path, row, label_columns[0])
        elif task == "regression":
            label = tuple(_number(path, row, column) for column in label_columns)
        elif separator is not None:
            names = row.values.get(label_columns[0], "").split(separator)
            label = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
        else:
            label = tuple(column for column in label_columns if _is_set(path, row, column))
        files[split].append((file, label))
    columns_are_classes = task == "regression" or (task == "multilabel" and separator is None)
    return CsvList(files=files, task=task, classes=label_columns if columns_are_classes else ())


def read_csv_files(path: Path) -> dict[str, list[Path]]:
    """Read the files of each split from a CSV list with a column path. Labels, if there are any, are not read."""
    columns, rows = _read_rows(path)
    if "path" not in columns:
        raise VitralError(f"{path} needs a column path", f"Its columns: {', '.join(columns) or 'none'}")
    files: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for row in rows:
        split, file = _split_and_file(path, row, "Every row needs a path")
        files[split].append(file)
    return files


def _split_and_file(path: Path, row: _Row, hint: str = "Every row needs a path and a label") -> tuple[str, Path]:
    """The split of a row, train by default, and its file."""
    split = row.values.get("split", "").lower() or "train"
    if split not in SPLIT_NAMES:
        raise VitralError(
            f"{path}, line {row.line}: unknown split {split!r}{did_you_mean(split, SPLIT_NAMES)}",
            f"Splits: {', '.join(SPLIT_NAMES)}",
        )
    if not (file := row.values.get("path", "")):
        raise VitralError(f"{path}, line {row.line}: missing path", hint)
    return SPLIT_NAMES[split], path.parent / file


def _read_rows(path: Path) -> tuple[list[str], list[_Row]]:
    """Names of the columns, and the rows. The delimiter may be a comma, semicolon or tab, as spreadsheets write."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=header.count))
            columns = [_column_name(name) for name in next(reader, [])]
            rows = [
                _Row(reader.line_num, dict(zip(columns, map(str.strip, row), strict=False)))
                for row in reader
                if any(row)
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise VitralError(f"{path} is not a list of images: {error}", "Expected CSV in UTF-8") from error
    return columns, rows


def _column_name(name: str) -> str:
    name = name.strip()
    return name.lower() if name.lower() in ("path", "split", "label", "labels", "target") else name


def _label_columns(path: Path, columns: Sequence[str], options: LabelOptions) -> tuple[TaskName, tuple[str, ...]]:
    """The task of the list and the columns that hold its labels."""
    task, others = options.task, tuple(name for name in columns if name and name not in ("path", "split"))
    if "path" not in columns or not others:
        raise VitralError(f"{path} needs the columns path and label", f"Its columns: {', '.join(columns) or 'none'}")
    if options.targets:
        if missing := [name for name in options.targets if name not in columns]:
            raise VitralError(
                f"{path} has no column {missing[0]!r}",
                f"Its columns: {', '.join(columns)}{did_you_mean(missing[0], others)}",
            )
        if task not in (None, "regression"):
            raise VitralError(f"data.targets are for regression, but the task is {task}", "Omit --data.targets")
        return "regression", options.targets
    candidates: dict[TaskName, Sequence[str]] = {
        "classification": ("label",), "multilabel": ("labels", "label"), "regression": ("target", "label"),
    }  # fmt: skip
    if task is None:
        task = "classification" if "label" in others else "regression" if "target" in others else "multilabel"
    if (column := next((name for name in candidates[task] if name in others), None)) is not None:
        return task, (column,)
    if task == "multilabel":
        return task, others
    raise VitralError(
        f"{path} has no column {candidates[task][0]} for the task {task}; its columns: {truncate_list(columns, 8)}",
        COLUMNS_HINT,
    )


def _find_separator(path: Path, rows: Sequence[_Row], column: str, options: LabelOptions) -> str | None:
    """The separator of the labels in one column; None if the columns themselves are the classes."""
    if column not in ("labels", "label"):
        return None
    if options.separator:
        return options.separator
    lines = {
        separator: next((row.line for row in rows if separator in row.values.get(column, "")), None)
        for separator in SEPARATORS
    }
    used = [separator for separator, line in lines.items() if line is not None]
    if len(used) > 1:
        raise VitralError(
            f"{path} separates labels by | (line {lines['|']}) and by ; (line {lines[';']})",
            "Choose one of them: --data.label-separator '|'",
        )
    return used[0] if used else SEPARATORS[0]


def _class_name(path: Path, row: _Row, column: str) -> str:
    if not (label := row.values.get(column, "")):
        raise VitralError(f"{path}, line {row.line}: missing label", "Every row needs a path and a label")
    return label


def _is_set(path: Path, row: _Row, column: str) -> bool:
    value = row.values.get(column, "")
    if value.lower() not in BINARY:
        raise VitralError(f"{path}, line {row.line}: {column} is {value!r}, expected 0 or 1", COLUMNS_HINT)
    return BINARY[value.lower()]


def _number(path: Path, row: _Row, column: str) -> float:
    value = row.values.get(column, "")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise VitralError(
            f"{path}, line {row.line}: {column} is {value!r}, expected a number", "Write decimals with a point: 37.5"
        )
    return number
