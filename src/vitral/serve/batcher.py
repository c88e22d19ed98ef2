"""Requests that arrive together become one batch, within a bound on how long the first of them waits.

An image is announced when its decoding begins and comes when it is decoded. The model starts at once when nothing
else is announced, so that a single client never waits; otherwise it waits for the others, `wait_s` at most. While it
computes, the next batch gathers. Where several workers compute side by side, none takes more than its share.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from vitral.serve.limits import busy

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Waiting = tuple[Item, "asyncio.Future[Answer]", float]


class Batcher(Generic[Item, Answer]):
    """`answer` runs in `executor`, on up to `batch` items at once, in as many batches side by side as `workers`."""

    def __init__(
        self,
        answer: Callable[[list[Item]], list[Answer]],
        executor: Executor,
        *,
        batch: int,
        wait_s: float,
        queue: int,
        workers: int = 1,
        seen: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self.answer, self.executor, self.seen = answer, executor, seen
        self.batch, self.wait_s, self.queue, self.workers = batch, wait_s, queue, workers
        self.waiting: deque[Waiting[Item, Answer]] = deque()
        self.places = 0  # announced, waiting or being computed
        self.announced = 0  # of these, still being decoded
        self.changed = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def place(self) -> Iterator[Place[Item, Answer]]:
        """A place in the queue, held from the beginning of decoding to the answer; refused when there is none."""
        if self.places >= self.queue:
            raise busy("the queue is full")
        self.places += 1
        self.announced += 1
        place = Place(self)
        try:
            yield place
        finally:
            place.leave()
            self.places -= 1

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
            batch = await self._gather()
            started = time.perf_counter()
            try:
                answers = await loop.run_in_executor(self.executor, self.answer, [item for item, _, _ in batch])
            except Exception as error:
                for _, future, _ in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            self.seen(len(batch), time.perf_counter() - started)
            for (_, future, _), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    @property
    def share(self) -> int:
        """The most that one worker takes: what is here, divided among them, within the largest batch."""
        return min(self.batch, max(-(-self.places // self.workers), 1))

    async def _gather(self) -> list[Waiting[Item, Answer]]:
        """The next batch: whoever waits, and those who come within the bound."""
        while True:
            while self.waiting and self.waiting[0][1].done():  # its client has given up
                self.waiting.popleft()
            if self.waiting:
                left = self.waiting[0][2] + self.wait_s - time.perf_counter()
                if len(self.waiting) >= self.share or not self.announced or left <= 0:
                    break
            else:
                left = None
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.changed.wait()
        batch: list[Waiting[Item, Answer]] = []
        share = self.share
        while self.waiting and len(batch) < share:
            first = self.waiting.popleft()
            if not first[1].done():
                batch.append(first)
        return batch


class Place(Generic[Item, Answer]):
    def __init__(self, batcher: Batcher[Item, Answer]) -> None:
        self.batcher, self.announced = batcher, True

    def leave(self) -> None:
        """No longer announced: it came, or it will not come."""
        if self.announced:
            self.announced = False
            self.batcher.announced -= 1
            self.batcher.changed.set()

    async def ask(self, item: Item) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.batcher.waiting.append((item, future, time.perf_counter()))
        self.leave()
        return await future
