"""Everything for an exact resume, whole or not there at all: one file, or a folder with a part of each process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitral.distributed.dtensor import is_divided
from vitral.distributed.world import ALONE, World
from vitral.errors import VitralError
from vitral.runs.run import whole_or_not
from vitral.training.sharded_checkpoint import Like, load_rows, save_rows

FORMAT = 1  # raised when what is in a checkpoint changes its meaning


def save(folder: Path, step: int, state: dict[str, Any], keep: int, world: World = ALONE) -> Path:
    """Write it whole, then forget all but the newest `keep`, and what a killed writer left behind.

    Of several processes the first writes, or, where the tensors are divided among them, each its part.
    """
    content = {"format": FORMAT, "step": step, **state}
    if any(is_divided(tensor) for tensor in state["model"].values()):
        path = folder / f"step-{step:09d}.sharded"
        with _writing(path):
            save_rows(path, content, world)
    else:
        path = folder / f"step-{step:09d}.pt"
        world.tell(lambda: _save_whole(path, content))
    if world.first:
        for old in [*_all(folder)[:-keep], *folder.glob(".step-*.pt.*"), *folder.glob(".best.safetensors.*")]:
            forget(old)
    return path


def _save_whole(path: Path, content: dict[str, Any]) -> None:
    with _writing(path), whole_or_not(path) as file:
        torch.save(content, file)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer turns some of the one into the other
        cause = error if isinstance(error, OSError) else error.__context__
        older = newest(path.parent)
        raise VitralError(
            f"cannot save the checkpoint {path}: {getattr(cause, 'strerror', None) or error}",
            f"free some space; {'the one before is whole: ' + older.name if older else 'none was saved before'}",
        ) from error


def forget(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def newest(folder: Path, before: Path | None = None) -> Path | None:
    """The newest complete checkpoint (before another). Temporary files of a writer that was killed do not count."""
    found = [path for path in _all(folder) if before is None or path < before]
    return found[-1] if found else None


def load(path: Path, like: Like = lambda _: None, world: World = ALONE) -> dict[str, Any]:
    """Read without unpickling code: tensors and plain values only. Of several processes every one must read."""
    try:
        if path.is_dir():
            state = load_rows(path, like, world)
        else:
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
    return sorted([*folder.glob("step-*.pt"), *folder.glob("step-*.sharded")])
