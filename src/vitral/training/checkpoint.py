"""Write and read checkpoints atomically: one file, or a folder with one shard per rank.

Every file is verified by its SHA-256 before it is used. A damaged checkpoint is replaced by the one before it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vitral.distributed.dtensor import is_sharded
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.errors import VitralError, shell_quote
from vitral.training.checkpoint_file import (
    NO_DIGEST,
    file_damage,
    file_format,
    read_checkpoint_file,
    write_checkpoint_file,
)
from vitral.training.sharded_checkpoint import (
    METADATA,
    PlacementFn,
    load_sharded,
    restore_replaced,
    save_sharded,
    shard_damage,
)
from vitral.utils.atomic import atomic_writer, write_error_hint
from vitral.utils.progress import LogFn, no_log

FORMAT = 3  # raised when the content of a checkpoint changes


def save(folder: Path, step: int, state: dict[str, Any], keep: int, world: World = SINGLE_PROCESS) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`.

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
        delete(*_all(folder)[:-keep])
    return path


def _save_file(path: Path, content: dict[str, Any]) -> None:
    with _write_errors(path), atomic_writer(path) as file:
        write_checkpoint_file(content, file)


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
            f"{write_error_hint(cause)}; {remaining}",
        ) from error


def delete(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def newest(folder: Path, before: Path | None = None) -> Path | None:
    """The newest checkpoint, or the newest one older than `before`. Temporary files do not count."""
    paths = [path for path in _all(folder) if before is None or path < before]
    return paths[-1] if paths else None


def load(path: Path, placement: PlacementFn = lambda _: None, world: World = SINGLE_PROCESS) -> dict[str, Any]:
    """Read a checkpoint after verifying it. Only tensors and plain values are read. All ranks must call this."""
    if (damage := find_damage(path, world)) is not None:
        raise VitralError(f"cannot read the checkpoint {path}: {damage}", "Delete it to resume from the previous one")
    return _read(path, placement, world)


def load_newest(
    folder: Path,
    placement: PlacementFn = lambda _: None,
    world: World = SINGLE_PROCESS,
    *,
    before: Path | None = None,
    unusable_reason: Callable[[dict[str, Any]], str | None] = lambda _: None,
    log: LogFn = no_log,
) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest checkpoint that is intact, and delete the newer ones. None if there are no checkpoints.

    Args:
        folder: The checkpoints of a run.
        placement: How to shard its tensors.
        world: All ranks must call this.
        before: Only checkpoints older than this one.
        unusable_reason: Why an intact checkpoint cannot be used, such as "needs a missing file"; None if it can.
        log: Called with one line if the newest checkpoint was not used.
    """
    world.broadcast_from_rank0(lambda: restore_replaced(folder))
    reasons: dict[Path, str] = {}
    path = world.broadcast_from_rank0(lambda: newest(folder, before))
    while path is not None:
        if (damage := find_damage(path, world)) is None:
            state = _read(path, placement, world)
            if (reason := unusable_reason(state)) is None:
                if reasons:
                    log(f"{'; '.join(reasons.values())}; using {path.name}")
                    world.broadcast_from_rank0(partial(delete, *reasons))
                return path, state
        reasons[path] = f"{path.name} is damaged ({damage})" if damage else f"{path.name} {reason}"
        path = world.broadcast_from_rank0(lambda path=path: newest(folder, path))  # type: ignore[misc]
    if not reasons:
        return None
    recipe_file = shell_quote(folder.parent / "recipe.toml")
    raise VitralError(
        f"no checkpoint in {folder} can be used: {'; '.join(reasons.values())}",
        f"Restore one from a backup, or start again: vitral train --recipe {recipe_file}",
    )


def find_damage(path: Path, world: World = SINGLE_PROCESS) -> str | None:
    """Why the checkpoint cannot be trusted; None if it is intact. All ranks must call this."""
    damage = world.broadcast_from_rank0(lambda: _file_damage(path))
    return shard_damage(path, world) if damage is None and path.is_dir() else damage


def _file_damage(path: Path) -> str | None:
    """Verify a checkpoint that is a file, or the metadata of a sharded one. Another format is an error."""
    file = path / METADATA if path.is_dir() else path
    damage = file_damage(file)
    if damage == NO_DIGEST and (number := file_format(file)) not in (None, FORMAT):
        raise _format_error(path, number)
    return damage


def _read(path: Path, placement: PlacementFn, world: World) -> dict[str, Any]:
    try:
        state = load_sharded(path, placement, world) if path.is_dir() else read_checkpoint_file(path)
    except Exception as error:
        raise VitralError(
            f"cannot read the checkpoint {path} ({type(error).__name__})", "Delete it to resume from the previous one"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise _format_error(path, state.get("format") if isinstance(state, dict) else None)
    return state


def _format_error(path: Path, number: object) -> VitralError:
    return VitralError(
        f"the checkpoint {path} has format {number}; this version of vitral reads format {FORMAT}",
        "Resume with the version of vitral that wrote it",
    )


def _all(folder: Path) -> list[Path]:
    return sorted([*folder.glob("step-*.pt"), *folder.glob("step-*.sharded")])
