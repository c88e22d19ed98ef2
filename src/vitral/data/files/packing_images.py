"""Training images that are packed while they are read for the first time, so that training need not wait for the pack.

The first pass decodes images in the order of the batches, directly into their rows of the pack, a bounded number of
images ahead of the reader. Batches, replacements of unreadable images and the finished pack are those of `pack_split`.
Afterwards images are read from the pack. A pass that ends early leaves the decoded rows for the next process.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from filelock import Timeout
from torch import Tensor

from vitral.data.files.decode_process import Decoded
from vitral.data.files.pack_writer import PackJob, PackWriter
from vitral.data.files.unreadable import check_unreadable_fraction, replacement_for, warn_unreadable
from vitral.data.lazy_images import Images, LazyImages, iter_batches
from vitral.errors import VitralError
from vitral.utils.locks import file_lock

READ_AHEAD_IMAGES = 512  # at least two batches
MAX_MISSING = 0.05  # share of images that are decoded after a pass that did not need them; at least the read-ahead

_unfinished: weakref.WeakValueDictionary[Path, PackingImages] = (
    weakref.WeakValueDictionary()
)  # of this process, by temporary file


class PackingImages(LazyImages):
    """Images of a pack that is being written. Several threads may read them."""

    def __init__(
        self, job: PackJob, on_packed: Callable[[], None], warn: Callable[[str], None] = warn_unreadable
    ) -> None:
        self.job, self.on_packed, self.warn = job, on_packed, warn
        self.shape, self.dtype = (len(job.locations), *job.stored.shape), job.stored.torch_dtype
        self.packed: Images | None = None  # when all are decoded
        self._mutex = threading.RLock()
        self._pending: dict[int, Future[Decoded]] = {}  # by row
        with ExitStack() as stack:
            stack.enter_context(file_lock(job.lock_file, timeout=0))
            self.writer = PackWriter(job, max_threads=0)  # threads would compete with training for the GIL
            stack.callback(self.writer.close)
            self._finalizer = weakref.finalize(self, stack.pop_all().close)  # releases the lock
        self._is_filled = self.writer.checksums[: len(self)] > 0  # rows that can be read

    def resolve(self) -> Images:
        return self if self.packed is None else self.packed

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        if self.packed is not None:
            yield from iter_batches(self.packed, batch_indices)
            return
        requested: deque[Tensor] = deque()
        try:
            for rows in batch_indices:
                self._request(rows.tolist())
                requested.append(rows)
                if len(requested) > 2 and sum(map(len, requested)) > READ_AHEAD_IMAGES:
                    yield self._collect(requested.popleft())
            while requested:
                yield self._collect(requested.popleft())
            self._finish_if_complete()
        except GeneratorExit:
            raise  # images that were requested are still decoded
        except BaseException:
            self._stop()
            raise

    def _request(self, rows: Sequence[int]) -> None:
        """Start decoding the rows that are neither decoded nor requested."""
        with self._mutex:
            missing = [row for row in dict.fromkeys(rows) if not self._is_filled[row] and row not in self._pending]
            missing = [row for row in missing if row not in self.writer.errors]
            if not missing or self.packed is not None:
                return
            self._pending |= zip(missing, self.writer.decode(missing), strict=True)

    def _collect(self, rows: Tensor) -> Tensor:
        with self._mutex:
            if self.packed is None:
                for row in rows.tolist():
                    self._wait_for(row)
            return torch.from_numpy(self.writer.images[rows.numpy()])  # torch's aligned copies would fragment the heap

    def _wait_for(self, row: int) -> None:
        """Return when a row is filled: with its image, or with the one that replaces an unreadable image."""
        errors = self.writer.errors
        if self._is_filled[row]:
            return
        if row not in errors:
            self._request([row])
            self._record(row, self._pending.pop(row).result().errors)
        while row in errors and not self._is_filled[row]:
            source = replacement_for(row, self.job.labels, errors)
            if not self._is_filled[source]:
                self._request([source])
                self._record(source, self._pending.pop(source).result().errors)
            if source not in errors:
                self.writer.images[row] = self.writer.images[source]
                self._is_filled[row] = True

    def _record(self, row: int, errors: dict[int, str]) -> None:
        if row not in errors:
            self._is_filled[row] = True
            return
        self.writer.errors[row] = errors[row]
        self.warn(errors[row])
        check_unreadable_fraction(self.writer.errors.values(), len(self), self.job.max_unreadable)

    def _finish_if_complete(self) -> None:
        """Decode the few images that the pass did not need, and complete the pack."""
        with self._mutex:
            missing = np.flatnonzero(~self._is_filled).tolist()
            if self.packed is not None or len(missing) > max(MAX_MISSING * len(self), READ_AHEAD_IMAGES):
                return
            self._request(missing)
            for row in missing:
                self._wait_for(row)
            try:
                self.packed = self.writer.finish().images
                self.on_packed()
            except (OSError, VitralError) as error:  # the images are complete, only not for the next run
                print(f"warning: the packed images cannot be kept: {error}", file=sys.stderr)
                self.packed = self.packed if self.packed is not None else torch.from_numpy(self.writer.images)
            self._finalizer()

    def _stop(self) -> None:
        with self._mutex:
            self._pending.clear()
            if self.packed is None:
                self.writer.stop_workers()


def packing_images(job: PackJob, on_packed: Callable[[], None]) -> PackingImages | None:
    """Start a pack, or continue one. None if another process is packing the same images."""
    job.folder.mkdir(parents=True, exist_ok=True)
    key = job.folder / job.split
    if (images := _unfinished.get(key)) is not None and images.packed is None:
        return images
    try:
        images = PackingImages(job, on_packed)
    except Timeout:
        return None
    _unfinished[key] = images
    return images
