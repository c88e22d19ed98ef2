"""A checkpoint folder to which every rank writes its shards, through torch.distributed.checkpoint.

Shards are safetensors; everything else is one file, which also holds the SHA-256 of every shard. Reading executes no
code. Any number of ranks can read the folder, and each reads only its own part.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.distributed.dtensor import is_sharded
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.training.checkpoint_file import read_checkpoint_file, write_checkpoint_file
from vitral.utils.atomic import fsync_path, temporary_path

METADATA = "metadata.pt"  # everything but the sharded tensors, written last
DIGESTS = "shard_sha256"  # key of the shards' digests in the metadata
OLD_SUFFIX = ".old"  # of a folder while another one takes its place
REFERENCE_KEY = "sharded_tensor"  # key of the dictionary that replaces a sharded tensor in the metadata

PlacementFn = Callable[[str], Tensor | None]  # tensor path to an existing tensor that is sharded as it should be


def save_sharded(path: Path, content: dict[str, Any], world: World) -> None:
    """Write the folder under a temporary name and rename it when it is complete. All ranks must call this."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def create_temporary() -> Path:
        folder = temporary_path(path)
        folder.mkdir()
        return folder

    def publish() -> None:
        with (temporary / METADATA).open("wb") as file:
            write_checkpoint_file({**metadata, DIGESTS: digests}, file)
        for written in [*temporary.iterdir(), temporary]:
            fsync_path(written)
        old = path.with_name(f".{path.name}{OLD_SUFFIX}")
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        fsync_path(path.parent)
        shutil.rmtree(old, ignore_errors=True)

    sharded: dict[str, Tensor] = {}
    metadata = _extract_sharded(content, "", sharded)
    temporary = world.broadcast_from_rank0(create_temporary)
    writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
    _unwrap_errors(lambda: save(sharded, storage_writer=writer))
    names = world.broadcast_from_rank0(lambda: sorted(file.name for file in temporary.iterdir()))
    digests = dict(world.all_gather_objects(world.run_on_all(lambda: _digests(temporary, names, world))))
    world.broadcast_from_rank0(publish)


def _digests(folder: Path, names: list[str], world: World) -> list[tuple[str, str]]:
    """Names and SHA-256 of this rank's share of the files."""
    digests = []
    for name in names[world.rank :: world.size]:
        with (folder / name).open("rb") as file:
            digests.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
    return digests


def shard_damage(path: Path, world: World) -> str | None:
    """Why a shard cannot be trusted; None if all are as they were written. All ranks must call this."""
    expected = world.broadcast_from_rank0(lambda: read_checkpoint_file(path / METADATA)[DIGESTS])

    def find() -> str | None:
        for name in sorted(expected)[world.rank :: world.size]:
            try:
                if dict(_digests(path, [name], SINGLE_PROCESS)) != {name: expected[name]}:
                    return f"the SHA-256 of {name} does not match"
            except OSError as error:
                return f"{name}: {error.strerror or error}"
        return None

    return next(filter(None, world.all_gather_objects([find()])), None)


def restore_replaced(folder: Path) -> None:
    """Undo a replacement that was killed between the two renames of `save_sharded`, or finish it."""
    for old in folder.glob(f".step-*.sharded{OLD_SUFFIX}"):
        path = old.with_name(old.name.removeprefix(".").removesuffix(OLD_SUFFIX))
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)


def load_sharded(path: Path, placement: PlacementFn, world: World) -> dict[str, Any]:
    """Read the folder. Tensors are sharded like `placement(name)`, or complete where it returns None.

    All ranks must call this.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = read_checkpoint_file(path / METADATA)
    del metadata[DIGESTS]
    reader = HuggingFaceStorageReader(str(path))
    tensors: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        like = placement(name)
        if like is not None and is_sharded(like) and like.shape == stored.size:
            tensors[name] = torch.zeros_like(like)
        else:
            tensors[name] = torch.zeros(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with one process
        _unwrap_errors(lambda: load(tensors, storage_reader=reader, no_dist=world.size == 1))
    content: dict[str, Any] = _insert_sharded(metadata, tensors)
    return content


def _unwrap_errors(function: Callable[[], object]) -> None:
    """Raise the error of the first failed rank. PyTorch's CheckpointException is not even an Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        function()
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause if isinstance(cause, Exception) else RuntimeError(str(cause)) from error


def _extract_sharded(value: Any, name: str, sharded: dict[str, Tensor]) -> Any:
    """Copy a nested structure; move sharded tensors to `sharded` and put references to them in their place."""
    if is_sharded(value):
        sharded[name] = value
        return {REFERENCE_KEY: name}
    if isinstance(value, dict):
        return {
            key: _extract_sharded(item, f"{name}/{key}" if name else str(key), sharded) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_extract_sharded(item, f"{name}/{index}", sharded) for index, item in enumerate(value)]
    return value


def _insert_sharded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Inverse of `_extract_sharded`."""
    if isinstance(value, dict):
        if value.keys() == {REFERENCE_KEY}:
            return tensors[value[REFERENCE_KEY]]
        return {key: _insert_sharded(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_insert_sharded(item, tensors) for item in value]
    return value
