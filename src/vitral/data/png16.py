"""PNG files with 16 bits per channel or with an alpha channel that is kept."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitral.data.pixels import ChannelImage

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

Array = np.ndarray[Any, Any]


def decode_png(source: Path | str | bytes, *, keep_alpha: bool) -> ChannelImage:
    """A 16-bit PNG with all 16 bits, or an 8-bit one with its alpha channel. Transparency is composited over white.

    Pillow keeps one byte of each 16-bit colour value. Decoding twice, as big and as little endian, yields both bytes.
    """
    bits, colour_type = _read_ihdr(source)
    if bits == 8:
        with _open(source) as image:
            pixels = np.asarray(image)
    elif colour_type == 0:
        with _open(source) as image:
            pixels = np.asarray(image)[:, :, None].astype(np.uint16)
    elif colour_type == 4:
        pixels = _load_with_rawmode(source, "RGBA").view(">u2").astype(np.uint16)
    else:
        mode = "RGB" if colour_type == 2 else "RGBA"
        high, low = (_load_with_rawmode(source, f"{mode};16{order}") for order in "BL")
        pixels = high.astype(np.uint16) << 8 | low
    if pixels.shape[2] in (2, 4) and not keep_alpha:
        max_value = np.iinfo(pixels.dtype).max
        colour, alpha = pixels[:, :, :-1].astype(np.float64), pixels[:, :, -1:] / max_value
        pixels = (colour * alpha + max_value * (1 - alpha)).round().astype(pixels.dtype)
    return ChannelImage(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _load_with_rawmode(source: Path | str | bytes, rawmode: str) -> Array:
    with _open(source) as image:
        image.tile = [tile._replace(args=rawmode) for tile in image.tile]  # type: ignore[attr-defined]
        image.load()
        return np.asarray(image)


def _open(source: Path | str | bytes) -> Image.Image:
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=("PNG",))


def _read_ihdr(source: Path | str | bytes) -> tuple[int, int]:
    """Bits per channel and colour type."""
    if not isinstance(source, bytes):
        with Path(source).open("rb") as file:
            source = file.read(32)
    return source[24], source[25]
