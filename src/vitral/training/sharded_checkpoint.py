"""A checkpoint in a folder, to which each process writes the rows it holds, through torch.distributed.checkpoint.

The rows are safetensors, and what is small is one file beside them: nothing in it runs as code when it is read. Any
number of processes can read it, each what it needs.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.registry.download import sync
from vitral.distributed.dtensor import is_divided
from vitral.distributed.world import World

REST = "rest.pt"  # everything but the divided tensors, written last
Like = Callable[[str], Tensor | None]  # for the name of a tensor: one that is divided as it should be


def save_rows(path: Path, content: dict[str, Any], world: World) -> None:
    """Every process must call it. The folder has its name only when it is complete."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    beside = path.with_name(f".{path.name}")

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()

    def end() -> None:
        torch.save(rest, beside / REST)
        for file in [*beside.iterdir(), beside]:
            sync(file)
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            path.rename(old)
        beside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        sync(path.parent)

    rows: dict[str, Tensor] = {}
    rest = _taken_apart(content, "", rows)
    world.tell(begin)
    writer = HuggingFaceStorageWriter(str(beside), save_distributed=True)
    _plainly(lambda: save(rows, storage_writer=writer))
    world.tell(end)


def load_rows(path: Path, like: Like, world: World) -> dict[str, Any]:
    """Every process must call it; tensors are divided as `like` says, or whole where it says nothing."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    rest = torch.load(path / REST, map_location="cpu", weights_only=True)
    reader = HuggingFaceStorageReader(str(path))
    rows: dict[str, Tensor] = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        now = like(name)
        if now is not None and is_divided(now) and now.shape == saved.size:
            rows[name] = torch.zeros_like(now)
        else:
            rows[name] = torch.zeros(saved.size, dtype=saved.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # that it is not needed is no news
        _plainly(lambda: load(rows, storage_reader=reader, no_dist=world.size == 1))
    content: dict[str, Any] = _put_together(rest, rows)
    return content


def _plainly(do: Callable[[], object]) -> None:
    """torch wraps what went wrong on each process into something that is not even an Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        do()
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first if isinstance(first, Exception) else RuntimeError(str(first)) from error


def _taken_apart(thing: Any, name: str, rows: dict[str, Tensor]) -> Any:
    """The same, with divided tensors moved to `rows` and their names in their places."""
    if is_divided(thing):
        rows[name] = thing
        return {"rows": name}
    if isinstance(thing, dict):
        return {key: _taken_apart(value, f"{name}/{key}" if name else str(key), rows) for key, value in thing.items()}
    if isinstance(thing, list):
        return [_taken_apart(value, f"{name}/{index}", rows) for index, value in enumerate(thing)]
    return thing


def _put_together(thing: Any, rows: dict[str, Tensor]) -> Any:
    if isinstance(thing, dict):
        if thing.keys() == {"rows"}:
            return rows[thing["rows"]]
        return {key: _put_together(value, rows) for key, value in thing.items()}
    if isinstance(thing, list):
        return [_put_together(value, rows) for value in thing]
    return thing
