"""Packed datasets: every split decoded once into a memory-mapped file and then read at memory speed.

    photos-3f9c0a…-v3/       one folder per dataset; the name contains the fingerprint of files, labels and image size
      index.json             classes, image size and channels, source
      train.npy              pixels (N, C, H, W)     train.json   labels, unreadable files, preprocessing, checksum,
                                                                  sizes of the images if they differ
      validation.npy …       test.npy …              written on first access

Training images are stored larger than the model input, so that crops can be drawn, and may be decoded at a reduced
size. Validation and test images are stored as model input, pixel for pixel what `Predictor` computes from the files.

The .json of a split is written last: a split without it is incomplete. It holds size, time and checksum of the .npy
file, which is read again only if size or time have changed. The operating system caches the pages in use, so a packed
dataset may be larger than memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.files.checked_json import read_checked_json, warn_rebuilt, write_checked_json
from vitral.data.files.image_sizes import read_stored_sizes
from vitral.data.files.unreadable import check_unreadable_fraction, replace_or_drop_unreadable
from vitral.data.files.worker import DecodeOptions, decode_into
from vitral.data.files.workers import (
    FILES_PER_MESSAGE,
    DecodeErrors,
    DecodeWorkers,
    ImageLocation,
    decode_options,
)
from vitral.data.geometry import Size
from vitral.data.lazy_images import Images
from vitral.data.pixels import PixelType
from vitral.data.preprocess import Preprocessing
from vitral.data.progress_bars import progress_bars
from vitral.data.targets import Labels, TaskName, label_values, labels_array
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError, error_reason
from vitral.utils.json_toml import read_json_object
from vitral.utils.locks import file_lock
from vitral.utils.serialization import from_dict, to_dict

FORMAT = 3
INDEX = "index.json"
CHUNK_BYTES = 16 * 2**20  # read at a time to compute a checksum
SUBMIT_FILES = 4096  # files submitted to the workers at a time
MIN_FILES_FOR_WORKERS = 256  # fewer files are decoded before workers would have started


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """Contents of index.json."""

    classes: tuple[str, ...]
    stored: Preprocessing  # of training images: image_size is the size of the stored pixels
    fingerprint: str
    source: str  # path of the original folder or list, for display
    splits: tuple[str, ...] = ()  # names of the splits that are not empty
    task: TaskName = "classification"
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """A packed split; `images` is memory-mapped."""

    images: Images  # (N, C, H, W), of the preprocessing's type; VariableSizeImages if their sizes differ
    labels: Tensor  # int64 (N,), or float32 (N, K) (`vitral.data.targets`)
    unreadable: tuple[str, ...]  # error messages
    preprocessing: Preprocessing  # with which the images were resized and cropped; mean and std do not apply


class DamagedPackError(VitralError):
    """A file of a pack is missing, incomplete or has other content than was written."""

    def __init__(self, file: Path, reason: object) -> None:
        super().__init__(f"{file} is damaged: {reason}", "Copy the pack again, or pack the images again")
        self.file, self.reason = file, reason


def fingerprint(locations: Iterable[ImageLocation], *parameters: object) -> str:
    """Digest of paths, sizes and modification times, and of parameters that affect the decoded images."""
    digest = hashlib.sha256(repr(parameters).encode())
    file_states: dict[str, str] = {}
    for location in locations:
        if location.path not in file_states or location.size < 0:
            try:
                stat = Path(location.path).stat()
                file_states[location.path] = f"{Path(location.path).resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
            except OSError:
                # A missing file is reported when it is decoded. The state of remote shards is one of the parameters.
                file_states[location.path] = location.path
        line = f"{file_states[location.path]}\0{location.offset}\0{location.size}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def write_index(folder: Path, index: PackIndex) -> None:
    write_checked_json(folder / INDEX, to_dict(index))


def read_index(folder: Path) -> PackIndex:
    try:
        format_number = read_json_object(folder / INDEX).get("format")
        index = from_dict(PackIndex, read_checked_json(folder / INDEX)) if format_number == FORMAT else None
    except (OSError, ValueError, VitralError) as error:
        raise DamagedPackError(folder / INDEX, error_reason(error)) from error
    if index is None:
        raise VitralError(
            f"{folder} was packed in format {format_number}, expected {FORMAT}",
            "Pack the images again: vitral data pack FOLDER",
        )
    return index


def is_packed(path: Path) -> bool:
    return (path / INDEX).is_file()


def read_split(folder: Path, name: str) -> PackedSplit | None:
    """Memory-map a split; None if it does not exist, is incomplete or has an older format.

    Raises DamagedPackError if its files have other content than was written.
    """
    file, images_file = folder / f"{name}.json", folder / f"{name}.npy"
    try:
        if read_json_object(file).get("format") != FORMAT:
            return None
        metadata = read_checked_json(file)
        preprocessing = from_dict(Preprocessing, metadata["preprocessing"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, VitralError) as error:
        raise DamagedPackError(file, error_reason(error)) from error
    try:
        if _file_state(images_file) != metadata["file_state"]:
            _verify_checksum(images_file, file, metadata)
        images = np.load(images_file, mmap_mode="r")
        if images.dtype != preprocessing.dtype or images.shape != (len(metadata["labels"]), *preprocessing.shape):
            raise ValueError(f"{images.dtype} of shape {images.shape}")
    except (OSError, ValueError, EOFError) as error:
        raise DamagedPackError(images_file, error_reason(error)) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the array being read-only
        mapped = torch.from_numpy(images)
    sizes = metadata.get("sizes")
    return PackedSplit(
        images=mapped if sizes is None else VariableSizeImages(mapped, torch.tensor(sizes).view(-1, 2)),
        labels=torch.from_numpy(
            labels_array(metadata["labels"], metadata.get("task", "classification"), metadata.get("num_outputs", 0))
        ),
        unreadable=tuple(metadata["unreadable"]),
        preprocessing=preprocessing,
    )


def _file_state(file: Path) -> list[int]:
    """Size and modification time, which tell whether a file has been changed or copied since it was verified."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _file_checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _verify_checksum(images_file: Path, file: Path, metadata: dict[str, Any]) -> None:
    """Raise ValueError if the images have another checksum; otherwise remember the state of the file."""
    if images_file.stat().st_size != metadata["file_state"][0]:
        raise ValueError(f"{images_file.stat().st_size:,} bytes, expected {metadata['file_state'][0]:,}")
    if _file_checksum(images_file) != metadata["images_checksum"]:
        raise ValueError("wrong checksum")
    with suppress(OSError, VitralError):  # in a read-only folder the checksum is computed every time
        write_checked_json(file, {**metadata, "file_state": _file_state(images_file)})


def pack_split(
    folder: Path,
    name: str,
    locations: Sequence[ImageLocation],
    labels: Labels,
    stored: Preprocessing,
    *,
    task: TaskName = "classification",
    max_unreadable: float,
    workers: int = 0,
    progress: bool = False,
) -> PackedSplit:
    """Read a split from the pack, decoding it first if necessary. Other processes wait for the one that decodes."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.parent / f".{folder.name}.{name}.lock"):
        try:
            split = read_split(folder, name)
        except DamagedPackError as error:
            warn_rebuilt(error.file, error.reason)
            split = None
        if split is not None and split.preprocessing == stored:
            return split
        sizes = read_stored_sizes(locations, stored, is_train=name == "train")
        with _temporary_array(folder, name, (len(locations), *stored.shape), stored.dtype) as (temporary, images):
            with progress_bars(progress, "images") as report_progress:
                errors = _decode_all(
                    temporary,
                    images,
                    locations,
                    decode_options(name, stored, len(locations)),
                    workers,
                    partial(report_progress, f"decoding {name}"),
                    sizes,
                )
            check_unreadable_fraction(errors.values(), len(locations), max_unreadable)
            final_labels = replace_or_drop_unreadable(images, labels, errors, replace=name == "train")
            if sizes is not None:
                rows = np.array(sizes, dtype=np.int64)
                replace_or_drop_unreadable(rows, labels, errors, replace=name == "train")
                sizes = [(height, width) for height, width in rows[: len(final_labels)].tolist()]
            images.flush()
            if len(final_labels) < len(locations):
                _truncate_array(temporary, images, len(final_labels))
            temporary.replace(folder / f"{name}.npy")
        _write_metadata(folder, name, stored, final_labels, task, [errors[row] for row in sorted(errors)], sizes)
    split = read_split(folder, name)
    assert split is not None
    return split


def _write_metadata(
    folder: Path,
    name: str,
    stored: Preprocessing,
    labels: Labels,
    task: TaskName,
    unreadable: list[str],
    sizes: Sequence[Size] | None,
) -> None:
    images_file = folder / f"{name}.npy"
    metadata = {
        "format": FORMAT,
        "labels": label_values(labels, task),
        "task": task,
        "num_outputs": labels.shape[1] if labels.ndim > 1 else 0,
        "unreadable": unreadable,
        "preprocessing": to_dict(stored),
        "file_state": _file_state(images_file),
        "images_checksum": _file_checksum(images_file),
    } | ({} if sizes is None else {"sizes": sizes})
    write_checked_json(folder / f"{name}.json", metadata)


@contextmanager
def _temporary_array(
    folder: Path, name: str, shape: tuple[int, ...], dtype: PixelType
) -> Iterator[tuple[Path, np.memmap[Any, Any]]]:
    """A memory-mapped .npy file for the caller to move into place; deleted on an error."""
    temporary = folder / f".{name}.npy"  # may be left over from a killed process; overwritten
    try:
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        _reserve_disk_space(temporary)
    except OSError as error:
        _discard(temporary)
        raise VitralError(
            f"cannot write {folder}: {error.strerror or error}",
            "Free some disk space, or decode images in every epoch instead: --data.pack 0",
        ) from error
    try:
        yield temporary, images
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: Path) -> None:
    temporary.unlink(missing_ok=True)
    with suppress(OSError):
        temporary.parent.rmdir()  # only if it is empty


def _decode_all(
    file: Path,
    images: np.memmap[Any, Any],
    locations: Sequence[ImageLocation],
    options: DecodeOptions,
    workers: int,
    report_progress: Callable[[int, int], None],
    sizes: Sequence[Size] | None = None,
) -> DecodeErrors:
    if len(locations) <= MIN_FILES_FOR_WORKERS:
        return decode_into(images, range(len(locations)), locations, options, sizes)
    offset = images.offset
    fd = os.open(file, os.O_RDWR)
    pool = DecodeWorkers(fd, images.shape, options, count=workers, offset=offset)
    errors: DecodeErrors = {}
    try:
        for start in range(0, len(locations), SUBMIT_FILES):
            rows = range(start, min(start + SUBMIT_FILES, len(locations)))
            chunk = slice(rows.start, rows.stop)
            futures = pool.decode(rows, locations[chunk], None if sizes is None else sizes[chunk])
            for num_done, future in enumerate(futures, start=1):
                errors.update(future.result())
                report_progress(min(start + num_done * FILES_PER_MESSAGE, rows.stop), len(locations))
    finally:
        pool.close()
        os.close(fd)
    return errors


def remove_stale_packs(folder: Path, index: PackIndex) -> None:
    """Delete packs next to `folder` that were made from an earlier state of the same files, or in an older format."""
    for other in folder.parent.iterdir():
        if other == folder or not is_packed(other):
            continue
        with suppress(OSError, ValueError):
            content = read_json_object(other / INDEX)
            is_same = content.get("stored") == to_dict(index.stored) or content.get("format") != FORMAT
            is_same &= bool(content.get("classes")) == bool(index.classes)  # with or without labels: two sets of files
            if content.get("source") == index.source and is_same:
                shutil.rmtree(other)


def _reserve_disk_space(path: Path) -> None:
    """Allocate the blocks now: writing to a mapped file on a full disk kills the process with SIGBUS."""
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _truncate_array(file: Path, images: np.memmap[Any, Any], count: int) -> None:
    """Shorten a .npy file to its first `count` images, with a new header of the same length."""
    offset = images.offset
    descr = np.lib.format.dtype_to_descr(images.dtype)
    text = repr({"descr": descr, "fortran_order": False, "shape": (count, *images.shape[1:])}).encode()
    with file.open("r+b") as opened:
        preamble = opened.read(10)
        length = int.from_bytes(preamble[8:10], "little")
        opened.write(text.ljust(length - 1) + b"\n")
        opened.truncate(offset + count * int(np.prod(images.shape[1:], dtype=np.int64)) * images.itemsize)
