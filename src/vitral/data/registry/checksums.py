"""Files that are identified by size and checksum."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from vitral.data.registry.errors import FetchError
from vitral.utils.atomic import fsync_path


@dataclass(frozen=True, kw_only=True)
class ChecksummedFile:
    """A file of a dataset as stored in the cache: uncompressed, with known size and digest."""

    name: str
    size: int
    digest: str  # "md5:…", "sha1:…" or "sha256:…"

    def matches(self, path: Path) -> bool:
        """Whether `path` is this file, byte for byte."""
        try:
            return path.stat().st_size == self.size and matches_digest(path, self.digest)
        except OSError:
            return False

    def verify(self, path: Path) -> None:
        """Raise FetchError unless `path` is this file."""
        if not self.matches(path):
            raise FetchError(f"{self.name}: wrong checksum")


def matches_digest(path: Path, digest: str) -> bool:
    algorithm, _, expected = digest.partition(":")
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return hashed.hexdigest() == expected


def file_size(path: Path) -> int:
    """Size in bytes; 0 if the file does not exist."""
    return path.stat().st_size if path.exists() else 0


def move_into_place(staged: Path, final: Path) -> None:
    """Move a verified file to its final path atomically and durably."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    final.parent.mkdir(parents=True, exist_ok=True)
    staged.replace(final)
    fsync_path(final.parent)
