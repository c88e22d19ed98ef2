"""Images decoded on every access by worker processes, a bounded number of batches ahead of the reader.

For datasets whose decoded pixels do not fit on the disk. The pixels are the same as those of a packed dataset, so
training gives the same result. Memory holds one buffer that the workers fill, and the batches in use.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.data.files.decode_pool import DecodeWorkers, decode_options, shared_buffer
from vitral.data.files.decode_process import Decoded, RowFile
from vitral.data.files.image_sizes import read_stored_sizes
from vitral.data.files.location import ImageLocation
from vitral.data.files.unreadable import check_unreadable_fraction, replacement_for, warn_unreadable
from vitral.data.lazy_images import LazyImages
from vitral.data.preprocess import Preprocessing
from vitral.data.targets import Labels
from vitral.device.cpu import available_cpus

NUM_SLOTS = 4  # chunks that are being decoded or read
MAX_BUFFER_BYTES = 256 * 2**20  # of all slots together


@dataclass
class PendingChunk:
    """Images of a batch that are being decoded into a slot of the buffer."""

    slot: int
    requested: list[int]  # indices of the requested images
    decoded: list[int]  # indices of the decoded images: the same, or replacements of unreadable ones
    futures: list[Future[Decoded]]  # of each row
    ends_batch: bool


class StreamedImages(LazyImages):
    """Images that are decoded from their files on every access."""

    def __init__(
        self,
        locations: Sequence[ImageLocation],
        labels: Sequence[int] | Labels,
        stored: Preprocessing,
        *,
        max_unreadable: float,
        split: str = "train",
        workers: int = 0,
        warn: Callable[[str], None] = warn_unreadable,
    ) -> None:
        self.locations, self.labels, self.stored = locations, np.asarray(labels), stored
        self.shape, self.dtype = (len(locations), *stored.shape), stored.torch_dtype
        self.unreadable: dict[int, str] = {}  # index → error message; each is reported once
        self.max_unreadable, self.workers, self.warn = max_unreadable, workers or available_cpus(), warn
        self.options = decode_options(split, stored)
        self.sizes = read_stored_sizes(locations, stored, is_train=split == "train")  # if they differ
        self.slot_rows = max(min(1024, MAX_BUFFER_BYTES // stored.num_bytes) // NUM_SLOTS, 1)
        self._idle: SlotBuffer | None = None

    @property
    def buffer_bytes(self) -> int:
        """Size of the read-ahead buffer."""
        return NUM_SLOTS * self.slot_rows * self.stored.num_bytes

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        buffer, self._idle = self._idle or SlotBuffer(self), None  # nested iterations get a buffer of their own
        try:
            yield from self._read(buffer, batch_indices)
        except BaseException:
            buffer.close()
            raise
        if self._idle is None:
            self._idle = buffer
        else:
            buffer.close()

    def close(self) -> None:
        """Stop idle workers. The next access starts new ones."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _read(self, buffer: SlotBuffer, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        pending: deque[PendingChunk] = deque()
        free_slots = deque(range(NUM_SLOTS))
        chunks = self._split_into_chunks(batch_indices)
        batch: list[Tensor] = []
        has_more = True
        while has_more or pending:
            while free_slots and has_more:
                try:
                    indices, ends_batch = next(chunks)
                except StopIteration:
                    has_more = False
                    break
                pending.append(self._start_decoding(buffer, free_slots.popleft(), indices, ends_batch))
            if not pending:
                continue
            chunk = pending.popleft()
            batch.append(self._finish_decoding(buffer, chunk))
            free_slots.append(chunk.slot)
            if chunk.ends_batch:
                yield batch[0] if len(batch) == 1 else torch.cat(batch)
                batch = []

    def _split_into_chunks(self, batch_indices: Iterable[Tensor]) -> Iterator[tuple[list[int], bool]]:
        """Indices of at most a slot's rows each, and whether they are the last of their batch."""
        for rows in batch_indices:
            indices = rows.tolist()
            starts = range(0, max(len(indices), 1), self.slot_rows)
            for start in starts:
                yield indices[start : start + self.slot_rows], start == starts[-1]

    def _start_decoding(self, buffer: SlotBuffer, slot: int, indices: list[int], ends_batch: bool) -> PendingChunk:
        decoded = [self._readable(index) for index in indices]
        first = slot * self.slot_rows
        locations = [self.locations[index] for index in decoded]
        sizes = None if self.sizes is None else [self.sizes[index] for index in indices]
        futures = buffer.workers.decode(range(first, first + len(indices)), locations, sizes)
        return PendingChunk(slot, indices, decoded, futures, ends_batch)

    def _finish_decoding(self, buffer: SlotBuffer, chunk: PendingChunk) -> Tensor:
        first = chunk.slot * self.slot_rows
        futures = chunk.futures
        while errors := {row: message for future in futures for row, message in future.result().errors.items()}:
            for row, message in errors.items():
                self._record_unreadable(chunk.decoded[row - first], message)
            futures = []
            for row in errors:  # the replacement may be unreadable too
                requested = chunk.requested[row - first]
                chunk.decoded[row - first] = replacement = self._readable(requested)
                sizes = None if self.sizes is None else [self.sizes[requested]]
                futures += buffer.workers.decode([row], [self.locations[replacement]], sizes)
        return torch.from_numpy(np.array(buffer.array[first : first + len(chunk.requested)]))

    def _readable(self, index: int) -> int:
        return replacement_for(index, self.labels, self.unreadable) if index in self.unreadable else index

    def _record_unreadable(self, index: int, message: str) -> None:
        if index not in self.unreadable:
            self.unreadable[index] = message
            self.warn(message)
            check_unreadable_fraction(self.unreadable.values(), len(self), self.max_unreadable)


class SlotBuffer:
    """A shared buffer of `NUM_SLOTS` chunks, and the workers that decode into it."""

    def __init__(self, images: StreamedImages) -> None:
        shape = (NUM_SLOTS * images.slot_rows, *images.stored.shape)
        self.fd, self.array = shared_buffer(shape, images.stored.dtype)
        self._finalizer = weakref.finalize(self, os.close, self.fd)
        target = RowFile(self.fd, images.stored.shape)
        self.workers = DecodeWorkers(target, images.options, count=images.workers)

    def close(self) -> None:
        self.workers.close()
        self._finalizer()
