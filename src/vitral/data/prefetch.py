"""Batches for a device, gathered a little ahead: while it computes, threads copy the next ones out of a mapped file, or
take them from a stream, into memory that the device fetches from by itself.

    mapped file or stream ─▶ buffer here ─▶ buffer on the device ─▶ training step
                       threads        the device's copy engine
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

from vitral.data.lazy_images import Images, Pixels
from vitral.device.hardware import Staging, cores

MOST_THREADS = 8  # that copy: each moves some GB a second, and waits alone where the disk must be asked

Array = np.ndarray[Any, Any]
Fill = Callable[[Array], None]  # writes a batch to a place


def fed(images: Pixels, rows: Sequence[Tensor], staging: Staging) -> Iterator[Tensor]:
    """For each row of indices its images, on the device. What was yielded is overwritten when the next but two is."""
    free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    full: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    for place in range(len(staging.here)):
        free.put(place)
    places = [buffer.numpy() for buffer in staging.here]
    thread = threading.Thread(target=_fill, args=(images, rows, places, free, full), name="feed", daemon=True)
    thread.start()
    fetched: deque[int] = deque()  # places that the device is told to fetch from
    try:
        while (filled := full.get()) is not None:
            if isinstance(filled, BaseException):
                raise filled
            fetched.append(filled)
            yield staging.send(filled)
            staging.used(filled)
            if len(fetched) > 1:
                free.put(staging.wait(fetched.popleft()))
    finally:
        free.put(None)
        thread.join()


def _fill(
    images: Pixels,
    rows: Sequence[Tensor],
    places: Sequence[Array],
    free: queue.SimpleQueue[int | None],
    full: queue.SimpleQueue[int | BaseException | None],
) -> None:
    """In a thread of its own: nothing in here may ask anything of the device, which could be recording."""
    threads = min(MOST_THREADS, cores())
    with ThreadPoolExecutor(threads, thread_name_prefix="gather") as pool:
        fills = _streamed(images, rows) if isinstance(images, Images) else _mapped(images, rows, pool, threads)
        try:
            for fill in fills:
                if (place := free.get()) is None:
                    return
                fill(places[place])
                full.put(place)
            full.put(None)
        except BaseException as error:
            full.put(error)
        finally:
            fills.close()


def _mapped(images: Tensor, rows: Iterable[Tensor], pool: ThreadPoolExecutor, threads: int) -> Generator[Fill]:
    source = images.numpy()

    def gather(chosen: Array, place: Array) -> None:
        def copy(first: int) -> None:
            for at in range(first, len(chosen), threads):
                place[at] = source[chosen[at]]  # without the interpreter's lock

        for _ in pool.map(copy, range(threads)):
            pass

    for chosen in rows:
        yield partial(gather, chosen.numpy())


def _streamed(images: Images, rows: Iterable[Tensor]) -> Generator[Fill]:
    for batch in images.batches(rows):
        yield partial(_copy, batch.numpy())


def _copy(batch: Array, place: Array) -> None:
    np.copyto(place, batch)
