"""TIFF files with more than an 8-bit photograph: their header, and their pixels as a ChannelImage.

Three ways to store C channels are read: C grey pages, C samples per pixel (interleaved), C planes (planar). Pages that
are smaller than the first one (previews, pyramids), masks and the further pages of colour images are not channels.
Headers are parsed here, so that sizes are checked before memory is allocated. Pages are decoded by Pillow, several
samples per pixel by tifffile.
"""

from __future__ import annotations

import html
import io
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from vitral.data.pixels import ChannelImage, ImageDecodeError, PixelType, to_pixel_type

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # classic and BigTIFF
MAX_PAGES, MAX_TAGS, MAX_DESCRIPTION = 1024, 1024, 2**20
TYPE_FORMATS = {1: "B", 2: "B", 3: "H", 4: "I", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}  # by TIFF type
GREY, RGB, COLOUR = (0, 1), 2, (2, 3, 5, 6, 8)  # photometric interpretations: palette, CMYK, YCbCr, CIELab are colour
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # sample formats

SUBFILE, WIDTH, HEIGHT, BITS, PHOTOMETRIC, DESCRIPTION, ORIENTATION = 254, 256, 257, 258, 262, 270, 274
SAMPLES, EXTRA_SAMPLES, SAMPLE_FORMAT = 277, 338, 339


class TiffPage(NamedTuple):
    """What the tags of a page say about its pixels."""

    number: int  # in the file, counting all pages
    width: int
    height: int
    bits: int
    samples: int
    sample_format: int
    photometric: int
    extra_samples: tuple[int, ...]
    orientation: int
    description: str

    @property
    def is_photo(self) -> bool:
        """Whether Pillow reads the page as an 8-bit grey or colour image, possibly with transparency."""
        alpha = sum(extra in (1, 2) for extra in self.extra_samples)
        colours = {1: 1, 3: 1, 2: 3, 0: 1, 5: 4, 6: 3, 8: 3}.get(self.photometric)
        return self.bits <= 8 and self.sample_format == UNSIGNED and self.samples - alpha == colours and alpha <= 1

    @property
    def dtype(self) -> PixelType | None:
        """The type that the values are kept in; None if they are not supported."""
        if self.sample_format == UNSIGNED and self.bits in (8, 16):
            return "uint8" if self.bits == 8 else "uint16"
        return "float32" if self.bits in (8, 16, 32, 64) else None


class TiffHeader(NamedTuple):
    """The pages that are channels: one page, or several grey pages of equal size and type."""

    pages: tuple[TiffPage, ...]

    @property
    def channels(self) -> int:
        return len(self.pages) if len(self.pages) > 1 else self.pages[0].samples

    @property
    def is_photo(self) -> bool:
        return len(self.pages) == 1 and self.pages[0].is_photo

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names in OME-XML or in ImageJ's slice labels; empty unless there is one per channel."""
        description = self.pages[0].description
        names = re.findall(r"<(?:\w+:)?Channel\b[^>]*?\bName=\"([^\"]*)\"", description)
        return tuple(map(html.unescape, names)) if len(names) == self.channels else ()


def read_tiff_header(source: Path | str | bytes) -> TiffHeader:
    """Read the tags of all pages. Raises ValueError, struct.error or OSError if the file is damaged."""
    if isinstance(source, bytes):
        return _parse(io.BytesIO(source))
    with Path(source).open("rb") as file:
        return _parse(file)


def _parse(file: BinaryIO) -> TiffHeader:
    magic = file.read(4)
    if magic not in MAGIC:
        raise ValueError("not a TIFF file")
    order, is_big = "<" if magic[:1] == b"I" else ">", b"+" in magic
    if is_big:
        file.read(4)
    offset = _unpack(file, order + ("Q" if is_big else "I"))
    pages: list[TiffPage] = []
    number, seen = 0, set[int]()
    while offset and len(seen) < MAX_PAGES:
        if offset in seen:
            raise ValueError("its pages form a loop")
        seen.add(offset)
        file.seek(offset)
        tags, offset = _read_tags(file, order, is_big)
        page = _to_page(number, tags)
        if not _first(tags, SUBFILE, 0) & 0b101:  # a reduced image or a mask
            pages.append(page)
        number += 1
    if not pages:
        raise ValueError("no pages")
    first = pages[0]
    is_stack = first.samples == 1 and first.photometric in GREY and first.bits >= 8
    same = [page for page in pages if _pixel_key(page) == _pixel_key(first)]
    return TiffHeader(tuple(same) if is_stack else (first,))


def _pixel_key(page: TiffPage) -> tuple[Any, ...]:
    return page[1:7]


def _unpack(file: BinaryIO, format: str) -> int:
    content = file.read(struct.calcsize(format))
    return int(struct.unpack(format, content)[0])


def _read_tags(file: BinaryIO, order: str, is_big: bool) -> tuple[dict[int, tuple[int, ...] | str], int]:
    """The needed tags of a page, and the offset of the next one."""
    needed = {SUBFILE, WIDTH, HEIGHT, BITS, PHOTOMETRIC, ORIENTATION, SAMPLES, EXTRA_SAMPLES, SAMPLE_FORMAT}
    count = _unpack(file, order + ("Q" if is_big else "H"))
    if count > MAX_TAGS:
        raise ValueError(f"{count:,} tags in a page")
    entry_format = order + ("HHQ8s" if is_big else "HHI4s")
    size = struct.calcsize(entry_format)
    entries, next_page = file.read(count * size), _unpack(file, order + ("Q" if is_big else "I"))
    tags: dict[int, tuple[int, ...] | str] = {}
    for tag, kind, length, value in struct.iter_unpack(entry_format, entries):
        if tag not in needed and tag != DESCRIPTION:
            continue
        code = TYPE_FORMATS.get(kind)
        if code is None or length > (MAX_DESCRIPTION if tag == DESCRIPTION else MAX_TAGS):
            continue
        num_bytes = length * struct.calcsize(order + code)
        if num_bytes > len(value):
            file.seek(struct.unpack(order + ("Q" if is_big else "I"), value)[0])
            value = file.read(num_bytes)
        if tag == DESCRIPTION:
            tags[tag] = value[:num_bytes].rstrip(b"\0").decode(errors="replace")
        else:
            tags[tag] = struct.unpack(f"{order}{length}{code}", value[:num_bytes])
    return tags, next_page


def _first(tags: dict[int, tuple[int, ...] | str], tag: int, default: int) -> int:
    values = tags.get(tag)
    return int(values[0]) if values and not isinstance(values, str) else default


def _to_page(number: int, tags: dict[int, tuple[int, ...] | str]) -> TiffPage:
    samples, bits = _first(tags, SAMPLES, 1), tags.get(BITS, (1,))
    if len(set(bits)) > 1:
        raise ValueError(f"samples of {', '.join(map(str, bits))} bits")
    extra, description = tags.get(EXTRA_SAMPLES, ()), tags.get(DESCRIPTION, "")
    return TiffPage(
        number=number,
        width=_first(tags, WIDTH, 0),
        height=_first(tags, HEIGHT, 0),
        bits=_first(tags, BITS, 1),
        samples=samples,
        sample_format=_first(tags, SAMPLE_FORMAT, UNSIGNED),
        photometric=_first(tags, PHOTOMETRIC, 1),
        extra_samples=extra if not isinstance(extra, str) else (),
        orientation=_first(tags, ORIENTATION, 1),
        description=description if isinstance(description, str) else "",
    )


def decode_tiff(source: Path | str | bytes, header: TiffHeader, name: str) -> ChannelImage:
    """Decode the channels of a file whose size has been checked."""
    first = header.pages[0]
    if first.dtype is None:
        raise ImageDecodeError(f"{name}: {first.bits} bits per value", "Supported: 8, 16, 32 and 64 bits")
    opened: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    pixels = _decode_pages(opened, header) if first.samples == 1 else _decode_samples(opened, first, name)
    if pixels.shape != (header.channels, first.height, first.width):
        raise ImageDecodeError(f"{name}: corrupt, its pixels have the shape {pixels.shape}", "Save it again")
    return ChannelImage(to_pixel_type(_upright(pixels, first.orientation), name), header.channel_names)


def _decode_pages(opened: Any, header: TiffHeader) -> np.ndarray[Any, Any]:
    with Image.open(opened, formats=("TIFF",)) as image:
        pages = []
        for page in header.pages:
            image.seek(page.number)
            pages.append(np.array(image))
    return np.stack(pages)


def _decode_samples(opened: Any, page: TiffPage, name: str) -> np.ndarray[Any, Any]:
    try:
        import tifffile
    except ImportError as error:
        raise ImageDecodeError(
            f"{name}: reading {page.samples} samples per pixel requires tifffile", "pip install 'vitral[data]'"
        ) from error
    with tifffile.TiffFile(opened) as file:
        stored: Any = file.pages[page.number]
        try:
            pixels: np.ndarray[Any, Any] = np.asarray(stored.asarray())
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            raise ImageDecodeError(
                f"{name}: its compression is not supported without imagecodecs",
                "pip install imagecodecs, or save it uncompressed or with deflate",
            ) from error
        is_planar = stored.planarconfig == 2
    return pixels if is_planar else np.moveaxis(pixels, -1, 0)


def _upright(pixels_CHW: np.ndarray[Any, Any], orientation: int) -> np.ndarray[Any, Any]:
    """Apply the orientation tag, which has EXIF's values."""
    if orientation in (5, 6, 7, 8):
        pixels_CHW = pixels_CHW.transpose(0, 2, 1)
    if orientation in (3, 4, 7, 8):
        pixels_CHW = pixels_CHW[:, ::-1]
    if orientation in (2, 3, 6, 7):
        pixels_CHW = pixels_CHW[:, :, ::-1]
    return np.ascontiguousarray(pixels_CHW)
