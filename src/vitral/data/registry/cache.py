"""The cache folder of datasets: where it is, which of its files are verified, and its locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from vitral.data.registry.checksums import ChecksummedFile
from vitral.data.registry.errors import failure_reason
from vitral.errors import VitralError
from vitral.utils.atomic import atomic_writer
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.locks import file_lock


def cache_dir() -> Path:
    """$VITRAL_HOME, or the user's cache folder on this system."""
    return Path(os.environ.get("VITRAL_HOME") or platformdirs.user_cache_dir("vitral")).expanduser()


def data_roots() -> list[Path]:
    """Folders that may contain datasets: the cache, then $VITRAL_DATA, then ./data."""
    data_dir = os.environ.get("VITRAL_DATA")
    return [cache_dir(), *([Path(data_dir).expanduser()] if data_dir else []), Path("data")]


def is_verified(path: Path, file: ChecksummedFile, *, recheck: bool) -> bool:
    """Whether `path` has the expected content.

    A file that was hashed once is recognised by size and modification time, unless `recheck`: hashing CIFAR-10 means
    reading 180 MB.
    """
    try:
        if not recheck and _read_stamps().get(str(path.resolve())) == _stamp(path, file):
            return True
    except OSError:
        return False
    if matches := file.matches(path):
        mark_verified(path, file)
    return matches


def mark_verified(path: Path, file: ChecksummedFile) -> None:
    """Remember that `path` was verified. If two processes write at once, one entry is lost and hashed again later."""
    with suppress(OSError):  # with a read-only cache, files are hashed every time
        stamps = {name: stamp for name, stamp in _read_stamps().items() if Path(name).exists()}
        stamps[str(path.resolve())] = _stamp(path, file)
        cache_dir().mkdir(parents=True, exist_ok=True)
        with atomic_writer(cache_dir() / "verified.json") as out:
            out.write(dump_json(stamps, indent=1).encode())


def _stamp(path: Path, file: ChecksummedFile) -> list[object]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, file.digest]


def _read_stamps() -> dict[str, Any]:
    try:
        stamps = read_json(cache_dir() / "verified.json")
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


@contextmanager
def locked_staging(name: str) -> Iterator[Path]:
    """The staging folder of a dataset, for one process at a time. Unfinished downloads stay in it for the next try."""
    staging = cache_dir() / "fetching" / name
    with ExitStack() as stack:
        try:
            staging.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(staging.with_suffix(".lock")))
        except OSError as error:
            raise VitralError(
                f"cannot write to the cache {cache_dir()}: {failure_reason(error)}",
                "Set VITRAL_HOME to a writable folder, or VITRAL_DATA to one that contains the files",
            ) from None
        staging.mkdir(exist_ok=True)
        yield staging
