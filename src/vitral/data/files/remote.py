"""HTTP access to parts of files. Does not import torch: decoding workers use it."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from vitral.errors import VitralError

MAX_IMAGE_BYTES = 256 * 2**20
TIMEOUT_S = 30
MAX_ATTEMPTS = 3
HINT = "Check the URL and that the server is reachable"


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def read_range(url: str, offset: int, size: int) -> bytes:
    """Read `size` bytes from `offset` on. Raises OSError if the server does not deliver them after some attempts."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-{offset + size - 1}"})
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                if response.status != 206:
                    raise VitralError(
                        f"{url}: the server does not support range requests (status {response.status})",
                        "Download the shards and pass the files",
                    )
                content: bytes = response.read(size + 1)
            if len(content) == size:
                return content
            raise http.client.IncompleteRead(content, size - len(content))
        except (OSError, http.client.HTTPException) as error:
            if not attempts_left or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                raise OSError(f"{url}: {error}") from error
    raise AssertionError


@contextmanager
def open_url(url: str) -> Iterator[IO[bytes]]:
    """Open a remote file for sequential reading."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            yield response
    except (OSError, http.client.HTTPException) as error:
        raise VitralError(f"cannot read {url}: {error}", HINT) from error


def url_version(url: str) -> str:
    """A string that changes when the remote file changes, from its HTTP headers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S) as response:
            return "\0".join(response.headers.get(name, "") for name in ("Content-Length", "ETag", "Last-Modified"))
    except (OSError, http.client.HTTPException) as error:
        raise VitralError(f"cannot reach {url}: {error}", HINT) from error
