"""Dynamic batching: concurrent requests share a forward pass, with a bound on the time the first one waits.

A request takes a ticket before it decodes its images and submits the decoded images through it. A batch starts at once
when no other ticket holder is still decoding, so that a single client never waits; otherwise it waits for the others,
at most `wait_s`. The next batch collects while the current one runs. With several workers, none takes more than its
share of the pending items.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitral.serve.admission import Admission
from vitral.serve.limits import RequestError

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class QueuedItem(Generic[Item, Result]):
    item: Item
    future: asyncio.Future[Result]
    ticket: Ticket[Item, Result]
    submitted: float  # time.perf_counter()


class Batcher(Generic[Item, Result]):
    """Run `process` in `executor` on batches of up to `max_batch` items, `workers` batches at a time.

    max_queue, queue_timeout_s: pending items and seconds of waiting beyond which a ticket is refused or fails.
    turn: context in which every batch runs.
    batch_key: items with different keys never share a batch.
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
        queue_timeout_s: float,
        workers: int = 1,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        batch_key: Callable[[Item], Hashable] = lambda item: None,
        on_batch: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self.process, self.executor, self.turn, self.on_batch = process, executor, turn, on_batch
        self.max_batch, self.wait_s, self.workers, self.batch_key = max_batch, wait_s, workers, batch_key
        self.admission = Admission(
            max_pending=max_queue, timeout_s=queue_timeout_s, saturated=2 * workers if max_batch > 1 else 1
        )
        self.queue: deque[QueuedItem[Item, Result]] = deque()
        self.decoding = 0  # items of tickets that have not been submitted yet
        self.changed = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def pending(self) -> int:
        """Items being decoded, queued or processed."""
        return self.admission.pending

    @asynccontextmanager
    async def ticket(self, count: int = 1) -> AsyncIterator[Ticket[Item, Result]]:
        """Room in the queue for `count` items, held from the start of decoding until the results arrive."""
        ticket = Ticket(self)
        ticket.add(count)
        try:
            async with asyncio.timeout(self.admission.timeout_s) as ticket.queue_timeout:
                yield ticket
        except TimeoutError as error:
            if not ticket.queue_timeout.expired():
                raise
            message = f"the server is overloaded: still queued after {self.admission.timeout_s:g} seconds"
            raise RequestError(503, "timeout", message, retry_after=self.admission.retry_after()) from error
        finally:
            ticket.withdraw(ticket.undecoded)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._work()) for _ in range(self.workers)]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            await self._wait_until_due()
            async with self.turn():
                if batch := self._take_batch():
                    await self._run(batch)

    async def _run(self, batch: list[QueuedItem[Item, Result]]) -> None:
        started = time.perf_counter()
        try:
            items = [queued.item for queued in batch]
            results = await asyncio.get_running_loop().run_in_executor(self.executor, self.process, items)
        except Exception as error:
            for queued in batch:
                if not queued.future.done():
                    queued.future.set_exception(error)
            return
        self.on_batch(len(batch), time.perf_counter() - started)
        for queued, result in zip(batch, results, strict=True):
            if not queued.future.done():
                queued.future.set_result(result)

    @property
    def fair_share(self) -> int:
        """Largest batch one worker takes: the pending items divided by the workers, at most `max_batch`."""
        return min(self.max_batch, max(-(-self.pending // self.workers), 1))

    async def _wait_until_due(self) -> None:
        while True:
            while self.queue and self.queue[0].future.done():
                self.queue.popleft()
            remaining: float | None = None
            if self.queue:
                remaining = self.queue[0].submitted + self.wait_s - time.perf_counter()
                if len(self.queue) >= self.fair_share or not self.decoding or remaining <= 0:
                    return
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self.changed.wait()

    def _take_batch(self) -> list[QueuedItem[Item, Result]]:
        """Take a batch from the queue, without the items whose client has given up.

        The oldest item decides the key of the batch. Items with other keys stay in the queue, in order.
        """
        batch: list[QueuedItem[Item, Result]] = []
        others: list[QueuedItem[Item, Result]] = []
        size = self.fair_share
        while self.queue and len(batch) < size:
            queued = self.queue.popleft()
            if queued.future.done():
                continue
            if batch and self.batch_key(queued.item) != self.batch_key(batch[0].item):
                others.append(queued)
                continue
            queued.ticket.start()
            batch.append(queued)
        self.queue.extendleft(reversed(others))
        return batch


class Ticket(Generic[Item, Result]):
    """One request's entries in the queue of a batcher."""

    # Runs while the request waits: not while an item is decoded, nor after the first batch.
    queue_timeout: asyncio.Timeout

    def __init__(self, batcher: Batcher[Item, Result]) -> None:
        self.batcher, self.undecoded, self.started = batcher, 0, False
        self.wait_left_s = batcher.admission.timeout_s

    def add(self, count: int) -> None:
        self.batcher.admission.enter(count)
        self.batcher.decoding += count
        self.undecoded += count

    def withdraw(self, count: int = 1) -> None:
        """Remove the entries of items that will not be submitted, so that other items do not wait for them."""
        self.batcher.admission.leave(count, finished=False)
        self._decoded(count)

    def _decoded(self, count: int) -> None:
        self.undecoded -= count
        self.batcher.decoding -= count
        self.batcher.changed.set()

    def pause_timeout(self) -> None:
        """Stop the queue timeout while the request makes progress."""
        deadline = self.queue_timeout.when()
        if deadline is not None and not self.queue_timeout.expired():
            self.wait_left_s = deadline - asyncio.get_running_loop().time()
            self.queue_timeout.reschedule(None)

    def _resume_timeout(self) -> None:
        if self.queue_timeout.when() is None and not self.started:
            self.queue_timeout.reschedule(asyncio.get_running_loop().time() + self.wait_left_s)

    def start(self) -> None:
        self.started = True
        self.pause_timeout()

    async def submit(self, item: Item) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.batcher.queue.append(QueuedItem(item, future, self, time.perf_counter()))
        self._decoded(1)
        self._resume_timeout()
        try:
            return await future
        finally:
            self.batcher.admission.leave(1, finished=not future.cancelled())
