"""Unpacking of gzip and tar files, never more bytes than expected.

Archives are read member by member. Only members named by the caller are written, to paths chosen by the caller.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from vitral.data.registry.errors import FetchError

CHUNK_BYTES = 1 << 20
ARCHIVE_SLACK_BYTES = 64 << 20  # for members that are skipped: README, package code


class _ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def _corrupt_as_fetch_error(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise FetchError(f"{name} is corrupt: {error}") from None


def copy_limited(source: _ByteStream, out: BinaryIO, *, limit: int) -> None:
    """Copy a stream; FetchError if it has more than `limit` bytes."""
    remaining = limit
    while chunk := source.read(min(CHUNK_BYTES, remaining + 1)):
        remaining -= len(chunk)
        if remaining < 0:
            raise FetchError(f"unpacks to more than the expected {limit:,} bytes")
        out.write(chunk)


def gunzip(compressed: Path, target: Path, *, limit: int) -> None:
    with _corrupt_as_fetch_error(compressed.name), gzip.open(compressed) as source, target.open("wb") as out:
        copy_limited(source, out, limit=limit)


class _LimitedReader:
    """A stream that raises FetchError after `limit` bytes: bounds how much tarfile reads from any archive."""

    def __init__(self, stream: _ByteStream, limit: int) -> None:
        self.stream, self.remaining = stream, limit

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.remaining -= len(chunk)
        if self.remaining < 0:
            raise FetchError("the archive unpacks to far more than expected")
        return chunk


def extract_members_gz(archive: Path, members: Mapping[str, tuple[Path, int]]) -> None:
    """`extract_members` of a .tar.gz file."""
    with _corrupt_as_fetch_error(archive.name), gzip.open(archive) as stream:
        extract_members(stream, members)


def extract_members(stream: _ByteStream, members: Mapping[str, tuple[Path, int]]) -> None:
    """Extract the named members of a tar stream; `members` maps a name to its target path and size limit."""
    missing = dict(members)
    limited = _LimitedReader(stream, sum(limit for _, limit in members.values()) + ARCHIVE_SLACK_BYTES)
    with (
        _corrupt_as_fetch_error("archive"),
        tarfile.open(fileobj=limited, mode="r|") as tar,  # type: ignore[call-overload]
    ):
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise FetchError(f"the archive contains a path outside of it: {member.name!r}")
            if str(path) not in missing:
                continue
            target, limit = missing.pop(str(path))
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise FetchError(f"{member.name!r} in the archive is not a regular file")
            with target.open("wb") as out:
                copy_limited(content, out, limit=limit)
    if missing:
        raise FetchError(f"the archive lacks {', '.join(sorted(missing))}")
