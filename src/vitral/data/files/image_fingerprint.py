"""The fingerprint of one image: what is needed to recognise it again, in 272 bytes.

    file hash     of the bytes: the same file, under any name
    pixel hash    of the decoded pixels: the same image, saved again without loss
    thumbnail     16×16 grey pixels: resized, recompressed or slightly cropped copies (duplicates.py)

Where a file is decoded for a model, its fingerprint is computed from these pixels. Those of a large JPEG file may have
been decoded at reduced size. They have another pixel hash than those at full size, and almost the same thumbnail. Does
not import torch.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitral.data.decode import decode_native, has_other_native_pixels
from vitral.data.pixels import ChannelImage, PixelSource, to_display

THUMBNAIL_SIZE = 32
STORED_SIZE = THUMBNAIL_SIZE // 2  # of the grey thumbnail in a fingerprint
REDUCED_SIZE = 5 * STORED_SIZE  # to which an image is averaged before it is resized; Pillow averages 5×5 pixels fastest
MAX_FULL_DECODE = 2**19  # bytes of a JPEG file; larger ones are decoded at reduced size for their fingerprint alone
MAX_SHARED_PIXELS = 2**22  # decoded for the model; decoding a larger JPEG file again at reduced size is faster
SAMPLE_BYTES = 4096

Array = np.ndarray[Any, Any]


class Fingerprint(NamedTuple):
    """What identifies an image. A hash of 0 and a black thumbnail match nothing."""

    file_hash: int
    pixel_hash: int
    thumbnail: Array  # uint8 (16, 16)

    def to_hex(self) -> str:
        hashes = np.array([self.file_hash, self.pixel_hash], dtype="<u8")
        return (hashes.tobytes() + self.thumbnail.tobytes()).hex()

    @classmethod
    def from_hex(cls, text: str) -> Fingerprint:
        content = bytes.fromhex(text)
        file_hash, pixel_hash = np.frombuffer(content, dtype="<u8", count=2).tolist()
        thumbnail = np.frombuffer(content, dtype=np.uint8, offset=16).reshape(STORED_SIZE, STORED_SIZE)
        return cls(file_hash, pixel_hash, thumbnail)


def fingerprint_content(content: bytes) -> Fingerprint:
    """Fingerprint of the bytes of an image file. Raises ImageDecodeError if they cannot be decoded."""
    image = decode_small(content, allow_reduced_jpeg=len(content) > MAX_FULL_DECODE)
    return Fingerprint(hash_bytes(content), *fingerprint_pixels(image))


def fingerprint_decoded(content: bytes, image: PixelSource, pixels_HWC: Array | None = None) -> Fingerprint:
    """The same for a file of which `decode_pixels` returned `image`; `pixels_HWC` is the array of it, if there is one.

    Decodes the file again only if it has channels or values that the model does not get, or if that is faster.
    """
    is_large_jpeg = image.width * image.height > MAX_SHARED_PIXELS and content.startswith(b"\xff\xd8")
    if isinstance(image, ChannelImage) or has_other_native_pixels(content) or is_large_jpeg:
        return fingerprint_content(content)
    return Fingerprint(hash_bytes(content), *fingerprint_pixels(image, pixels_HWC))


def fingerprint_pixels(image: PixelSource, pixels_HWC: Array | None = None) -> tuple[int, Array]:
    """Hash of all channels, and the grey thumbnail of those that are shown."""
    if isinstance(image, ChannelImage):
        pixels = image.pixels
    else:
        pixels = np.asarray(image) if pixels_HWC is None else pixels_HWC
        if pixels.ndim == 3 and _is_grey(pixels[::32, ::32]) and _is_grey(pixels):  # the sample rules most images out
            pixels = pixels[:, :, 0]  # a colour image without colour equals the grey one
    pixel_hash = hash_bytes(np.ascontiguousarray(pixels).data, repr(pixels.shape).encode())
    return pixel_hash, _grey_thumbnail(image)


def decode_small(content: Any, *, allow_reduced_jpeg: bool = True) -> PixelSource:
    """Decode a file for its thumbnail: in its own pixel format, JPEG files at a reduced size."""
    size = (THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    return decode_native(content, min_size=size, allow_reduced_jpeg=allow_reduced_jpeg)


def thumbnail(image: PixelSource) -> Array:
    """The whole image resized to uint8 (32, 32, 3), regardless of its aspect ratio; the first channels of several."""
    shown = to_display(image)
    shown = shown if shown.mode == "RGB" else shown.convert("RGB")  # convert() would copy
    size = (THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    return np.asarray(shown.resize(size, Image.Resampling.BILINEAR, reducing_gap=3.0))


def _grey_thumbnail(image: PixelSource) -> Array:
    """The whole image as uint8 (16, 16): averaged over squares of pixels, then resized."""
    shown = to_display(image)
    factor = max(min(shown.size) // REDUCED_SIZE, 1)
    reduced = shown.reduce(factor) if factor > 1 else shown
    box = (0, 0, shown.width / factor, shown.height / factor)  # without what the last squares lack
    return np.asarray(reduced.convert("L").resize((STORED_SIZE, STORED_SIZE), Image.Resampling.BILINEAR, box=box))


def hash_bytes(content: bytes | memoryview, prefix: bytes = b"") -> int:
    """64 bits that identify `prefix` and `content`.

    BLAKE2b of a CRC-32 of the content and of a sample of its bytes, which are all bytes of short contents. BLAKE2b of
    all bytes would take five times as long as the CRC-32.
    """
    values = np.frombuffer(content, dtype=np.uint8)
    sample = values[:: len(values) // SAMPLE_BYTES or 1]
    header = len(values).to_bytes(8, "little") + zlib.crc32(content).to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(prefix + header + sample.tobytes(), digest_size=8).digest(), "little")


def _is_grey(pixels_HWC: Array) -> bool:
    first, *others = np.moveaxis(pixels_HWC, 2, 0)
    return all((first == channel).all() for channel in others)
