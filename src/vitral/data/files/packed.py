"""A split decoded once and read at memory speed afterwards: pixels in a file that is mapped, not loaded.

    photos-3f9c0a…/          a folder a set; the name carries the fingerprint of its files, labels and size
      index.json             classes, size and channels, what it was made from
      train.npy              uint8, N C H W          train.json   labels, and what could not be read
      validation.npy …       test.npy …              each when it is first asked for

A split is there when its .json is: it is written last. The system keeps in memory what is used and lets go of the rest,
so a set may be larger than the memory.

A file that cannot be read is named, and counts. In training another image of its class takes its place, so that each
class keeps its weight; in validation and test it is left out, so that no image is judged twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from vitral.data.files.worker import fill
from vitral.data.files.workers import CHUNK, MANY, Source, Troubles, Workers
from vitral.data.preprocess import Preprocessing
from vitral.data.registry.download import progress_bars
from vitral.errors import VitralError
from vitral.utils.serialization import from_plain, to_plain

FORMAT = 1
INDEX = "index.json"
AHEAD = 4096  # files handed to the workers at a time
FEW = 256  # files that are decoded before workers would have begun
REMEDY = "mend or remove them; a training may have more of them with --data.unreadable SHARE"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a packed set was made from, and how."""

    classes: tuple[str, ...]
    stored: Preprocessing  # its image size is that of the pixels in the file
    fingerprint: str
    source: str  # the folder or list, for people
    splits: tuple[str, ...] = ()  # those that are not empty
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A split as it lies on disk."""

    images: Tensor
    labels: Tensor
    troubles: tuple[str, ...]


def fingerprint(sources: Iterable[Source], *more: object) -> str:
    """Of names, sizes and times, and of whatever else decides what is made from the files."""
    digest = hashlib.sha256(repr(more).encode())
    states: dict[str, str] = {}
    for source in sources:
        if source.where not in states or source.size < 0:
            try:
                state = Path(source.where).stat()
                states[source.where] = f"{Path(source.where).resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
            except OSError:
                states[source.where] = source.where  # decoding will name it; a shard elsewhere brings its own state
        digest.update(f"{states[source.where]}\0{source.offset}\0{source.size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def write_index(folder: Path, index: Index) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / INDEX, json.dumps(to_plain(index), indent=1))


def read_index(folder: Path) -> Index:
    try:
        return from_plain(Index, json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError, VitralError) as error:
        raise VitralError(f"{folder} is not a packed set: {error}", "vitral data pack FOLDER makes one") from error


def is_packed(path: Path) -> bool:
    return (path / INDEX).is_file()


def read_split(folder: Path, name: str) -> Packed | None:
    """The split, mapped; None if it is not there, or not whole."""
    try:
        kept = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        images = np.load(folder / f"{name}.npy", mmap_mode="r")
    except (OSError, ValueError):
        return None
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(kept["labels"]):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to is meant
        mapped = torch.from_numpy(images)
    return Packed(images=mapped, labels=torch.tensor(kept["labels"]).long(), troubles=tuple(kept["troubles"]))


def pack_split(
    folder: Path,
    name: str,
    sources: Sequence[Source],
    labels: Sequence[int],
    stored: Preprocessing,
    *,
    unreadable: float,
    workers: int = 0,
    progress: bool = False,
) -> Packed:
    """The split from the pack, decoded into it if it is not there yet. Who comes second waits for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.{name}.lock"):
        if (found := read_split(folder, name)) is not None:
            return found
        beside = folder / f".{name}.npy"  # of one who was killed, it is begun anew
        shape = (len(sources), stored.channels, *stored.image_size)
        try:
            images = np.lib.format.open_memmap(beside, mode="w+", dtype=np.uint8, shape=shape)
            _reserve(beside)
        except OSError as error:
            beside.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
            raise VitralError(
                f"cannot write {folder}: {error.strerror or error}", "free some space, or pack nothing: --data.pack 0"
            ) from error
        try:
            with progress_bars(progress, "images") as meter:
                troubles = _decode_into(beside, images, sources, stored, workers, partial(meter, f"decoding {name}"))
            check_share(troubles.values(), len(sources), unreadable)
            numbers = settle(images, np.asarray(labels), troubles, keep_count=name == "train")
            images.flush()
            if len(numbers) < len(sources):
                _shorten(beside, images, len(numbers))
            beside.replace(folder / f"{name}.npy")
        except BaseException:
            beside.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()  # if nothing else is in it
            raise
        kept = {"format": FORMAT, "labels": numbers.tolist(), "troubles": [troubles[row] for row in sorted(troubles)]}
        write_text(folder / f"{name}.json", json.dumps(kept))
    found = read_split(folder, name)
    assert found is not None
    return found


def _decode_into(
    file: Path,
    images: np.ndarray[Any, Any],
    sources: Sequence[Source],
    stored: Preprocessing,
    workers: int,
    done: Callable[[int, int], None],
) -> Troubles:
    if len(sources) <= FEW:
        return fill(images, range(len(sources)), sources, stored.interpolation, quick=False)
    offset = images.offset  # type: ignore[attr-defined]
    fd = os.open(file, os.O_RDWR)
    pool = Workers(fd, images.shape, stored.interpolation, len(sources) >= MANY, workers, offset)
    troubles: Troubles = {}
    try:
        for start in range(0, len(sources), AHEAD):
            rows = range(start, min(start + AHEAD, len(sources)))
            for part, answer in enumerate(pool.fill(rows, sources[rows.start : rows.stop]), start=1):
                troubles.update(answer.result())
                done(min(start + part * CHUNK, rows.stop), len(sources))
    finally:
        pool.close()
        os.close(fd)
    return troubles


def settle(
    images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], troubles: Troubles, *, keep_count: bool
) -> np.ndarray[Any, Any]:
    """Fill or close the gaps that unreadable files left; returns the labels of the images that are there now."""
    if not troubles:
        return labels
    if keep_count:
        for row in troubles:
            images[row] = images[stand_in(row, labels, troubles)]
        return labels
    good = np.array([row for row in range(len(labels)) if row not in troubles], dtype=np.int64)
    for new, old in enumerate(good):
        if new != old:
            images[new] = images[old]
    return labels[good]


def stand_in(row: int, labels: np.ndarray[Any, Any], troubles: Iterable[int]) -> int:
    """Which image takes the place of an unreadable one: the next of its class that can be read."""
    of_class = np.flatnonzero(labels == labels[row])
    bad = set(troubles)
    place = int(np.searchsorted(of_class, row))
    for other in (*of_class[place + 1 :], *of_class[:place]):
        if int(other) not in bad:
            return int(other)
    raise VitralError("none of the images of a class can be read", REMEDY)


def check_share(troubles: Iterable[str], count: int, most: float) -> None:
    """Stop where so many files are broken that a training would not be what it seems."""
    named = sorted(troubles)
    if len(named) > most * count:
        raise VitralError(
            f"{len(named):,} of {count:,} images cannot be read, more than {most:.1%}: {named[0]}",
            REMEDY.replace("SHARE", f"{math.ceil(100 * len(named) / count) / 100}")
            + ": "
            + "; ".join(trouble.split(": ")[0] for trouble in named[:5]),
        )


def drop_stale(folder: Path, index: Index) -> None:
    """Remove packs beside this one that were made from an earlier state of the same files."""
    for other in folder.parent.iterdir():
        if other == folder or not is_packed(other):
            continue
        with suppress(VitralError, OSError):
            old = read_index(other)
            if (old.source, old.stored) == (index.source, index.stored):
                shutil.rmtree(other)


def _reserve(path: Path) -> None:
    """Take the room on the disk now: a mapped file that finds none later kills the process that writes to it."""
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _shorten(file: Path, images: np.ndarray[Any, Any], count: int) -> None:
    """The same .npy file with its first `count` images only: a new header of the same length, and less behind it."""
    offset = images.offset  # type: ignore[attr-defined]
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *images.shape[1:])}
    text = repr(header).encode()
    with file.open("r+b") as opened:
        start = opened.read(10)
        length = int.from_bytes(start[8:10], "little")
        opened.write(text.ljust(length - 1) + b"\n")
        opened.truncate(offset + count * int(np.prod(images.shape[1:], dtype=np.int64)))


def write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise VitralError(f"cannot write {path}: {error.strerror or error}", "is there room, and may it be?") from error
    finally:
        beside.unlink(missing_ok=True)
