"""File locks that leave no lock file behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock


@contextmanager
def file_lock(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold the lock file `path`, then delete it. Raises filelock.Timeout after `timeout` seconds; -1 waits.

    The file is deleted while it is still locked. A process that waits for the deleted file notices that it has no
    name any more and starts over with a new file, so two processes never hold the lock at once.
    """
    with FileLock(path, timeout=timeout):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows refuses to delete an open file; there filelock deletes it
                path.unlink()
