"""Files of torch.save that end with their own SHA-256, so that damage is detected before a file is used.

torch.save writes a zip archive. The digest of its content is stored as the comment of the archive, its last field: it
cannot be separated from the file, and torch.load and zip tools read the file as before.
"""

from __future__ import annotations

import hashlib
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

PREFIX = b"sha256:"
COMMENT_BYTES = len(PREFIX) + 2 * hashlib.sha256().digest_size
COMMENT_LENGTH = struct.Struct("<H")  # the field of a zip archive before its comment; torch.save writes zero
CHUNK_BYTES = 2**20
NO_DIGEST = "it does not end with its SHA-256"


class HashingWriter:
    """Hash everything that is written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, content: Any) -> int:
        self.sha256.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def write_checkpoint_file(content: dict[str, Any], file: BinaryIO) -> None:
    """Write like torch.save and append the digest, which is computed while writing."""
    writer = HashingWriter(file)
    torch.save(content, writer)  # type: ignore[arg-type]
    file.seek(-COMMENT_LENGTH.size, os.SEEK_END)
    file.write(COMMENT_LENGTH.pack(COMMENT_BYTES) + PREFIX + writer.sha256.hexdigest().encode())


def read_checkpoint_file(path: Path) -> Any:
    """Tensors and plain values only: no code is unpickled."""
    return torch.load(path, map_location="cpu", weights_only=True)


def file_damage(path: Path) -> str | None:
    """Why the file cannot be trusted; None if it is exactly as it was written."""
    try:
        with path.open("rb") as file:
            remaining = os.fstat(file.fileno()).st_size - COMMENT_LENGTH.size - COMMENT_BYTES
            if remaining < 0:
                return "it is not complete"
            sha256 = hashlib.sha256()
            while remaining and (chunk := file.read(min(CHUNK_BYTES, remaining))):
                sha256.update(chunk)
                remaining -= len(chunk)
            sha256.update(COMMENT_LENGTH.pack(0))
            ending = file.read()
    except OSError as error:
        return error.strerror or str(error)
    if not ending.startswith(COMMENT_LENGTH.pack(COMMENT_BYTES) + PREFIX):
        return NO_DIGEST
    return None if ending.endswith(sha256.hexdigest().encode()) else "its SHA-256 does not match"


def file_format(path: Path) -> Any:
    """The format number in a file of another version, which may have no digest; None if there is none."""
    with suppress(Exception):  # the file may be damaged in any way
        content = read_checkpoint_file(path)
        return content.get("format") if isinstance(content, dict) else None
    return None
