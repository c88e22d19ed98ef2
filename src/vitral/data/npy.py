"""Images in NumPy's .npy files. Objects are refused, and sizes are checked before memory is allocated."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitral.data.pixels import (
    MAX_BYTES,
    ArrayLayout,
    ChannelImage,
    ImageDecodeError,
    ImageTooLargeError,
    PixelType,
    channel_axis,
    to_channels_first,
)

NPY_MAGIC = b"\x93NUMPY"


def read_npy_format(
    source: Path | str | bytes, name: str, channels: int | None, layout: ArrayLayout
) -> tuple[int, int, int, PixelType]:
    """Width, height, channels and type of the pixels, from the header."""
    with _open(source) as file:
        shape, dtype, _ = _read_header(file, name)
    axis = channel_axis(shape, name, channels, layout)
    height, width = shape if axis is None else shape[1:] if axis == 0 else shape[:2]
    kept: dict[str, PixelType] = {"uint8": "uint8", "uint16": "uint16", "bool": "uint8"}
    return width, height, 1 if axis is None else shape[axis], kept.get(dtype.name, "float32")


def decode_npy(source: Path | str | bytes, name: str, channels: int | None, layout: ArrayLayout) -> ChannelImage:
    """Read an array (H, W), (C, H, W) or (H, W, C)."""
    with _open(source) as file:
        _, _, num_bytes = _read_header(file, name)
        start = file.tell()
        size = file.seek(0, io.SEEK_END) - start
        if size < num_bytes:
            raise ImageDecodeError(f"{name}: truncated, {size:,} of {num_bytes:,} bytes")
        file.seek(0)
        array = np.lib.format.read_array(file, allow_pickle=False)
    return to_channels_first(array, name, channels, layout)


def _open(source: Path | str | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb")


def _read_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape and type of an array, and the size of its data in bytes. NumPy bounds the size of the header."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ImageDecodeError(f"{name}: an array of Python objects, which could execute code", "Save a numeric array")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_BYTES:
        raise ImageTooLargeError(f"{name}: {num_bytes:,} bytes of pixels, more than the limit of {MAX_BYTES:,}")
    return shape, dtype, num_bytes
