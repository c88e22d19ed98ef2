"""Admission to a queue, bounded by its length and by the expected wait, and turns for low-priority work."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from vitral.serve.limits import too_many_requests

RATE_MEMORY_S = 3.0  # the service rate is averaged over about this much busy time
MAX_RETRY_AFTER_S = 60
QUIET_S = 0.05  # low-priority work starts after this time without predict requests
BUSY_SHARE = 0.1  # share of the time that low-priority work may take while predict requests are pending
POLL_S = 0.01


class Admission:
    """Refuses items that would wait for more than `timeout_s` seconds, according to the measured service rate."""

    def __init__(
        self,
        *,
        max_pending: int,
        timeout_s: float,
        saturated: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """saturated: pending items from which on the server is busy. Only then is the rate measured and used."""
        self.max_pending, self.timeout_s, self.saturated, self.clock = max_pending, timeout_s, saturated, clock
        self.pending = 0  # items admitted and not yet finished
        self._finished, self._busy_s = 0.0, 0.0  # decayed sums: their ratio is the service rate
        self._measured_until = self._left = -math.inf

    def expected_wait_s(self) -> float:
        """Time until the pending items are finished; 0 before the first measurement."""
        if not self._finished:
            return 0.0
        elapsed = self.clock() - self._measured_until if self.pending >= self.saturated else 0.0
        decay = math.exp(-elapsed / RATE_MEMORY_S)
        return self.pending * (self._busy_s * decay + elapsed) / max(self._finished * decay, 1e-9)

    def idle_s(self) -> float:
        return 0.0 if self.pending else self.clock() - self._left

    def retry_after(self) -> int:
        return min(max(math.ceil(self.expected_wait_s()), 1), MAX_RETRY_AFTER_S)

    def check(self, count: int = 1) -> None:
        would_wait = self.pending >= self.saturated and self.expected_wait_s() > self.timeout_s
        if would_wait or self.pending + count > self.max_pending:
            raise too_many_requests("the queue is full", self.retry_after())

    def enter(self, count: int = 1) -> None:
        self.check(count)
        if self.pending < self.saturated:
            self._measured_until = self.clock()
        self.pending += count

    def leave(self, count: int = 1, *, finished: bool) -> None:
        """Remove items; `finished`: they were processed, so they count towards the service rate."""
        now = self._left = self.clock()
        if finished and self.pending >= self.saturated:
            elapsed = now - self._measured_until
            decay = math.exp(-elapsed / RATE_MEMORY_S)
            self._finished = self._finished * decay + count
            self._busy_s = self._busy_s * decay + elapsed
            self._measured_until = now
        self.pending -= count


class LowPriorityTurns:
    """One turn at a time: when the queues have been idle for QUIET_S seconds, or for BUSY_SHARE of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.queues: list[Admission] = []  # those that go first
        self.lock = asyncio.Lock()
        self.next_turn = -math.inf  # time of the next turn if the queues stay busy

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self.lock:
            while self.clock() < self.next_turn and any(queue.idle_s() < QUIET_S for queue in self.queues):
                await asyncio.sleep(POLL_S)
            started = self.clock()
            try:
                yield
            finally:
                ended = self.clock()
                self.next_turn = ended + (ended - started) * (1 / BUSY_SHARE - 1)
