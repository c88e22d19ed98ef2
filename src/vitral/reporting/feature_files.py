"""Features as a file, for whoever wants the vectors: NumPy, Parquet or CSV."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitral.errors import VitralError, reason
from vitral.runs.run import write_atomically

Matrix = np.ndarray[Any, np.dtype[np.float32]]


def check_features_path(path: Path | str) -> Path:
    """The path, if features can be written there as it is named: worth knowing before they are computed."""
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        ending = f"files ending in {path.suffix!r}" if path.suffix else f"a file without an ending ({path.name})"
        raise VitralError(f"features cannot be written to {ending}", f"Known endings: {', '.join(WRITERS)}")
    if path.suffix.lower() == ".parquet":
        _parquet()
    if path.is_dir():
        raise VitralError(f"{path} is a folder", f"Name a file: {path / 'features.npy'}")
    return path


def write_features(names: Sequence[str | Path], features_ND: Tensor, path: Path | str) -> Path:
    """One row an image, fp32. What the file holds follows from its ending:

    .npy        the matrix N D; the files' names in a text file beside it, one a line
    .parquet    columns `file` and `features` (a list of D numbers)
    .csv        columns `file`, `f0`, `f1`, …
    """
    path = check_features_path(path)
    files = [str(name) for name in names]
    if features_ND.ndim != 2 or len(features_ND) != len(files):
        shape = tuple(features_ND.shape)
        raise ValueError(f"features must be one row a file: {len(files)} files, features of shape {shape}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(f"cannot make the folder {path.parent}: {reason(error)}", "choose another --out") from error
    WRITERS[path.suffix.lower()](files, features_ND.detach().float().cpu().numpy(), path)
    return path


def names_beside(path: Path) -> Path:
    """features.npy → features.names.txt"""
    return path.with_suffix(".names.txt")


def write_npy(files: list[str], features: Matrix, path: Path) -> None:
    broken = [name for name in files if len(name.splitlines()) > 1]
    if broken:
        raise VitralError(
            f"the name {broken[0]!r} has a line break in it, and names stand one a line",
            f"Write {path.with_suffix('.csv').name} or {path.with_suffix('.parquet').name} instead",
        )
    content = io.BytesIO()
    np.save(content, features, allow_pickle=False)
    write_atomically(names_beside(path), _bytes("".join(f"{name}\n" for name in files)))
    write_atomically(path, content.getvalue())


def write_csv(files: list[str], features: Matrix, path: Path) -> None:
    content = io.StringIO(newline="")
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(["file", *(f"f{i}" for i in range(features.shape[1]))])
    for name, row in zip(files, features, strict=True):
        writer.writerow([name, *map(str, row)])  # str of a float32: the shortest text that reads back as the same
    write_atomically(path, _bytes(content.getvalue()))


def write_parquet(files: list[str], features: Matrix, path: Path) -> None:
    arrow, parquet = _parquet()
    readable = [name.encode(errors="backslashreplace").decode() for name in files]  # Parquet's text is UTF-8
    numbers = arrow.FixedSizeListArray.from_arrays(arrow.array(features.reshape(-1)), features.shape[1])
    content = io.BytesIO()
    table = arrow.table({"file": arrow.array(readable, arrow.string()), "features": numbers})
    parquet.write_table(table, content)
    write_atomically(path, content.getvalue())


def _parquet() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise VitralError("writing Parquet needs pyarrow", "pip install 'vitral[data]'") from error


def _bytes(text: str) -> bytes:
    """UTF-8; a file name that is not, comes out as the bytes that it is on disk."""
    return text.encode(errors="surrogateescape")


WRITERS: dict[str, Callable[[list[str], Matrix, Path], None]] = {
    ".npy": write_npy,
    ".parquet": write_parquet,
    ".csv": write_csv,
}
