"""Write feature vectors to NumPy, Parquet or CSV files."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitral.errors import VitralError, error_reason
from vitral.utils.atomic import atomic_write

FeatureMatrix = np.ndarray[Any, np.dtype[np.float32]]


def check_features_path(path: Path | str) -> Path:
    """Check that features can be written to this path, before they are computed."""
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        target = f"a {path.suffix} file" if path.suffix else f"a file without extension ({path.name})"
        raise VitralError(f"cannot write features to {target}", f"Supported extensions: {', '.join(WRITERS)}")
    if path.suffix.lower() == ".parquet":
        _import_parquet()
    if path.is_dir():
        raise VitralError(f"{path} is a folder", f"Pass a file name: {path / 'features.npy'}")
    return path


def write_features(names: Sequence[str | Path], features_ND: Tensor, path: Path | str) -> Path:
    """Write one fp32 row per image. The extension selects the format:

    .npy        matrix (N, D); the file names are in a text file next to it, one per line
    .parquet    columns `file` and `features` (a list of D numbers)
    .csv        columns `file`, `f0`, `f1`, ...
    """
    path = check_features_path(path)
    files = [str(name) for name in names]
    if features_ND.ndim != 2 or len(features_ND) != len(files):
        shape = tuple(features_ND.shape)
        raise ValueError(f"expected features of shape ({len(files)}, D), one row per file, got {shape}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(f"cannot create {path.parent}: {error_reason(error)}", "Choose another --out") from error
    WRITERS[path.suffix.lower()](files, features_ND.detach().float().cpu().numpy(), path)
    return path


def names_path(path: Path) -> Path:
    """features.npy → features.names.txt"""
    return path.with_suffix(".names.txt")


def write_npy(files: list[str], features: FeatureMatrix, path: Path) -> None:
    multiline = [name for name in files if len(name.splitlines()) > 1]
    if multiline:
        raise VitralError(
            f"the file name {multiline[0]!r} contains a line break, which a list of names cannot represent",
            f"Write {path.with_suffix('.csv').name} or {path.with_suffix('.parquet').name} instead",
        )
    content = io.BytesIO()
    np.save(content, features, allow_pickle=False)
    atomic_write(names_path(path), _encode("".join(f"{name}\n" for name in files)))
    atomic_write(path, content.getvalue())


def write_csv(files: list[str], features: FeatureMatrix, path: Path) -> None:
    content = io.StringIO(newline="")
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(["file", *(f"f{i}" for i in range(features.shape[1]))])
    for name, row in zip(files, features, strict=True):
        writer.writerow([name, *map(str, row)])  # str(float32) is the shortest text that reads back to the same value
    atomic_write(path, _encode(content.getvalue()))


def write_parquet(files: list[str], features: FeatureMatrix, path: Path) -> None:
    arrow, parquet = _import_parquet()
    names = [name.encode(errors="backslashreplace").decode() for name in files]  # Parquet strings must be UTF-8
    vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(features.reshape(-1)), features.shape[1])
    content = io.BytesIO()
    table = arrow.table({"file": arrow.array(names, arrow.string()), "features": vectors})
    parquet.write_table(table, content)
    atomic_write(path, content.getvalue())


def _import_parquet() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise VitralError("writing Parquet requires pyarrow", "pip install 'vitral[data]'") from error


def _encode(text: str) -> bytes:
    """UTF-8; file names that are not valid UTF-8 keep their original bytes."""
    return text.encode(errors="surrogateescape")


WRITERS: dict[str, Callable[[list[str], FeatureMatrix, Path], None]] = {
    ".npy": write_npy,
    ".parquet": write_parquet,
    ".csv": write_csv,
}
