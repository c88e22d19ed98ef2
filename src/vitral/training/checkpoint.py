"""Write and read checkpoints atomically: one file, or a folder with one shard per rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitral.distributed.dtensor import is_sharded
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.errors import VitralError
from vitral.training.sharded_checkpoint import PlacementFn, load_sharded, save_sharded
from vitral.utils.atomic import atomic_writer

FORMAT = 2  # raised when the content of a checkpoint changes


def save(folder: Path, step: int, state: dict[str, Any], keep: int, world: World = SINGLE_PROCESS) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` and the temporary files of killed writers.

    Rank 0 writes the file; sharded tensors are written by every rank.
    """
    content = {"format": FORMAT, "step": step, **state}
    if any(is_sharded(tensor) for tensor in state["model"].values()):
        path = folder / f"step-{step:09d}.sharded"
        with _write_errors(path):
            save_sharded(path, content, world)
    else:
        path = folder / f"step-{step:09d}.pt"
        world.broadcast_from_rank0(lambda: _save_file(path, content))
    if world.is_rank0:
        obsolete = _all(folder)[:-keep]
        temporary = [*folder.glob(".step-*.pt.*"), *folder.glob(".best.safetensors.*")]
        for old in (*obsolete, *temporary):
            delete(old)
    return path


def _save_file(path: Path, content: dict[str, Any]) -> None:
    with _write_errors(path), atomic_writer(path) as file:
        torch.save(content, file)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save turns some OSErrors into RuntimeErrors
        cause = error if isinstance(error, OSError) else error.__context__
        previous = newest(path.parent)
        remaining = f"the previous checkpoint {previous.name} is intact" if previous else "no checkpoint exists yet"
        raise VitralError(
            f"cannot write the checkpoint {path}: {getattr(cause, 'strerror', None) or error}",
            f"Free some disk space; {remaining}",
        ) from error


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def newest(folder: Path, before: Path | None = None) -> Path | None:
    """The newest complete checkpoint, or the newest one older than `before`. Temporary files do not count."""
    paths = [path for path in _all(folder) if before is None or path < before]
    return paths[-1] if paths else None


def load(path: Path, placement: PlacementFn = lambda _: None, world: World = SINGLE_PROCESS) -> dict[str, Any]:
    """Read a checkpoint without unpickling code: tensors and plain values only. All ranks must call this."""
    try:
        if path.is_dir():
            state = load_sharded(path, placement, world)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise VitralError(
            f"cannot read the checkpoint {path} ({type(error).__name__})",
            "Delete it to resume from the previous one",
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        format_number = state.get("format") if isinstance(state, dict) else None
        raise VitralError(
            f"the checkpoint {path} has format {format_number}; this version of vitral reads format {FORMAT}",
            "Resume with the version of vitral that wrote it",
        )
    return state


def _all(folder: Path) -> list[Path]:
    return sorted([*folder.glob("step-*.pt"), *folder.glob("step-*.sharded")])
