"""The image decoder: a file, bytes, a Pillow image or an array → an upright image.

    decode_image     a Pillow image with 8 bits per channel, grey or RGB, whatever the file holds
    decode_pixels    an image in the pixel format of a model: a Pillow image for 8-bit grey and RGB, else a ChannelImage
    decode_native    an image in the pixel format of the file

Does not import torch, so that decoding workers and `vitral predict model.onnx` start quickly.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vitral.data import tiff
from vitral.data.files.walk import IMAGE_SUFFIXES, irregular_file_kind, iter_images
from vitral.data.npy import NPY_MAGIC, decode_npy, read_npy_format
from vitral.data.pixels import (
    MAX_BYTES,
    MAX_PIXELS,
    ArrayLayout,
    PixelFormat,
    PixelSource,
    PixelType,
    fit_pixel_format,
    to_channels_first,
)
from vitral.data.pixels import SUPPORTED_FORMATS as SUPPORTED_FORMATS
from vitral.data.pixels import ImageDecodeError as ImageDecodeError
from vitral.data.pixels import ImageTooLargeError as ImageTooLargeError
from vitral.data.png16 import PNG_MAGIC, decode_png
from vitral.errors import VitralError

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # Pillow's other decoders may start external programs
EXIF_ORIENTATION = 0x0112
DECODER_BLOCK = 2**22  # bytes that Pillow's decoders read at a time; its 64 kB slow a JPEG of 12 megapixels by 3%

Array = np.ndarray[Any, Any]


class ImageHeader(NamedTuple):
    """Properties of an image file that are known without decoding it."""

    width: int
    height: int
    mode: str  # Pillow's: "L", "RGB", "CMYK", ...; otherwise "5 channels, 16-bit"
    frames: int


class FileFormat(NamedTuple):
    """Size and pixel format of an image file, known without decoding it."""

    width: int
    height: int
    channels: int
    dtype: PixelType
    names: tuple[str, ...] = ()  # of the channels, if the file has them

    @property
    def is_photo(self) -> bool:
        return PixelFormat(self.channels, self.dtype).is_photo

    @property
    def num_bytes(self) -> int:
        return self.width * self.height * self.channels * np.dtype(self.dtype).itemsize


def decode_image(
    source: object,
    *,
    min_size: tuple[int, int] | None = None,
    allow_reduced_jpeg: bool = False,
    name: str | None = None,
) -> Image.Image:
    """Decode an image: EXIF orientation applied, transparency composited over white, mode "L" or "RGB".

    `source` is a path, the bytes of a file, a Pillow image (left unchanged), or an array or tensor of shape (H, W),
    (H, W, C) or (C, H, W) with integers from 0 to 255 or floats from 0 to 1.

    With `allow_reduced_jpeg`, a JPEG file may be decoded at 1/2, 1/4 or 1/8 of its size as long as it still covers
    `min_size` (height, width). This is several times faster; the pixels differ slightly from a full decode.
    `name` is how error messages refer to the image; by default the path.
    """
    if isinstance(source, Image.Image):
        with _translate_errors(source, name or "the image"):
            _check_pixel_count(source, name or "the image")
            return _load_upright_8bit(source.copy())
    if not isinstance(source, Path | str | bytes):
        return decode_image(_array_to_pil(source), name=name)
    name = name or ("the image" if isinstance(source, bytes) else str(source))
    with _translate_errors(source, name), _open(source) as image:
        _check_pixel_count(image, name)  # of the file, before a reduced decode makes it smaller
        if allow_reduced_jpeg and min_size is not None:
            _reduce_jpeg(image, max(min_size))
        return _load_upright_8bit(image)


def decode_pixels(
    source: object,
    pixel_format: PixelFormat,
    *,
    min_size: tuple[int, int] | None = None,
    allow_reduced_jpeg: bool = False,
    name: str | None = None,
) -> PixelSource:
    """Decode an image for a model: the arguments of `decode_image`, and the pixel format that the model expects.

    Returns a Pillow image for a model of 8-bit grey or RGB images, otherwise a ChannelImage. Another number of
    channels or type is an ImageDecodeError that names both. A model of 4 channels gets the alpha channel of RGBA files.
    """
    if pixel_format.is_photo and not (isinstance(source, Path | str | bytes) and may_have_channels(source)):
        return decode_image(source, min_size=min_size, allow_reduced_jpeg=allow_reduced_jpeg, name=name)
    name = name or (str(source) if isinstance(source, Path | str) else "the image")
    return fit_pixel_format(decode_native(source, pixel_format, name=name), pixel_format, name)


def decode_native(
    source: object,
    expected: PixelFormat | None = None,
    *,
    min_size: tuple[int, int] | None = None,
    allow_reduced_jpeg: bool = False,
    name: str | None = None,
) -> PixelSource:
    """Decode an image in its own pixel format: a Pillow image for 8-bit grey and RGB, otherwise a ChannelImage.

    `expected` is the format of the model, if there is one. It decides how arrays are read whose shape is ambiguous,
    whether transparency is a channel, and that files which Pillow can convert to 8 bits are converted.
    """
    name = name or (str(source) if isinstance(source, Path | str) else "the image")
    channels = None if expected is None else expected.channels
    layout: ArrayLayout = "auto" if expected is None else expected.layout
    if isinstance(source, Image.Image):
        content = source.copy()
        if content.mode in ("I;16", "I;16L", "I;16B", "I", "F") or (content.mode == "RGBA" and channels == 4):
            return to_channels_first(np.asarray(content), name, channels, "hwc")
        return decode_image(source, name=name)
    if not isinstance(source, Path | str | bytes):
        return to_channels_first(_to_array(source), name, channels, "chw" if _is_tensor(source) else layout)
    with _translate_errors(source, name):
        magic = _read_start(source)
        if magic.startswith(NPY_MAGIC):
            return decode_npy(source, name, channels, layout)
        if magic.startswith(tiff.MAGIC):
            header = tiff.read_tiff_header(source)
            _check_size(FileFormat(*_tiff_format(header)), name)
            if header.channels == channels == 4 or not _pillow_reads(header, expected):
                return tiff.decode_tiff(source, header, name)
        elif magic.startswith(PNG_MAGIC) and (magic[24] == 16 or (channels == 4 and magic[25] == 6)):
            with _open(source) as image:
                _check_pixel_count(image, name)
            return decode_png(source, keep_alpha=channels in (2, 4))
    return decode_image(source, min_size=min_size, allow_reduced_jpeg=allow_reduced_jpeg, name=name)


def read_format(
    source: Path | str | bytes,
    name: str | None = None,
    *,
    layout: ArrayLayout = "auto",
    channels: int | None = None,
) -> FileFormat:
    """Read size, channels and type of a file without decoding it. 8-bit images count as grey or RGB, as they are read.

    `channels` and `layout` are those of the model, if there is one, for arrays whose shape is ambiguous.
    """
    name = name or ("the image" if isinstance(source, bytes) else str(source))
    with _translate_errors(source, name):
        magic = _read_start(source)
        if magic.startswith(NPY_MAGIC):
            return FileFormat(*read_npy_format(source, name, channels, layout))
        if magic.startswith(tiff.MAGIC):
            return FileFormat(*_tiff_format(tiff.read_tiff_header(source)))
        with _open(source) as image:
            is_16_bit = magic.startswith(PNG_MAGIC) and magic[24] == 16
            is_grey = image.mode in ("1", "L", "LA", "I;16") if not is_16_bit else magic[25] in (0, 4)
            return FileFormat(image.width, image.height, 1 if is_grey else 3, "uint16" if is_16_bit else "uint8")


def read_content(source: Path | str | bytes) -> bytes:
    """The bytes of an image file. Refuses pipes and devices, from which reading would block."""
    if isinstance(source, bytes):
        return source
    with _translate_errors(source, str(source)):
        _check_is_file(Path(source))
        return Path(source).read_bytes()


def has_other_native_pixels(content: bytes) -> bool:
    """Whether `decode_native` may return other pixels than `decode_image`: of TIFF, .npy and 16-bit PNG."""
    return content.startswith((NPY_MAGIC, *tiff.MAGIC)) or (content.startswith(PNG_MAGIC) and content[24] == 16)


def read_header(source: Path | str | bytes) -> ImageHeader:
    """Read size, mode and frame count without decoding pixels."""
    with _translate_errors(source, "the image" if isinstance(source, bytes) else str(source)):
        width, height, channels, dtype = read_format(source)[:4]
        pixel_format = PixelFormat(channels, dtype)
        if not pixel_format.is_photo:
            return ImageHeader(width, height, str(pixel_format), 1)
        if _read_start(source).startswith(NPY_MAGIC):
            return ImageHeader(width, height, "L" if channels == 1 else "RGB", 1)
        with _open(source) as image:
            return ImageHeader(image.width, image.height, image.mode, getattr(image, "n_frames", 1))


def may_have_channels(source: Path | str | bytes) -> bool:
    """Whether a file is TIFF or .npy, which may hold any number of channels. Other image suffixes are not opened."""
    if not isinstance(source, bytes):
        suffix = Path(source).suffix.lower()
        if suffix in IMAGE_SUFFIXES and suffix not in (".tif", ".tiff", ".npy"):
            return False
    try:
        return _read_start(source).startswith((NPY_MAGIC, *tiff.MAGIC))
    except (OSError, ValueError):
        return False  # reported when the file is decoded


def _read_start(source: Path | str | bytes) -> bytes:
    """The first bytes of a file; empty for anything but regular files."""
    if isinstance(source, bytes):
        return source[:32]
    if irregular_file_kind(Path(source).stat().st_mode) is not None:
        return b""
    with Path(source).open("rb") as file:
        return file.read(32)


def _tiff_format(header: tiff.TiffHeader) -> tuple[int, int, int, PixelType, tuple[str, ...]]:
    page = header.pages[0]
    width, height = (page.height, page.width) if page.orientation >= 5 else (page.width, page.height)
    if header.is_photo:
        return width, height, 1 if page.photometric in tiff.GREY and page.samples == 1 else 3, "uint8", ()
    return width, height, header.channels, page.dtype or "float32", header.channel_names


def _pillow_reads(header: tiff.TiffHeader, expected: PixelFormat | None) -> bool:
    """Whether `decode_image` reads a TIFF: an 8-bit photograph, or a grey page to be converted for a model of those."""
    is_converted = expected is not None and expected.is_photo and header.channels == 1
    return header.is_photo or is_converted


def _check_size(file_format: FileFormat, name: str) -> None:
    """Refuse sizes that could exhaust memory, before any is allocated."""
    width, height, channels, dtype = file_format[:4]
    if width * height > MAX_PIXELS or width * height * channels * np.dtype(dtype).itemsize > MAX_BYTES:
        size = f"{width}×{height} pixels" + (f" with {channels} channels" if channels > 3 else "")
        raise ImageTooLargeError(f"{name}: {size}, more than the limit of {MAX_BYTES / 10**6:g} MB")


def read_upright_size(source: Path | str | bytes, pixel_format: PixelFormat) -> tuple[int, int]:
    """Height and width of the image that `decode_pixels` returns, without decoding pixels."""
    if may_have_channels(source):
        file_format = read_format(source, layout=pixel_format.layout, channels=pixel_format.channels)
        return file_format.height, file_format.width
    with _translate_errors(source, "the image" if isinstance(source, bytes) else str(source)), _open(source) as image:
        width, height = image.size
        with contextlib.suppress(Exception):  # as in decoding
            if image.getexif().get(EXIF_ORIENTATION) in (5, 6, 7, 8):  # rotated by 90 degrees
                return width, height
        return height, width


def _open(source: Path | str | bytes) -> Image.Image:
    if not isinstance(source, bytes):
        _check_is_file(Path(source))
    image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=IMAGE_FORMATS)
    image.decodermaxblock = DECODER_BLOCK
    return image


def _check_is_file(path: Path) -> None:
    if (kind := irregular_file_kind(path.stat().st_mode)) is not None:  # opening a pipe would block
        raise ImageDecodeError(f"{path}: {kind}, not a file", "Write the image to a file first")


def _check_pixel_count(image: Image.Image, name: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        limit = f"{MAX_PIXELS / 10**6:g} megapixels"
        raise ImageTooLargeError(f"{name}: {image.width}×{image.height} pixels, more than the limit of {limit}")


@contextlib.contextmanager
def _translate_errors(source: object, name: str) -> Iterator[None]:
    """Raise ImageDecodeError with a specific message for whatever goes wrong inside the block."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metadata and decompression bombs; the size is checked separately
            yield
    except ImageDecodeError:
        raise
    except UnidentifiedImageError as error:
        raise ImageDecodeError(f"{name}: {_unidentified_reason(source)}") from error
    except FileNotFoundError as error:
        if re.match(r"https?:/", name):  # Path collapses the second slash
            raise ImageDecodeError(f"{name}: a URL, not a file", "Download the image first") from error
        if Path(name).is_symlink():
            raise ImageDecodeError(f"{name}: dangling link to {Path(name).readlink()}", "Restore that file") from error
        raise ImageDecodeError(f"{name}: no such file", "Check the path") from error
    except IsADirectoryError as error:
        if next(iter_images([Path(name)]), None) is None:
            raise ImageDecodeError(f"{name}: a folder without images") from error
        raise ImageDecodeError(f"{name}: a folder, not an image", "Name an image in it") from error
    except PermissionError as error:
        raise ImageDecodeError(f"{name}: permission denied", "Check the file's permissions") from error
    except Image.DecompressionBombError as error:
        raise ImageTooLargeError(f"{name}: more than the limit of {MAX_PIXELS / 10**6:g} megapixels") from error
    except Exception as error:  # Pillow raises almost anything on corrupt files: struct.error, IndexError, ...
        raise ImageDecodeError(f"{name}: corrupt or truncated ({str(error) or type(error).__name__})") from error


def _unidentified_reason(source: object) -> str:
    """Why Pillow cannot identify a file. Phones write HEIC, sometimes with the suffix .jpg."""
    if isinstance(source, Path | str):
        with Path(source).open("rb") as file:
            source = file.read(12)
    if not source:
        return "empty file"
    if isinstance(source, bytes) and source[4:8] == b"ftyp":
        return "HEIC, AVIF or video, which is not supported; convert it to JPEG"
    return "not an image"


def _reduce_jpeg(image: Image.Image, min_side: int) -> None:
    """Let the JPEG decoder skip detail that resizing would discard; both sides stay at least `min_side`."""
    short = min(image.size)
    if short >= 2 * min_side:
        image.draft(None, (image.width * min_side // short, image.height * min_side // short))


def _load_upright_8bit(image: Image.Image) -> Image.Image:
    image.load()
    with contextlib.suppress(Exception):  # with corrupt metadata only the orientation is lost
        ImageOps.exif_transpose(image, in_place=True)  # in place: no copy if the image is already upright
    return to_8bit(image)


def to_8bit(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to "L" or "RGB"."""
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I", "F"):
        values = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)
        max_value = 1.0 if image.mode == "F" and values.max(initial=0) <= 1 else 65535.0
        if image.mode in ("I", "F") and 1 < values.max(initial=0) <= 255:
            max_value = 255.0
        return Image.fromarray((values / max_value * 255).clip(0, 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode in ("L", "RGB"):
        return image  # convert() would copy
    return image.convert("L" if image.mode == "1" else "RGB")


def _to_array(source: object) -> Array:
    kind = type(source).__name__
    try:
        values: Array = np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ImageDecodeError(f"{kind} is not an image ({error})") from error
    if not values.ndim:
        raise ImageDecodeError(f"{kind} is not an image")
    return values


def _array_to_pil(source: object) -> Image.Image:
    """A Pillow image from an array or tensor of shape (H, W), (H, W, C) or (C, H, W), integer, float or bool."""
    values = _to_array(source)
    if _is_channels_first(values.shape, is_tensor=_is_tensor(source)):
        values = values.transpose(1, 2, 0)
    if values.ndim not in (2, 3) or not values.size or (values.ndim == 3 and values.shape[2] not in (1, 3, 4)):
        shape = "×".join(map(str, values.shape))
        raise ImageDecodeError(f"an array of shape {shape} and type {values.dtype} is not an image")
    if values.dtype.kind == "f":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise _float_range_error(values)
        values = (values * 255).round()
    if values.dtype.kind not in "uifb" or values.min() < 0 or values.max() > 255:
        raise ImageDecodeError(f"an array of {values.dtype} with values outside 0 to 255 is not an image")
    values = values.astype(np.uint8) if values.dtype.kind != "b" else values.astype(np.uint8) * 255
    return Image.fromarray(values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a tensor exists only if torch has been imported
    return torch is not None and isinstance(value, torch.Tensor)


def _is_channels_first(shape: tuple[int, ...], *, is_tensor: bool) -> bool:
    """Whether an array is (C, H, W). If both readings are possible, tensors are (C, H, W) and arrays (H, W, C)."""
    channel_counts = (1, 3, 4)
    return len(shape) == 3 and shape[0] in channel_counts and (is_tensor or shape[2] not in channel_counts)


def _float_range_error(values: Array) -> VitralError:
    if values.min() >= 0 and 1 < values.max() <= 255:
        return VitralError(
            "a float image has values up to 255, expected 0 to 1", "Divide it by 255 or convert to uint8"
        )
    return VitralError(
        "a float image has values outside 0 to 1; it seems to be normalised already",
        "Pass the image without normalisation; the model's preprocessing normalises it",
    )
