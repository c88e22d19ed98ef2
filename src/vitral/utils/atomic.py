"""Atomic file writes: a reader sees the old content or the new content, never a part of it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vitral.errors import VitralError


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds; on an error `path` is left unchanged.

    The file and then its folder are synced, so that the replacement also survives a power failure.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_path(path.parent)
    except OSError as error:
        if error.filename is not None:
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """A new name next to `path` for content that is not complete yet."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def remove_temporary_files(folder: Path) -> None:
    """Delete what killed processes have left. No other process may be writing to the folder."""
    for path in list(folder.rglob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace the content of `path`. Raises VitralError if it cannot be written."""
    try:
        with atomic_writer(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise VitralError(
            f"cannot write {path}: {error.strerror or error}",
            f"{write_error_hint(error)}; existing files are unchanged",
        ) from error


def write_error_hint(error: BaseException | None) -> str:
    """What to do about a file that could not be written."""
    if not isinstance(error, OSError):
        return "If the disk is full, free some space"
    disk_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return "Free some disk space" if disk_full else "Check that the folder is writable"


def reserve_disk_space(file: BinaryIO, num_bytes: int) -> None:
    """Allocate the blocks of a file now: writing to a mapped file on a full disk kills the process with SIGBUS."""
    if hasattr(os, "posix_fallocate") and num_bytes:
        os.posix_fallocate(file.fileno(), 0, num_bytes)


def is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder, or to the folder in which it would be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk. A rename survives a power failure only once its folder has been flushed."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
