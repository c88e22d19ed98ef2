"""Everything for an exact resume, in one file, whole or not there at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from vitral.errors import VitralError

FORMAT = 1  # raised when what is in a checkpoint changes its meaning


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write to a temporary name, sync, rename; then forget all but the newest `keep`."""
    path = folder / f"step-{step:09d}.pt"
    beside = folder / f".{path.name}.{os.getpid()}"
    try:
        with beside.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch reports some write errors as RuntimeError
        beside.unlink(missing_ok=True)
        older = newest(folder)
        why = getattr(error, "strerror", None) or "no space left, or not writable"
        raise VitralError(
            f"cannot save the checkpoint {path}: {why}",
            f"free some space; {'the one before is whole: ' + older.name if older else 'none was saved before'}",
        ) from error
    for old in _all(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint. Temporary files of a writer that was killed do not count."""
    found = _all(folder)
    return found[-1] if found else None


def load(path: Path) -> dict[str, Any]:
    """Read without unpickling code: tensors and plain values only."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise VitralError(
            f"the checkpoint {path} cannot be read ({type(error).__name__})", "delete it to go on from the one before"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise VitralError(
            f"the checkpoint {path} has format {found}; this vitral reads format {FORMAT}",
            "resume with the version of vitral that made it",
        )
    return state


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def _sync_folder(folder: Path) -> None:
    """A rename is safe against a power cut only when its folder is synced too."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
