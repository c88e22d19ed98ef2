"""Dynamic batching: concurrent requests share a forward pass, with a bound on the time the first one waits.

A client takes a ticket before it decodes its image and submits the decoded image through it. A batch starts at once
when no other ticket holder is still decoding, so that a single client never waits; otherwise it waits for the others,
at most `wait_s`. The next batch collects while the current one runs. With several workers, none takes more than its
share of the pending items.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitral.serve.limits import too_many_requests

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class QueuedItem(Generic[Item, Result]):
    item: Item
    future: asyncio.Future[Result]
    submitted: float  # time.perf_counter()


class Batcher(Generic[Item, Result]):
    """Run `process` in `executor` on batches of up to `max_batch` items, `workers` batches at a time.

    max_queue: pending items beyond which `ticket` raises a 429 error.
    on_batch: called with the size and the seconds of every completed batch.
    """

    def __init__(
        self,
        process: Callable[[list[Item]], list[Result]],
        executor: Executor,
        *,
        max_batch: int,
        wait_s: float,
        max_queue: int,
        workers: int = 1,
        on_batch: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self.process, self.executor, self.on_batch = process, executor, on_batch
        self.max_batch, self.wait_s, self.max_queue, self.workers = max_batch, wait_s, max_queue, workers
        self.queue: deque[QueuedItem[Item, Result]] = deque()
        self.pending = 0  # tickets held: decoding, queued or being processed
        self.decoding = 0  # tickets held whose item has not been submitted yet
        self.changed = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def ticket(self) -> Iterator[Ticket[Item, Result]]:
        """A slot in the queue, held from the start of decoding until the result arrives."""
        if self.pending >= self.max_queue:
            raise too_many_requests("the queue is full")
        self.pending += 1
        self.decoding += 1
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            ticket.withdraw()
            self.pending -= 1

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._work()) for _ in range(self.workers)]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            started = time.perf_counter()
            try:
                items = [queued.item for queued in batch]
                results = await loop.run_in_executor(self.executor, self.process, items)
            except Exception as error:
                for queued in batch:
                    if not queued.future.done():
                        queued.future.set_exception(error)
                continue
            self.on_batch(len(batch), time.perf_counter() - started)
            for queued, result in zip(batch, results, strict=True):
                if not queued.future.done():
                    queued.future.set_result(result)

    @property
    def fair_share(self) -> int:
        """Largest batch one worker takes: the pending items divided by the workers, at most `max_batch`."""
        return min(self.max_batch, max(-(-self.pending // self.workers), 1))

    async def _next_batch(self) -> list[QueuedItem[Item, Result]]:
        """Wait until a batch is due, then take it from the queue, without the items whose client has given up."""
        while True:
            while self.queue and self.queue[0].future.done():
                self.queue.popleft()
            remaining: float | None = None
            if self.queue:
                remaining = self.queue[0].submitted + self.wait_s - time.perf_counter()
                if len(self.queue) >= self.fair_share or not self.decoding or remaining <= 0:
                    break
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self.changed.wait()
        batch: list[QueuedItem[Item, Result]] = []
        size = self.fair_share
        while self.queue and len(batch) < size:
            queued = self.queue.popleft()
            if not queued.future.done():
                batch.append(queued)
        return batch


class Ticket(Generic[Item, Result]):
    """One client's slot in a batcher's queue."""

    def __init__(self, batcher: Batcher[Item, Result]) -> None:
        self.batcher, self.decoding = batcher, True

    def withdraw(self) -> None:
        """Stop other items from waiting for this one: it was submitted, or it will never be."""
        if self.decoding:
            self.decoding = False
            self.batcher.decoding -= 1
            self.batcher.changed.set()

    async def submit(self, item: Item) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.batcher.queue.append(QueuedItem(item, future, time.perf_counter()))
        self.withdraw()
        return await future
