"""Writing a split of a pack: images are decoded, in any order, into the rows of a temporary file.

    .train.npy    the rows that have been decoded      .train.rows   their checksums; 0: not decoded
    .train.part   what they are decoded from, and how

A process that ends early leaves these files; the next one verifies the rows and continues. The split exists when its
.json file has been written, after everything else is on the disk.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.files.checked_json import read_checked_json, warn_rebuilt, write_checked_json
from vitral.data.files.decode_pool import THREADS_PER_PROCESS, DecodeThreads, DecodeWorkers, decode_options
from vitral.data.files.decode_process import Decoded, RowFile
from vitral.data.files.fingerprints import MAX_THUMBNAILS, CachedFingerprints
from vitral.data.files.image_fingerprint import Fingerprint
from vitral.data.files.image_sizes import read_stored_sizes
from vitral.data.files.location import ImageLocation
from vitral.data.files.packed import DamagedPackError, PackedSplit, PackIndex, read_split, write_split_metadata
from vitral.data.files.row_checksums import join_checksums, row_checksum
from vitral.data.files.unreadable import check_unreadable_fraction, replace_or_drop_unreadable
from vitral.data.preprocess import Preprocessing
from vitral.data.progress_bars import progress_bars
from vitral.data.targets import Labels, TaskName
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError
from vitral.utils.atomic import is_writable, reserve_disk_space
from vitral.utils.json_toml import dump_json, parse_json
from vitral.utils.locks import file_lock
from vitral.utils.serialization import to_dict

SUBMIT_FILES = 4096  # files submitted to the workers at a time
MAX_THREADS = THREADS_PER_PROCESS  # of this process, while it waits for the images
MIN_FILES_FOR_WORKERS = 256  # fewer files are decoded before worker processes would have started
SYNC_SECONDS = 1.0  # between writes to the disk, so that little is left to write at the end


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """A split to pack."""

    folder: Path
    split: str
    locations: Sequence[ImageLocation]
    labels: Labels
    stored: Preprocessing
    max_unreadable: float
    index: PackIndex  # of the whole dataset
    task: TaskName = "classification"
    workers: int = 0
    fingerprints: bool = False  # whether to compute those of the files, for the cache

    @property
    def lock_file(self) -> Path:
        return self.folder.parent / f".{self.folder.name}.{self.split}.lock"

    @property
    def is_train(self) -> bool:
        return self.split == "train"

    def read(self) -> PackedSplit | None:
        """The split, if it is packed already. A damaged one is reported and counts as missing."""
        try:
            packed = read_split(self.folder, self.split)
        except DamagedPackError as error:
            warn_rebuilt(error.file, error.reason)
            return None
        return packed if packed is not None and packed.preprocessing == self.stored else None


def pack_split(job: PackJob, *, progress: bool = False) -> PackedSplit:
    """Read a split from the pack, decoding it first if necessary. Other processes wait for the one that decodes."""
    if not is_writable(job.folder.parent) and (packed := job.read()) is not None:
        return packed
    job.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(job.lock_file):
        if (packed := job.read()) is not None:
            return packed
        writer = PackWriter(job, max_threads=MAX_THREADS)
        try:
            with progress_bars(progress, "images") as report_progress:
                writer.decode_all(partial(report_progress, f"decoding {job.split}"))
            return writer.finish()
        finally:
            writer.close()


class PackWriter:
    """Decodes images into the rows of the temporary file. The caller holds the lock of the job.

    `max_threads` limits the threads of this process that decode more than a few images; with more, processes do.
    """

    def __init__(self, job: PackJob, *, max_threads: int) -> None:
        self.job, self.max_threads = job, max_threads
        self.options = decode_options(job.split, job.stored)._replace(checksums=True)
        self.sizes = read_stored_sizes(job.locations, job.stored, is_train=job.is_train)  # if they differ
        self.errors: dict[int, str] = {}  # row → error message of an unreadable image
        has_fingerprints = job.fingerprints and len(job.locations) <= MAX_THUMBNAILS
        self.fingerprints = CachedFingerprints(job.locations) if has_fingerprints else None
        self.file, self.checksums_file, self.part_file = _temporary_files(job.folder, job.split)
        try:
            self.images, self.checksums = self._open() or self._create()
        except OSError as error:
            self.discard()
            raise VitralError(
                f"cannot write {job.folder}: {error.strerror or error}",
                "Free some disk space, or decode images in every epoch instead: --data.pack 0",
            ) from error
        self.fd = os.open(self.file, os.O_RDWR)
        self._sync = BackgroundSync(self.fd)
        self._finalizer = weakref.finalize(self, _close_file, self.fd, self._sync)

    @cached_property
    def workers(self) -> DecodeWorkers | DecodeThreads:
        """What decodes; started on first use."""
        missing = len(self.job.locations) - np.count_nonzero(self.checksums)
        count = self.job.workers or available_cpus()
        use_threads = missing <= MIN_FILES_FOR_WORKERS or count <= self.max_threads
        target = RowFile(self.fd, self.job.stored.shape, self.images.offset)
        options = self.options._replace(fingerprints=self._needs_fingerprints())
        decoder = DecodeThreads if use_threads else DecodeWorkers
        return decoder(target, options, count=count, on_decoded=self._record)

    def _needs_fingerprints(self) -> bool:
        """Whether some are missing. They may have been computed since the writer was created."""
        if self.fingerprints is None:
            return False
        self.fingerprints.read_cache()
        return bool(self.fingerprints.missing)

    def decode(self, rows: Sequence[int]) -> list[Future[Decoded]]:
        """Start decoding images into their rows. Returns the future of each row."""
        locations = [self.job.locations[row] for row in rows]
        return self.workers.decode(rows, locations, None if self.sizes is None else [self.sizes[row] for row in rows])

    def _record(self, decoded: Decoded) -> None:
        for row, text in decoded.fingerprints.items():
            assert self.fingerprints is not None
            self.fingerprints.fill(row, Fingerprint.from_hex(text))
        for row, checksum in decoded.checksums.items():
            self.checksums[row] = checksum or 1

    def decode_all(self, report_progress: Callable[[int, int], None]) -> None:
        """Decode the rows that are missing."""
        missing = np.flatnonzero(self.checksums == 0).tolist()
        num_done = len(self.job.locations) - len(missing)
        for start in range(0, len(missing), SUBMIT_FILES):
            rows = missing[start : start + SUBMIT_FILES]
            for number, future in enumerate(self.decode(rows), start=1):
                self.errors.update(future.result().errors)
                report_progress(num_done + start + number, len(self.job.locations))

    def finish(self) -> PackedSplit:
        """Replace or drop unreadable images, and move the file into place when it is on the disk."""
        job, replace = self.job, self.job.is_train
        self.stop_workers()
        try:
            check_unreadable_fraction(self.errors.values(), len(job.locations), job.max_unreadable)
        except VitralError:
            self.discard()
            raise
        sizes = None if self.sizes is None else np.array(self.sizes, dtype=np.int64)
        labels = job.labels
        for values in (self.images, self.checksums, sizes):
            if values is not None:
                labels = replace_or_drop_unreadable(values, job.labels.copy(), self.errors, replace=replace)
        if len(labels) < len(job.locations):
            _truncate_array(self.file, self.images, len(labels))
        self._sync.finish()
        checksum = self._file_checksum(len(labels))
        images_file = job.folder / f"{job.split}.npy"
        self.file.replace(images_file)
        self.checksums_file.unlink(missing_ok=True)
        self.part_file.unlink(missing_ok=True)
        write_split_metadata(
            images_file,
            stored=job.stored,
            labels=labels,
            task=job.task,
            unreadable=[self.errors[row] for row in sorted(self.errors)],
            sizes=None if sizes is None else [(height, width) for height, width in sizes[: len(labels)].tolist()],
            checksum=checksum,
        )
        packed = read_split(job.folder, job.split)
        assert packed is not None
        return packed

    def _file_checksum(self, count: int) -> int:
        with self.file.open("rb") as opened:
            header = row_checksum(np.frombuffer(opened.read(self.images.offset), dtype=np.uint8))
        checksums: list[int] = self.checksums[:count].tolist()
        # A checksum of 0 is recorded as 1, since 0 means that the row is missing.
        rows = (value if value > 1 else row_checksum(self.images[row]) for row, value in enumerate(checksums))
        return join_checksums(header, rows, self.images[:1].nbytes)

    def stop_workers(self) -> None:
        """Stop what decodes. The next request starts it again."""
        if "workers" in self.__dict__:
            self.workers.close()
            del self.workers
            if self.fingerprints is not None:
                self.fingerprints.save()

    def close(self) -> None:
        """Stop what decodes and close the file. Rows that have been decoded stay on the disk."""
        self.stop_workers()
        self._finalizer()

    def discard(self) -> None:
        """Delete the temporary files."""
        for file in (self.file, self.checksums_file, self.part_file):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            self.job.folder.rmdir()  # only if it is empty

    def _description(self) -> dict[str, Any]:
        job = self.job
        return {
            **to_dict(job.index),
            "preprocessing": to_dict(job.stored),
            "options": list(self.options),
            "count": len(job.locations),
        }

    def _create(self) -> tuple[np.memmap[Any, Any], np.memmap[Any, Any]]:
        count = len(self.job.locations)
        for file in (self.file, self.checksums_file, self.part_file):
            file.unlink(missing_ok=True)  # instead of overwriting it: workers of a killed process may still write
        shape = (count, *self.job.stored.shape)
        images = np.lib.format.open_memmap(self.file, mode="w+", dtype=self.job.stored.dtype, shape=shape)
        with self.file.open("r+b") as opened:
            reserve_disk_space(opened, self.file.stat().st_size)
        checksums = np.memmap(self.checksums_file, mode="w+", dtype=np.uint32, shape=(max(count, 1),))
        write_checked_json(self.part_file, self._description())
        return images, checksums

    def _open(self) -> tuple[np.memmap[Any, Any], np.memmap[Any, Any]] | None:
        """The files that an earlier process left, if they are of this job. Rows with a wrong checksum are missing."""
        try:
            description = read_checked_json(self.part_file)
            if description != parse_json(dump_json(self._description())):
                return None
            images = np.lib.format.open_memmap(self.file, mode="r+")
            checksums = np.memmap(self.checksums_file, mode="r+", dtype=np.uint32)
        except (OSError, ValueError, EOFError):
            return None
        if images.shape != (len(self.job.locations), *self.job.stored.shape) or len(checksums) < len(images):
            return None

        def verify(row: int) -> None:
            if (row_checksum(images[row]) or 1) != checksums[row]:
                checksums[row] = 0

        with ThreadPoolExecutor(available_cpus()) as pool:
            for _ in pool.map(verify, np.flatnonzero(checksums).tolist(), chunksize=64):
                pass
        return images, checksums


class BackgroundSync:
    """A thread that writes a file to the disk while it grows. An error is raised by `finish`."""

    def __init__(self, fd: int) -> None:
        self._fd, self._stopped, self._errors = fd, threading.Event(), list[OSError]()
        args = (fd, self._stopped, self._errors)
        self._thread = threading.Thread(target=_sync_repeatedly, args=args, name="pack-sync", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when everything is on the disk."""
        self.stop()
        if not self._errors:
            os.fsync(self._fd)
        else:
            raise self._errors[0]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _sync_repeatedly(fd: int, stopped: threading.Event, errors: list[OSError]) -> None:
    while not stopped.wait(SYNC_SECONDS):
        try:
            os.fsync(fd)
        except OSError as error:
            errors.append(error)
            return


def _close_file(fd: int, sync: BackgroundSync) -> None:
    sync.stop()
    os.close(fd)


def _temporary_files(folder: Path, split: str) -> tuple[Path, Path, Path]:
    return folder / f".{split}.npy", folder / f".{split}.rows", folder / f".{split}.part"


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
