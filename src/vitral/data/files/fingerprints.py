"""Fingerprints of images: what is needed to recognise an image again, in about 270 bytes.

    file hash     of the bytes: the same file, under any name
    pixel hash    of the decoded pixels: the same image, saved again without loss
    thumbnail     16×16 grey pixels: resized, recompressed or slightly cropped copies (duplicates.py)

Fingerprints of files are cached per folder and computed again when a file changes.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitral.data.decode import ImageDecodeError, decode_native
from vitral.data.files.worker import read_location
from vitral.data.files.workers import ImageLocation
from vitral.data.pixels import ChannelImage, PixelSource, to_display
from vitral.data.registry.cache import cache_dir
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError
from vitral.utils.atomic import atomic_write

THUMBNAIL_SIZE = 32
STORED_SIZE = THUMBNAIL_SIZE // 2  # of the grey thumbnail in a fingerprint
MAX_THUMBNAILS = 100_000  # 26 MB; larger sets are recognised by their hashes only
MAX_FULL_DECODE = 2**19  # bytes of a JPEG file; larger ones are decoded at reduced size
MAX_FILE_BYTES = 2**30  # of decompressed arrays; larger files are refused
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)

Array = np.ndarray[Any, Any]
ReportProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageFingerprints:
    """Fingerprints of N images. A hash of 0 and a black thumbnail match nothing."""

    file_hashes: Array  # uint64 (N,)
    pixel_hashes: Array  # uint64 (N,)
    thumbnails: Array | None  # uint8 (N, 16, 16); None: not recorded

    def __len__(self) -> int:
        return len(self.pixel_hashes)

    def __getitem__(self, rows: Array) -> ImageFingerprints:
        thumbnails = None if self.thumbnails is None else self.thumbnails[rows]
        return ImageFingerprints(
            file_hashes=self.file_hashes[rows], pixel_hashes=self.pixel_hashes[rows], thumbnails=thumbnails
        )

    def without_thumbnails(self) -> ImageFingerprints:
        return ImageFingerprints(file_hashes=self.file_hashes, pixel_hashes=self.pixel_hashes, thumbnails=None)

    def save(self, path: Path) -> None:
        arrays = {"file_hashes": self.file_hashes, "pixel_hashes": self.pixel_hashes}
        if self.thumbnails is not None:
            arrays["thumbnails"] = self.thumbnails
        atomic_write(path, _to_npz(arrays))


def load_fingerprints(path: Path) -> ImageFingerprints:
    """Read fingerprints from an .npz file. Raises VitralError if it is damaged."""
    try:
        arrays = _read_arrays(path)
        thumbnails = arrays.get("thumbnails")
        fingerprints = ImageFingerprints(
            file_hashes=arrays["file_hashes"], pixel_hashes=arrays["pixel_hashes"], thumbnails=thumbnails
        )
        count = len(fingerprints)
        for hashes in (fingerprints.file_hashes, fingerprints.pixel_hashes):
            if hashes.shape != (count,) or hashes.dtype != np.uint64:
                raise ValueError("unexpected shape or type")
        if thumbnails is not None and (
            thumbnails.shape != (count, STORED_SIZE, STORED_SIZE) or thumbnails.dtype != np.uint8
        ):
            raise ValueError("unexpected shape or type")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise VitralError(
            f"{path} is damaged: {error}", "Copy it again, or delete it to evaluate without looking for training images"
        ) from error
    return fingerprints


def _to_npz(arrays: Mapping[str, Array]) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def _read_arrays(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_FILE_BYTES:
            raise ValueError("too large")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def empty_fingerprints(count: int, *, with_thumbnails: bool = True) -> ImageFingerprints:
    """Fingerprints of zeros, to be filled in."""
    return ImageFingerprints(
        file_hashes=np.zeros(count, dtype=np.uint64),
        pixel_hashes=np.zeros(count, dtype=np.uint64),
        thumbnails=np.zeros((count, STORED_SIZE, STORED_SIZE), dtype=np.uint8) if with_thumbnails else None,
    )


def concatenate(parts: Sequence[ImageFingerprints]) -> ImageFingerprints:
    thumbnails = [part.thumbnails for part in parts if part.thumbnails is not None]
    return ImageFingerprints(
        file_hashes=np.concatenate([part.file_hashes for part in parts]),
        pixel_hashes=np.concatenate([part.pixel_hashes for part in parts]),
        thumbnails=np.concatenate(thumbnails) if len(thumbnails) == len(parts) else None,
    )


def decode_small(content: Path | str | bytes, *, allow_reduced_jpeg: bool = True) -> PixelSource:
    """Decode a file for its thumbnail: in its own pixel format, JPEG files at a reduced size."""
    size = (THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    return decode_native(content, min_size=size, allow_reduced_jpeg=allow_reduced_jpeg)


def thumbnail(image: PixelSource) -> Array:
    """The whole image resized to uint8 (32, 32, 3), regardless of its aspect ratio; the first channels of several."""
    size = (THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    return np.asarray(to_display(image).convert("RGB").resize(size, Image.Resampling.BILINEAR, reducing_gap=3.0))


def fingerprint_tensor(images_NCHW: Tensor, *, with_thumbnails: bool = True) -> ImageFingerprints:
    """Fingerprints of images in memory, which have no file."""
    fingerprints = empty_fingerprints(len(images_NCHW), with_thumbnails=with_thumbnails)
    for row, pixels in enumerate(images_NCHW.numpy()):
        if pixels.dtype != np.uint8 or len(pixels) not in (1, 3):
            fingerprint_image(fingerprints, row, ChannelImage(pixels))
            continue
        image = pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
        fingerprint_image(fingerprints, row, Image.fromarray(image))
    return fingerprints


def fingerprint_image(fingerprints: ImageFingerprints, row: int, image: PixelSource) -> None:
    """Fill in the fingerprint of a decoded image: the hash of all channels, the thumbnail of those that are shown."""
    if isinstance(image, ChannelImage):
        fingerprints.pixel_hashes[row] = _hash(repr(image.pixels.shape).encode() + image.pixels.tobytes())
    else:
        fingerprints.pixel_hashes[row] = _pixel_hash(np.asarray(image))
    if fingerprints.thumbnails is not None:
        fingerprints.thumbnails[row] = _to_stored(thumbnail(image))


def fingerprint_files(
    locations: Sequence[ImageLocation], report_progress: ReportProgress = lambda done, total: None
) -> ImageFingerprints:
    """Fingerprints of files and shard members; zeros for unreadable ones. Cached until a file changes.

    More than `MAX_THUMBNAILS` files are hashed but not decoded.
    """
    fingerprints, keys = empty_fingerprints(len(locations)), [_location_key(location) for location in locations]
    decode = len(locations) <= MAX_THUMBNAILS
    rows_by_folder: defaultdict[str, list[int]] = defaultdict(list)
    for row, location in enumerate(locations):
        rows_by_folder[_cache_folder(location)].append(row)
    missing = list(range(len(locations)))
    if decode:
        missing = [
            row for folder, rows in rows_by_folder.items() for row in _from_cache(folder, rows, keys, fingerprints)
        ]
    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:
        filled = pool.map(lambda row: _fill_row(fingerprints, row, locations[row], decode), missing)
        for num_done, _ in enumerate(filled, start=1):
            report_progress(num_done, len(missing))
    if not decode:
        return fingerprints.without_thumbnails()
    changed = set(missing)
    for folder, rows in rows_by_folder.items():
        if changed.intersection(rows):
            _to_cache(folder, rows, keys, fingerprints)
    return fingerprints


def _fill_row(fingerprints: ImageFingerprints, row: int, location: ImageLocation, decode: bool) -> None:
    """Compute one fingerprint; it stays zero if the file is unreadable."""
    try:
        content = read_location(*location)
        content = content.read_bytes() if isinstance(content, Path) else content
    except (OSError, VitralError):
        return
    if not decode:
        fingerprints.file_hashes[row] = _hash(content)
        return
    is_large = len(content) > MAX_FULL_DECODE
    try:
        image = decode_small(content, allow_reduced_jpeg=is_large)
    except ImageDecodeError:
        return
    fingerprints.file_hashes[row] = _hash(content)
    fingerprint_image(fingerprints, row, image)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _pixel_hash(pixels: Array) -> int:
    """Hash of uint8 pixels (H, W) or (H, W, C). A colour image without colour equals the grey one."""
    if pixels.ndim == 3 and _is_grey(pixels[::8, ::8]) and _is_grey(pixels):  # the sample rules most images out
        pixels = pixels[:, :, 0]
    return _hash(repr(pixels.shape).encode() + pixels.tobytes())


def _is_grey(pixels_HWC: Array) -> bool:
    return bool((pixels_HWC == pixels_HWC[:, :, :1]).all())


def _to_stored(colour_HWC: Array) -> Array:
    """Grey at half the size: each pixel is the mean of four."""
    gray = colour_HWC.astype(np.float32) @ LUMA
    means = gray.reshape(STORED_SIZE, 2, STORED_SIZE, 2).mean(axis=(1, 3))
    stored: Array = means.round().astype(np.uint8)
    return stored


# The cache: one .npz per folder or shard, with one row per file.


def _cache_folder(location: ImageLocation) -> str:
    return str(Path(location.path).parent) if location.size < 0 else location.path


def _location_key(location: ImageLocation) -> int:
    """Identifies a file and its state; 0 for a missing file, which is not cached."""
    try:
        path = Path(location.path)
        stat = path.stat()
    except OSError:
        return 0
    state = f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{location.offset}\0{location.size}"
    return _hash(state.encode(errors="surrogateescape")) or 1


def _cache_file(folder: str) -> Path:
    name = hashlib.sha256(str(Path(folder).absolute()).encode(errors="surrogateescape")).hexdigest()[:24]
    return cache_dir() / "fingerprints" / f"{name}-v2.npz"  # v1 hashed 16-bit images after conversion to 8 bits


def _from_cache(folder: str, rows: list[int], keys: list[int], fingerprints: ImageFingerprints) -> list[int]:
    """Fill in cached fingerprints; returns the rows that are not cached."""
    try:
        arrays = _read_arrays(_cache_file(folder))
        cached_rows = {int(key): index for index, key in enumerate(arrays["keys"])}
        hits = [(row, cached_rows[keys[row]]) for row in rows if keys[row] in cached_rows]
        targets, sources = [row for row, _ in hits], [index for _, index in hits]
        assert fingerprints.thumbnails is not None
        fingerprints.thumbnails[targets] = arrays["thumbnails"][sources]
        fingerprints.file_hashes[targets] = arrays["file_hashes"][sources]
        fingerprints.pixel_hashes[targets] = arrays["pixel_hashes"][sources]
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
        return rows
    rows_in_cache = set(targets)
    return [row for row in rows if row not in rows_in_cache]


def _to_cache(folder: str, rows: list[int], keys: list[int], fingerprints: ImageFingerprints) -> None:
    """Write a folder's fingerprints, keeping those of its other files that were cached before."""
    file = _cache_file(folder)
    cached = [row for row in rows if keys[row]]
    part = fingerprints[np.array(cached, dtype=np.int64)]
    assert part.thumbnails is not None
    arrays: dict[str, Array] = {
        "keys": np.array([keys[row] for row in cached], dtype=np.uint64),
        "file_hashes": part.file_hashes,
        "pixel_hashes": part.pixel_hashes,
        "thumbnails": part.thumbnails,
    }
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        previous = _read_arrays(file)
        is_other = ~np.isin(previous["keys"], arrays["keys"])
        if len(cached) + is_other.sum() <= MAX_THUMBNAILS:  # otherwise start again, without files that are gone
            arrays = {name: np.concatenate([array, previous[name][is_other]]) for name, array in arrays.items()}
    with suppress(OSError, VitralError):  # without the cache, fingerprints are computed again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, _to_npz(arrays))
