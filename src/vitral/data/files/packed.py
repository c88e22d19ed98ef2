"""Packed datasets: every split decoded once into a memory-mapped file and then read at memory speed.

    photos-3f9c0a…-v2/       one folder per dataset; the name contains the fingerprint of files, labels and image size
      index.json             classes, image size and channels, source
      train.npy              uint8 (N, C, H, W)      train.json   labels, unreadable files
      validation.npy …       test.npy …              written on first access

The .json of a split is written last: a split without it is incomplete. The operating system caches the pages in use,
so a packed dataset may be larger than memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.files.unreadable import check_unreadable_fraction, replace_or_drop_unreadable
from vitral.data.files.worker import DecodeOptions, decode_into
from vitral.data.files.workers import (
    FILES_PER_MESSAGE,
    TORCH_RESIZE_MIN_FILES,
    DecodeErrors,
    DecodeWorkers,
    ImageLocation,
)
from vitral.data.preprocess import Preprocessing
from vitral.data.progress_bars import progress_bars
from vitral.errors import VitralError
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.locks import file_lock
from vitral.utils.serialization import from_dict, to_dict

FORMAT = 2
INDEX = "index.json"
SUBMIT_FILES = 4096  # files submitted to the workers at a time
MIN_FILES_FOR_WORKERS = 256  # fewer files are decoded before workers would have started


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """Contents of index.json."""

    classes: tuple[str, ...]
    stored: Preprocessing  # image_size is the size of the stored pixels
    fingerprint: str
    source: str  # path of the original folder or list, for display
    splits: tuple[str, ...] = ()  # names of the splits that are not empty
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """A packed split; `images` is memory-mapped."""

    images: Tensor  # uint8 (N, C, H, W)
    labels: Tensor  # int64 (N,)
    unreadable: tuple[str, ...]  # error messages


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
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / INDEX, dump_json(to_dict(index), indent=1))


def read_index(folder: Path) -> PackIndex:
    try:
        content = read_json(folder / INDEX)
        format_number = content.get("format")
        index = from_dict(PackIndex, content) if format_number == FORMAT else None
    except (OSError, ValueError, AttributeError, VitralError) as error:
        raise VitralError(
            f"{folder} is not a packed dataset: {error}", "Create one with: vitral data pack FOLDER"
        ) from error
    if index is None:
        raise VitralError(
            f"{folder} was packed in format {format_number}, expected {FORMAT}",
            "Pack the images again: vitral data pack FOLDER",
        )
    return index


def is_packed(path: Path) -> bool:
    return (path / INDEX).is_file()


def read_split(folder: Path, name: str) -> PackedSplit | None:
    """Memory-map a split; None if it does not exist, is incomplete or has an older format."""
    try:
        metadata = read_json(folder / f"{name}.json")
        images = np.load(folder / f"{name}.npy", mmap_mode="r")
    except (OSError, ValueError):
        return None
    if metadata.get("format") != FORMAT:
        return None
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(metadata["labels"]):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the array being read-only
        mapped = torch.from_numpy(images)
    labels = torch.tensor(metadata["labels"]).long()
    return PackedSplit(images=mapped, labels=labels, unreadable=tuple(metadata["unreadable"]))


def pack_split(
    folder: Path,
    name: str,
    locations: Sequence[ImageLocation],
    labels: Sequence[int],
    stored: Preprocessing,
    *,
    max_unreadable: float,
    allow_reduced_jpeg: bool = True,
    workers: int = 0,
    progress: bool = False,
) -> PackedSplit:
    """Read a split from the pack, decoding it first if necessary. Other processes wait for the one that decodes."""
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.parent / f".{folder.name}.{name}.lock"):
        if (split := read_split(folder, name)) is not None:
            return split
        with _temporary_array(folder, name, (len(locations), *stored.shape)) as (temporary, images):
            with progress_bars(progress, "images") as report_progress:
                errors = _decode_all(
                    temporary,
                    images,
                    locations,
                    DecodeOptions(
                        interpolation=stored.interpolation,
                        torch_resize=len(locations) >= TORCH_RESIZE_MIN_FILES,
                        allow_reduced_jpeg=allow_reduced_jpeg,
                    ),
                    workers,
                    partial(report_progress, f"decoding {name}"),
                )
            check_unreadable_fraction(errors.values(), len(locations), max_unreadable)
            final_labels = replace_or_drop_unreadable(images, np.asarray(labels), errors, replace=name == "train")
            images.flush()
            if len(final_labels) < len(locations):
                _truncate_array(temporary, images, len(final_labels))
            temporary.replace(folder / f"{name}.npy")
        messages = [errors[row] for row in sorted(errors)]
        metadata = {"format": FORMAT, "labels": final_labels.tolist(), "unreadable": messages}
        atomic_write(folder / f"{name}.json", dump_json(metadata))
    split = read_split(folder, name)
    assert split is not None
    return split


@contextmanager
def _temporary_array(folder: Path, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Path, np.memmap[Any, Any]]]:
    """A memory-mapped .npy file for the caller to move into place; deleted on an error."""
    temporary = folder / f".{name}.npy"  # may be left over from a killed process; overwritten
    try:
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
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
) -> DecodeErrors:
    if len(locations) <= MIN_FILES_FOR_WORKERS:
        return decode_into(images, range(len(locations)), locations, options)
    offset = images.offset
    fd = os.open(file, os.O_RDWR)
    pool = DecodeWorkers(fd, images.shape, options, count=workers, offset=offset)
    errors: DecodeErrors = {}
    try:
        for start in range(0, len(locations), SUBMIT_FILES):
            rows = range(start, min(start + SUBMIT_FILES, len(locations)))
            futures = pool.decode(rows, locations[rows.start : rows.stop])
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
        with suppress(OSError, ValueError, AttributeError):
            content = read_json(other / INDEX)
            is_same = content.get("stored") == to_dict(index.stored) or content.get("format") != FORMAT
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
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *images.shape[1:])}
    text = repr(header).encode()
    with file.open("r+b") as opened:
        preamble = opened.read(10)
        length = int.from_bytes(preamble[8:10], "little")
        opened.write(text.ljust(length - 1) + b"\n")
        opened.truncate(offset + count * int(np.prod(images.shape[1:], dtype=np.int64)))
