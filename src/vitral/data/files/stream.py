"""Files decoded anew each time they are asked for, by worker processes a little ahead of the reader.

For sets whose pixels fit no disk. The pixels are those that a pack would hold, so a training is the same either way;
what is in memory is one buffer that workers fill and the batches that are being used.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.data.files.packed import check_share, stand_in
from vitral.data.files.workers import MANY, Source, Troubles, Workers, shared_buffer
from vitral.data.lazy_images import Images
from vitral.data.preprocess import Preprocessing

SLOTS = 4  # parts that are being filled or waited for
MOST_BUFFER = 256 * 2**20  # bytes of all slots together


def complain(trouble: str) -> None:
    print(f"unreadable, another image of its class takes its place: {trouble}", file=sys.stderr)


@dataclass
class Part:
    """Some rows of a batch, on their way into a slot of the buffer."""

    slot: int
    index: list[int]  # which images are wanted
    read: list[int]  # which are read: the same, or stand-ins for those that are known to be broken
    filling: list[Future[Troubles]]
    last: bool  # of its batch


class Streamed(Images):
    """Images decoded from their files each time."""

    def __init__(
        self,
        sources: Sequence[Source],
        labels: Sequence[int],
        stored: Preprocessing,
        *,
        unreadable: float,
        workers: int = 0,
        report: Callable[[str], None] = complain,
    ) -> None:
        self.sources, self.labels, self.stored = sources, np.asarray(labels), stored
        self.shape = (len(sources), *stored.shape)
        self.troubles: dict[int, str] = {}  # by image; each is reported once
        self.unreadable, self.workers, self.report = unreadable, workers or os.cpu_count() or 1, report
        row = int(np.prod(stored.shape))
        self.rows = max(min(1024, MOST_BUFFER // row) // SLOTS, 1)  # of a slot
        self._idle: Ring | None = None

    @property
    def buffer(self) -> int:
        """Bytes that are read ahead at most."""
        return SLOTS * self.rows * int(np.prod(self.stored.shape))

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        ring, self._idle = self._idle or Ring(self), None  # who reads inside another's reading gets a ring of its own
        try:
            yield from self._read(ring, chosen)
        except BaseException:
            ring.close()
            raise
        if self._idle is None:
            self._idle = ring
        else:
            ring.close()

    def close(self) -> None:
        """End the workers that wait for the next reading; it starts new ones."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def _read(self, ring: Ring, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        waiting: deque[Part] = deque()
        free = deque(range(SLOTS))
        parts = self._parts(chosen)
        done: list[Tensor] = []
        more = True
        while more or waiting:
            while free and more:
                try:
                    index, last = next(parts)
                except StopIteration:
                    more = False
                    break
                waiting.append(self._begin(ring, free.popleft(), index, last))
            if not waiting:
                continue
            part = waiting.popleft()
            done.append(self._finish(ring, part))
            free.append(part.slot)
            if part.last:
                yield done[0] if len(done) == 1 else torch.cat(done)
                done = []

    def _parts(self, chosen: Iterable[Tensor]) -> Iterator[tuple[list[int], bool]]:
        for rows in chosen:
            index = rows.tolist()
            starts = range(0, max(len(index), 1), self.rows)
            for start in starts:
                yield index[start : start + self.rows], start == starts[-1]

    def _begin(self, ring: Ring, slot: int, index: list[int], last: bool) -> Part:
        read = [self._readable(image) for image in index]
        first = slot * self.rows
        filling = ring.workers.fill(range(first, first + len(index)), [self.sources[image] for image in read])
        return Part(slot, index, read, filling, last)

    def _finish(self, ring: Ring, part: Part) -> Tensor:
        first = part.slot * self.rows
        filling = part.filling
        while troubles := {row: what for answer in filling for row, what in answer.result().items()}:
            for row, what in troubles.items():
                self._note(part.read[row - first], what)
            filling = []
            for row in troubles:  # the stand-in may be broken too
                part.read[row - first] = other = self._readable(part.index[row - first])
                filling += ring.workers.fill([row], [self.sources[other]])
        return torch.from_numpy(np.array(ring.array[first : first + len(part.index)]))

    def _readable(self, image: int) -> int:
        return stand_in(image, self.labels, self.troubles) if image in self.troubles else image

    def _note(self, image: int, what: str) -> None:
        if image not in self.troubles:
            self.troubles[image] = what
            self.report(what)
            check_share(self.troubles.values(), len(self), self.unreadable)


class Ring:
    """A buffer and the workers that fill it."""

    def __init__(self, images: Streamed) -> None:
        shape = (SLOTS * images.rows, *images.stored.shape)
        self.fd, self.array = shared_buffer(shape)
        self._end = weakref.finalize(self, os.close, self.fd)
        self.workers = Workers(self.fd, shape, images.stored.interpolation, len(images) >= MANY, images.workers)

    def close(self) -> None:
        self.workers.close()
        self._end()
