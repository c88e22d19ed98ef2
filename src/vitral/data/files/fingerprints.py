"""Fingerprints of many images (image_fingerprint.py), and the cache of those of files.

Fingerprints of files are cached per folder and computed again when a file changes. Training on files computes them
while it packs the images, because every file is decoded then (pack_writer.py); otherwise they are computed when they
are needed.
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

import numpy as np
from PIL import Image
from torch import Tensor

from vitral.data.decode import read_content
from vitral.data.files.image_fingerprint import (
    STORED_SIZE,
    Array,
    Fingerprint,
    fingerprint_content,
    fingerprint_pixels,
    hash_bytes,
)
from vitral.data.files.location import ImageLocation
from vitral.data.pixels import ChannelImage, PixelSource
from vitral.data.registry.cache import cache_dir
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError
from vitral.utils.atomic import atomic_write

FORMAT = 3  # of stored fingerprints; those of other formats cannot be compared
MAX_THUMBNAILS = 100_000  # 26 MB; larger sets are recognised by their hashes only
MAX_FILE_BYTES = 2**30  # of decompressed arrays; larger files are refused

ReportProgress = Callable[[int, int], None]


class FingerprintFormatError(VitralError):
    """Stored fingerprints were written by a version of vitral that computes them in another way."""


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
        arrays = {"format": np.array(FORMAT), "file_hashes": self.file_hashes, "pixel_hashes": self.pixel_hashes}
        if self.thumbnails is not None:
            arrays["thumbnails"] = self.thumbnails
        atomic_write(path, _to_npz(arrays))


def load_fingerprints(path: Path) -> ImageFingerprints:
    """Read fingerprints from an .npz file. Raises VitralError if it is damaged, FingerprintFormatError if outdated."""
    try:
        arrays = _read_arrays(path)
        if (number := int(arrays.get("format", 0))) != FORMAT:
            age, remedy = ("an older", "Train again with this") if number < FORMAT else ("a newer", "Update to that")
            raise FingerprintFormatError(
                f"{path} was written by {age} version of vitral, whose fingerprints cannot be compared",
                f"{remedy} version",
            )
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
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
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
    """Fill in the fingerprint of a decoded image that has no file."""
    fingerprints.pixel_hashes[row], thumbnail = fingerprint_pixels(image)
    if fingerprints.thumbnails is not None:
        fingerprints.thumbnails[row] = thumbnail


def fingerprint_files(
    locations: Sequence[ImageLocation], report_progress: ReportProgress = lambda done, total: None
) -> ImageFingerprints:
    """Fingerprints of files and shard members; zeros for unreadable ones. Cached until a file changes.

    More than `MAX_THUMBNAILS` files are hashed but not decoded.
    """
    if len(locations) > MAX_THUMBNAILS:
        hashes = empty_fingerprints(len(locations), with_thumbnails=False)
        _for_all(range(len(locations)), lambda row: _hash_file(hashes, row, locations[row]), report_progress)
        return hashes
    cached = CachedFingerprints(locations)
    _for_all(cached.missing, lambda row: cached.fill(row, _read_fingerprint(locations[row])), report_progress)
    cached.save()
    return cached.fingerprints


def _for_all(rows: Sequence[int], fill: Callable[[int], None], report_progress: ReportProgress) -> None:
    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:
        for num_done, _ in enumerate(pool.map(fill, rows), start=1):
            report_progress(num_done, len(rows))


def _hash_file(fingerprints: ImageFingerprints, row: int, location: ImageLocation) -> None:
    with suppress(OSError, VitralError):
        fingerprints.file_hashes[row] = hash_bytes(read_content(location.read()))


def _read_fingerprint(location: ImageLocation) -> Fingerprint | None:
    """The fingerprint of a file; None if it is unreadable."""
    with suppress(OSError, VitralError):
        return fingerprint_content(read_content(location.read()))
    return None


class CachedFingerprints:
    """Fingerprints of files: those in the cache, and those that are filled in, which `save` adds to it.

    A file's state is read here, so an object must exist before the file is read for its fingerprint.
    """

    def __init__(self, locations: Sequence[ImageLocation]) -> None:
        self.fingerprints = empty_fingerprints(len(locations))
        self._keys = [_location_key(location) for location in locations]
        self._rows_by_folder: defaultdict[str, list[int]] = defaultdict(list)
        for row, location in enumerate(locations):
            self._rows_by_folder[_cache_folder(location)].append(row)
        self._is_filled, self._is_saved = np.zeros((2, len(locations)), dtype=np.bool_)
        self.read_cache()

    @property
    def missing(self) -> list[int]:
        """Rows that are neither cached nor filled in."""
        rows: list[int] = np.flatnonzero(~self._is_filled).tolist()
        return rows

    def fill(self, row: int, fingerprint: Fingerprint | None) -> None:
        """Set a fingerprint; None for an unreadable file. May be called in any thread."""
        if fingerprint is not None:
            assert self.fingerprints.thumbnails is not None
            self.fingerprints.file_hashes[row] = fingerprint.file_hash
            self.fingerprints.pixel_hashes[row] = fingerprint.pixel_hash
            self.fingerprints.thumbnails[row] = fingerprint.thumbnail
        self._is_filled[row] = True

    def read_cache(self) -> None:
        """Fill in the rows that are in the cache."""
        for folder, rows in self._rows_by_folder.items():
            missing = [row for row in rows if not self._is_filled[row]]
            cached = _from_cache(folder, missing, self._keys, self.fingerprints) if missing else []
            self._is_filled[cached] = self._is_saved[cached] = True

    def save(self) -> None:
        """Write the rows that have been filled in to the cache."""
        is_filled = self._is_filled.copy()
        for folder, rows in self._rows_by_folder.items():
            if any(is_filled[row] and not self._is_saved[row] for row in rows):
                _to_cache(folder, [row for row in rows if is_filled[row]], self._keys, self.fingerprints)
        self._is_saved = is_filled


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
    return hash_bytes(state.encode(errors="surrogateescape")) or 1


def _cache_file(folder: str) -> Path:
    name = hashlib.sha256(str(Path(folder).absolute()).encode(errors="surrogateescape")).hexdigest()[:24]
    return cache_dir() / "fingerprints" / f"{name}-v{FORMAT}.npz"


def _from_cache(folder: str, rows: list[int], keys: list[int], fingerprints: ImageFingerprints) -> list[int]:
    """Fill in cached fingerprints; returns their rows."""
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
        return []
    return targets


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
