"""Prefetching: while the device computes, threads assemble the next batches in pinned memory for asynchronous copies.

memory-mapped file or stream ─▶ pinned host buffer ─▶ device buffer ─▶ training step
                           threads            copy engine
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from vitral.data.lazy_images import Images, LazyImages
from vitral.device.cpu import available_cpus
from vitral.device.streams import StagingBuffers

MAX_COPY_THREADS = 8  # each copies several GB/s, or waits for the disk on its own

Array = np.ndarray[Any, Any]
WriteBatch = Callable[[Array], None]  # writes one batch into a buffer


def prefetch_to_device(images: Images, batch_indices: Sequence[Tensor], staging: StagingBuffers) -> Iterator[Tensor]:
    """Yield the images of each index tensor, on the device.

    Buffers are reused: a yielded batch is overwritten when the third batch after it is requested.
    """
    free_slots: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    filled_slots: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    for slot in range(len(staging.host)):
        free_slots.put(slot)
    buffers = [buffer.numpy() for buffer in staging.host]
    args = (images, batch_indices, buffers, free_slots, filled_slots)
    thread = threading.Thread(target=_fill_buffers, args=args, name="prefetch", daemon=True)
    thread.start()
    in_flight: deque[int] = deque()  # slots with a copy to the device under way
    try:
        while (slot_or_error := filled_slots.get()) is not None:
            if isinstance(slot_or_error, BaseException):
                raise slot_or_error
            in_flight.append(slot_or_error)
            yield staging.copy_to_device(slot_or_error)
            staging.mark_consumed(slot_or_error)
            if len(in_flight) > 1:
                free_slots.put(staging.wait_until_copied(in_flight.popleft()))
    finally:
        free_slots.put(None)
        thread.join()


def _fill_buffers(
    images: Images,
    batch_indices: Sequence[Tensor],
    buffers: Sequence[Array],
    free_slots: queue.SimpleQueue[int | None],
    filled_slots: queue.SimpleQueue[int | BaseException | None],
) -> None:
    """Thread body. Must not call into the device, which may be capturing a CUDA graph."""
    threads = min(MAX_COPY_THREADS, available_cpus())
    with ThreadPoolExecutor(threads, thread_name_prefix="gather") as pool:
        if isinstance(images, LazyImages):
            writers = _streamed_batches(images, batch_indices)
        else:
            writers = _gathered_batches(images, batch_indices, pool, threads)
        try:
            for write_batch in writers:
                if (slot := free_slots.get()) is None:
                    return
                write_batch(buffers[slot])
                filled_slots.put(slot)
            filled_slots.put(None)
        except BaseException as error:
            filled_slots.put(error)
        finally:
            writers.close()


def _gathered_batches(
    images: Tensor, batch_indices: Iterable[Tensor], pool: ThreadPoolExecutor, threads: int
) -> Generator[WriteBatch]:
    source = images.numpy()

    def gather(indices: Array, buffer: Array) -> None:
        def copy(first: int) -> None:
            for row in range(first, len(indices), threads):
                buffer[row] = source[indices[row]]  # NumPy releases the GIL

        for _ in pool.map(copy, range(threads)):
            pass

    for indices in batch_indices:
        yield partial(gather, indices.numpy())


def _streamed_batches(images: LazyImages, batch_indices: Iterable[Tensor]) -> Generator[WriteBatch]:
    for batch in images.batches(batch_indices):
        yield partial(_copy, batch.numpy())


def _copy(batch: Array, buffer: Array) -> None:
    np.copyto(buffer, batch)
