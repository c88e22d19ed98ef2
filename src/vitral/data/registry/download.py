"""HTTP downloads that resume where they stopped, with limits on bytes and time."""

from __future__ import annotations

import hashlib
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from vitral import __version__
from vitral.data.progress_bars import ProgressBarFn
from vitral.data.registry.checksums import file_size
from vitral.data.registry.errors import FetchError

TIMEOUT_S = 5.0  # for the first response of a server, and for each read after it
MIN_BYTES_PER_S = 2_048  # a server that is slower on average counts as stalled, after the first 30 s
MAX_ATTEMPTS = 4  # a transfer that breaks off is resumed this often
CHUNK_BYTES = 1 << 20


def partial_path(staging: Path, url: str) -> Path:
    """Path of an unfinished download. Named by its URL, so that one mirror never continues another one's file."""
    return staging / f"{hashlib.sha256(url.encode()).hexdigest()[:12]}.part"


def download_and_unpack(
    unpack: Callable[[Path], None], url: str, staging: Path, *, limit: int, report_progress: ProgressBarFn
) -> None:
    """Download into `staging`, then call `unpack` with the file.

    If unpacking fails and the file was resumed from an earlier attempt, it is downloaded again from the beginning.
    """
    partial = partial_path(staging, url)
    was_resumed = partial.exists()
    while True:
        try:
            download(url, partial, limit=limit, report_progress=report_progress)
            unpack(partial)
            break
        except FetchError:
            partial.unlink(missing_ok=True)
            if not was_resumed:
                raise
            was_resumed = False
    partial.unlink()


def download(url: str, partial: Path, *, limit: int, report_progress: ProgressBarFn) -> None:
    """Download `url` to `partial`, resuming an earlier partial download; at most `limit` bytes."""
    for _ in range(MAX_ATTEMPTS):
        size_before = file_size(partial)
        try:
            if _download_remaining(url, partial, limit, report_progress):
                return
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            if file_size(partial) <= size_before:  # no progress, so another attempt would not help
                raise
    raise FetchError(f"connection lost {MAX_ATTEMPTS} times")


def _download_remaining(url: str, partial: Path, limit: int, report_progress: ProgressBarFn) -> bool:
    """Request the missing bytes once; False if the connection ended early."""
    offset = file_size(partial)
    headers = {"User-Agent": f"vitral/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        response = _open_with_deadline(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        if not offset or error.code != 416:  # 416: range not satisfiable
            raise
        if error.headers.get("Content-Range") == f"bytes */{offset}":
            return True
        raise FetchError("the file on the server has changed since the download began") from None
    with response:
        if response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise FetchError("the server sent a different range than requested")
        else:
            offset = 0
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length and length.isdigit() else None
        if total is not None and total > limit:
            raise FetchError(f"the server announced {total:,} bytes, expected at most {limit:,}")
        start, received = time.monotonic(), 0
        with partial.open("ab" if offset else "wb") as out:
            while chunk := response.read1(CHUNK_BYTES):
                received += len(chunk)
                if offset + received > limit:
                    raise FetchError(f"received more than the expected {limit:,} bytes")
                out.write(chunk)
                report_progress(url.rpartition("/")[2], offset + received, total)
                elapsed = time.monotonic() - start
                if elapsed > 30 and received < MIN_BYTES_PER_S * elapsed:
                    raise TimeoutError(f"only {received:,} bytes in {elapsed:.0f} s")
    return total is None or offset + received == total


def _open_with_deadline(request: urllib.request.Request) -> http.client.HTTPResponse:
    """urlopen with one deadline for name resolution, all addresses, TLS and the status line together.

    A socket timeout applies to each of these separately and not to name resolution: without a network, urlopen may
    take minutes.
    """
    results: list[http.client.HTTPResponse | BaseException] = []
    lock = threading.Lock()
    is_abandoned = False

    def open_url() -> None:
        result: http.client.HTTPResponse | BaseException
        try:
            result = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except BaseException as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # only status and headers are used
            result = error
        with lock:
            if not is_abandoned:
                results.append(result)
            elif isinstance(result, http.client.HTTPResponse):
                result.close()

    thread = threading.Thread(target=open_url, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    with lock:
        is_abandoned = True
    if not results:
        raise TimeoutError(f"no response within {TIMEOUT_S:g} s")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
