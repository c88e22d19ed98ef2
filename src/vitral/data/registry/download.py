"""Bytes from elsewhere onto this disk: resumed downloads and unpacking, never more of them than expected.

Nothing here knows a data set. Every transfer has a limit in bytes and in time; an archive is read member by member,
and no path that it names is ever written.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import socket
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol

from vitral import __version__

if TYPE_CHECKING:
    from rich.progress import TaskID

PATIENCE = 5.0  # seconds for a mirror to answer at all, and for each read after that
SLOWEST = 2_048  # bytes a second, over the first half minute and from then on: below that a server counts as stalled
ATTEMPTS = 4  # a transfer that breaks off is taken up where it stopped, this often
CHUNK = 1 << 20
SLACK = 64 << 20  # what an archive may hold beside the files we want (read-me, package code: skipped unread)

Meter = Callable[[str, int, int | None], None]  # (what, how much so far, how much in all if known)


class SourceError(Exception):
    """A source did not give what was asked of it: wrong bytes, too many of them, or none. The next one is tried."""


FAILURES = (SourceError, OSError, http.client.HTTPException)  # all that a source can do to us


# ── knowing a file ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class File:
    """A file as it lies in the cache: unpacked, its size and digest known beforehand."""

    name: str
    size: int
    digest: str  # "md5:…", "sha1:…" or "sha256:…"

    def is_at(self, path: Path) -> bool:
        """Is that this file, to the last byte?"""
        try:
            return path.stat().st_size == self.size and has_digest(path, self.digest)
        except OSError:
            return False

    def check(self, path: Path) -> None:
        if not self.is_at(path):
            raise SourceError(f"{self.name}: wrong checksum")


def has_digest(path: Path, digest: str) -> bool:
    algorithm, _, expected = digest.partition(":")
    with path.open("rb") as file:
        hashed = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return hashed.hexdigest() == expected


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def settle(staged: Path, final: Path) -> None:
    """Move a verified file into place so that it is there whole or not at all, even if the power fails now."""
    with staged.open("rb+") as file:
        os.fsync(file.fileno())
    final.parent.mkdir(parents=True, exist_ok=True)
    staged.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """A file, or a folder: a rename in it is safe against a power cut only then."""
    if os.name == "posix":
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# ── downloads ────────────────────────────────────────────────────────────────────────────────────────────────


def part_path(staging: Path, url: str) -> Path:
    """Where a half-finished download waits: named by its URL, so mirrors never continue one another's files."""
    return staging / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}.part"


def download_then(use: Callable[[Path], None], url: str, staging: Path, *, limit: int, meter: Meter) -> None:
    """Download into `staging`, then `use` the file. If one continued from an earlier day is bad, start it again."""
    part = part_path(staging, url)
    continued = part.exists()
    while True:
        try:
            download(url, part, limit=limit, meter=meter)
            use(part)
            break
        except SourceError:
            part.unlink(missing_ok=True)
            if not continued:
                raise
            continued = False
    part.unlink()


def download(url: str, part: Path, *, limit: int, meter: Meter) -> None:
    """Bring `url` into `part`, continuing what is there already; never more than `limit` bytes."""
    for _ in range(ATTEMPTS):
        before = size(part)
        try:
            if _transfer(url, part, limit, meter):
                return
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            if size(part) <= before:  # nothing came: another try would be the same
                raise
    raise SourceError(f"broke off {ATTEMPTS} times")


def _transfer(url: str, part: Path, limit: int, meter: Meter) -> bool:
    """One request for what is still missing; False where the connection ended too soon."""
    have = size(part)
    headers = {"User-Agent": f"vitral/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = _open(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        if not have or error.code != 416:  # 416: no such range
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return True
        raise SourceError("the partial file does not belong to what the server has now") from None
    with response:
        if response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise SourceError("the server answered with another range than asked for")
        else:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        if total is not None and total > limit:
            raise SourceError(f"{total:,} bytes announced where at most {limit:,} were expected")
        began, came = time.monotonic(), 0
        with part.open("ab" if have else "wb") as out:
            while chunk := response.read1(CHUNK):
                came += len(chunk)
                if have + came > limit:
                    raise SourceError(f"more than the {limit:,} bytes expected")
                out.write(chunk)
                meter(url.rpartition("/")[2], have + came, total)
                elapsed = time.monotonic() - began
                if elapsed > 30 and came < SLOWEST * elapsed:
                    raise TimeoutError(f"only {came:,} bytes in {elapsed:.0f} s")
    return total is None or have + came == total


def _open(request: urllib.request.Request) -> http.client.HTTPResponse:
    """urlopen with ONE deadline for looking the name up, every address tried, TLS and the first line of the answer.

    A socket's time-out counts each of those anew, and the look-up not at all: a dead network could take minutes.
    """
    answers: list[http.client.HTTPResponse | BaseException] = []
    handing_over = threading.Lock()
    abandoned = False

    def ask() -> None:
        answer: http.client.HTTPResponse | BaseException
        try:
            answer = urllib.request.urlopen(request, timeout=PATIENCE)
        except BaseException as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # status and headers are all anybody reads of it
            answer = error
        with handing_over:
            if not abandoned:
                answers.append(answer)
            elif isinstance(answer, http.client.HTTPResponse):
                answer.close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    with handing_over:
        abandoned = True
    if not answers:
        raise TimeoutError(f"no answer within {PATIENCE:g} s")
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


# ── unpacking, never more than expected ──────────────────────────────────────────────────────────────────────


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def _damage_is_refused(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise SourceError(f"{name} is damaged: {error}") from None


def copy(source: _Readable, out: BinaryIO, *, limit: int) -> None:
    left = limit
    while chunk := source.read(min(CHUNK, left + 1)):
        left -= len(chunk)
        if left < 0:
            raise SourceError(f"unpacks to more than the {limit:,} bytes expected")
        out.write(chunk)


def gunzip(packed: Path, target: Path, *, limit: int) -> None:
    with _damage_is_refused(packed.name), gzip.open(packed) as source, target.open("wb") as out:
        copy(source, out, limit=limit)


class _Bounded:
    """A stream that ends in SourceError after `limit` bytes: bounds what any archive can make tarfile read."""

    def __init__(self, stream: _Readable, limit: int) -> None:
        self.stream, self.left = stream, limit

    def read(self, size: int) -> bytes:
        chunk = self.stream.read(size)
        self.left -= len(chunk)
        if self.left < 0:
            raise SourceError("the archive unpacks to far more than expected")
        return chunk


def untar_gz(archive: Path, wanted: Mapping[str, tuple[Path, int]]) -> None:
    with _damage_is_refused(archive.name), gzip.open(archive) as stream:
        untar(stream, wanted)


def untar(stream: _Readable, wanted: Mapping[str, tuple[Path, int]]) -> None:
    """Copy the members named in `wanted` (member → target, most bytes); no path from the archive is ever written."""
    missing = dict(wanted)
    bounded = _Bounded(stream, sum(limit for _, limit in wanted.values()) + SLACK)
    with _damage_is_refused("archive"), tarfile.open(fileobj=bounded, mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise SourceError(f"the archive holds a path that leads outside it: {member.name!r}")
            if str(path) not in missing:
                continue
            target, limit = missing.pop(str(path))
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise SourceError(f"{member.name!r} in the archive is not a regular file")
            with target.open("wb") as out:
                copy(content, out, limit=limit)
    if missing:
        raise SourceError(f"the archive lacks {', '.join(sorted(missing))}")


# ── what people see of it ────────────────────────────────────────────────────────────────────────────────────


def reason(error: BaseException) -> str:
    """A few words on why a source failed."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "host name not found"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


@contextmanager
def progress_bars(show: bool, unit: str = "bytes") -> Iterator[Meter]:
    """Progress bars on stderr, where somebody asked for them and looks: of bytes, or of things that are counted."""
    if not show:
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    if unit != "bytes":
        counts = (TextColumn("{task.completed:,} of {task.total:,} " + unit), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update
