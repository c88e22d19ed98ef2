"""Atomic file writes: a reader sees the old content or the new content, never a part of it."""

from __future__ import annotations

import errno
import os
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace the content of `path`. Raises VitralError if it cannot be written."""
    try:
        with atomic_writer(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        disk_full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        hint = (
            "Free some disk space; existing files are unchanged" if disk_full else "Check that the folder is writable"
        )
        raise VitralError(f"cannot write {path}: {error.strerror or error}", hint) from error


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk. A rename survives a power failure only once its folder has been flushed."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
