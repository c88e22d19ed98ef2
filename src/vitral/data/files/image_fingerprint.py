"""The fingerprint of one image: what is needed to recognise it again, in 272 bytes.

    file hash     of the bytes: the same file, under any name
    pixel hash    of the decoded pixels: the same image, saved again without loss
    thumbnail     16×16 grey pixels: resized, recompressed or slightly cropped copies (duplicates.py)

The pixels are those of `decode_native`. Of large JPEG files they are those at the reduced size that covers a thumbnail.
They do not depend on a model, so a file has one fingerprint. Where a decoder of training images has the same pixels, it
computes the fingerprint from them. Does not import torch.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitral.data.decode import decode_native, jpeg_reduction
from vitral.data.pixels import ChannelImage, PixelSource, to_display

THUMBNAIL_SIZE = 32
STORED_SIZE = THUMBNAIL_SIZE // 2  # of the grey thumbnail in a fingerprint
MAX_FULL_DECODE = 2**19  # bytes of a JPEG file; larger ones are decoded at reduced size
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)

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
    return _with_pixels_of(decode_small(content, allow_reduced_jpeg=len(content) > MAX_FULL_DECODE), content)


def fingerprint_decoded(content: bytes, image: PixelSource, min_side: int | None) -> Fingerprint:
    """The same for a file of which `decode_pixels` returned `image`, covering `min_side`; None: at full size.

    Decodes the file again only if the fingerprint is defined on other pixels.
    """
    defined_side = THUMBNAIL_SIZE if len(content) > MAX_FULL_DECODE else None
    reduction = jpeg_reduction(content, defined_side)
    if isinstance(image, ChannelImage) or reduction is None or reduction != jpeg_reduction(content, min_side):
        return fingerprint_content(content)
    return _with_pixels_of(image, content)


def _with_pixels_of(image: PixelSource, content: bytes) -> Fingerprint:
    return Fingerprint(hash_bytes(content), *fingerprint_pixels(image))


def fingerprint_pixels(image: PixelSource) -> tuple[int, Array]:
    """Hash of all channels, and the grey thumbnail of those that are shown."""
    if isinstance(image, ChannelImage):
        pixel_hash = _hash_array(image.pixels)
    else:
        pixels = np.asarray(image)
        if pixels.ndim == 3 and _is_grey(pixels[::8, ::8]) and _is_grey(pixels):  # the sample rules most images out
            pixels = pixels[:, :, 0]  # a colour image without colour equals the grey one
        pixel_hash = _hash_array(pixels)
    return pixel_hash, _to_stored(thumbnail(image))


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


def hash_bytes(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _hash_array(pixels: Array) -> int:
    """Hash of shape and values."""
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).data)
    return int.from_bytes(digest.digest(), "little")


def _is_grey(pixels_HWC: Array) -> bool:
    return bool((pixels_HWC == pixels_HWC[:, :, :1]).all())


def _to_stored(colour_HWC: Array) -> Array:
    """Grey at half the size: each pixel is the mean of four."""
    gray = colour_HWC.astype(np.float32) @ LUMA
    means = gray.reshape(STORED_SIZE, 2, STORED_SIZE, 2).mean(axis=(1, 3))
    stored: Array = means.round().astype(np.uint8)
    return stored
