"""Parts of files that lie elsewhere, over http and https. Without torch: worker processes read with it."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from vitral.errors import VitralError

MOST_IMAGE = 256 * 2**20  # bytes of one picture
SECONDS = 30  # without an answer
TRIES = 3


def is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def read_range(where: str, offset: int, size: int) -> bytes:
    """`size` bytes from `offset` on. A server that sends anything else, or nothing after some tries, is an OSError."""
    asked = urllib.request.Request(where, headers={"Range": f"bytes={offset}-{offset + size - 1}"})
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                if answer.status != 206:
                    raise VitralError(
                        f"{where}: the server sends no parts of files (status {answer.status})",
                        "fetch the shards and name the files",
                    )
                content: bytes = answer.read(size + 1)
            if len(content) == size:
                return content
            raise http.client.IncompleteRead(content, size - len(content))
        except (OSError, http.client.HTTPException) as error:
            if not left or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                raise OSError(f"{where}: {error}") from error
    raise AssertionError


@contextmanager
def opened(where: str) -> Iterator[IO[bytes]]:
    """The file, from its beginning."""
    try:
        with urllib.request.urlopen(where, timeout=SECONDS) as answer:
            yield answer
    except (OSError, http.client.HTTPException) as error:
        raise VitralError(f"cannot read {where}: {error}", "is the address right, and the server there?") from error


def state_of(where: str) -> str:
    """What changes when the file there does, as far as the server says."""
    try:
        with urllib.request.urlopen(urllib.request.Request(where, method="HEAD"), timeout=SECONDS) as answer:
            return "\0".join(answer.headers.get(name, "") for name in ("Content-Length", "ETag", "Last-Modified"))
    except (OSError, http.client.HTTPException) as error:
        raise VitralError(f"cannot reach {where}: {error}", "is the address right, and the server there?") from error
