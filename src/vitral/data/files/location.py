"""Where image files are: paths, and byte ranges of shards. Does not import torch: decoding processes use it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vitral.data.files.remote import is_url, read_range


def file_version(path: Path) -> str:
    """A string that changes when a file is moved or changed. Raises OSError if there is no such file."""
    stat = path.stat()
    return f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"


class ImageLocation(NamedTuple):
    """A whole file, or a byte range of a local or remote shard."""

    path: str  # or URL
    offset: int = 0
    size: int = -1  # -1: the whole file

    def __str__(self) -> str:
        return self.path if self.size < 0 else f"{self.path} at byte {self.offset}"

    def read(self) -> Path | bytes:
        """The path of a whole file, or the bytes of a part of a shard: what decoders accept."""
        if self.size < 0:
            return Path(self.path)
        if is_url(self.path):
            return read_range(self.path, self.offset, self.size)
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)
