"""CRC-32 checksums of the images of a pack, row by row, and of the whole file from those of its rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 16 * 2**20  # read at a time


def row_checksum(row: np.ndarray[Any, Any]) -> int:
    """Checksum of a contiguous array. Releases the GIL."""
    return zlib.crc32(row.data)


def file_checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def join_checksums(first: int, row_checksums: Iterable[int], row_bytes: int) -> int:
    """Checksum of data with checksum `first`, followed by rows of `row_bytes` bytes each, without reading them again.

    crc32(row, x) = L(x) ^ crc32(row, 0), where L is linear over GF(2) and depends only on the length of the row. L is
    tabulated for each byte of x.
    """
    zeros = bytes(row_bytes)
    offset = zlib.crc32(zeros)
    tables = [[zlib.crc32(zeros, 1 << bit) ^ offset for bit in range(8 * byte, 8 * byte + 8)] for byte in range(4)]
    low, second, third, high = (_span(columns) for columns in tables)
    checksum = first
    for row in row_checksums:
        shifted = low[checksum & 255] ^ second[checksum >> 8 & 255] ^ third[checksum >> 16 & 255] ^ high[checksum >> 24]
        checksum = shifted ^ row
    return checksum


def _span(columns: list[int]) -> list[int]:
    """The image of every byte under the linear map with these 8 columns."""
    values = [0]
    for column in columns:
        values += [value ^ column for value in values]
    return values
