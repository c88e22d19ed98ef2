"""Everything for an exact resume, in one file, whole or not there at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vitral.errors import VitralError
from vitral.run import whole_or_not

FORMAT = 1  # raised when what is in a checkpoint changes its meaning


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write it whole, then forget all but the newest `keep`, and what a killed writer left behind."""
    path = folder / f"step-{step:09d}.pt"
    try:
        with whole_or_not(path) as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
    except (OSError, RuntimeError) as error:  # torch's writer turns some of the one into the other
        cause = error if isinstance(error, OSError) else error.__context__
        older = newest(folder)
        raise VitralError(
            f"cannot save the checkpoint {path}: {getattr(cause, 'strerror', None) or error}",
            f"free some space; {'the one before is whole: ' + older.name if older else 'none was saved before'}",
        ) from error
    for old in [*_all(folder)[:-keep], *folder.glob(".step-*.pt.*"), *folder.glob(".best.safetensors.*")]:
        old.unlink(missing_ok=True)
    return path


def newest(folder: Path, before: Path | None = None) -> Path | None:
    """The newest complete checkpoint (before another). Temporary files of a writer that was killed do not count."""
    found = [path for path in _all(folder) if before is None or path < before]
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
