"""Admission by expected wait, and turns for low-priority work."""

from __future__ import annotations

import asyncio

import pytest

from vitral.serve.admission import BUSY_SHARE, QUIET_S, Admission, LowPriorityTurns
from vitral.serve.limits import RequestError


class FakeClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def serve_items(admission: Admission, clock: FakeClock, count: int, item_s: float) -> None:
    admission.enter(count)
    for _ in range(count):
        clock.now += item_s
        admission.leave(finished=True)


def test_expected_wait_is_pending_items_divided_by_the_measured_rate():
    clock = FakeClock()
    admission = Admission(max_pending=1000, timeout_s=60, clock=clock)
    assert admission.expected_wait_s() == 0
    serve_items(admission, clock, count=40, item_s=0.25)
    clock.now += 3600  # idle time does not count
    admission.enter(10)
    assert admission.expected_wait_s() == pytest.approx(10 * 0.25)
    assert admission.retry_after() == 3


def test_rate_follows_a_change():
    clock = FakeClock()
    admission = Admission(max_pending=1000, timeout_s=60, clock=clock)
    serve_items(admission, clock, count=100, item_s=0.01)
    serve_items(admission, clock, count=40, item_s=0.5)
    admission.enter(10)
    assert admission.expected_wait_s() == pytest.approx(10 * 0.5, rel=0.2)


def test_time_without_a_finished_item_lowers_the_rate():
    clock = FakeClock()
    admission = Admission(max_pending=1000, timeout_s=60, clock=clock)
    serve_items(admission, clock, count=40, item_s=0.1)
    admission.enter(10)
    clock.now += 2
    assert admission.expected_wait_s() > 2 * 10 * 0.1


def test_items_that_would_wait_too_long_are_refused():
    clock = FakeClock()
    admission = Admission(max_pending=1000, timeout_s=2, clock=clock)
    serve_items(admission, clock, count=10, item_s=0.5)
    for _ in range(5):
        admission.enter()
    with pytest.raises(RequestError, match="the queue is full; retry in 3 s") as error:
        admission.enter()
    assert (error.value.status, error.value.headers["Retry-After"]) == (429, "3")
    clock.now += 0.5
    admission.leave(finished=True)
    admission.enter()


def test_abandoned_items_do_not_count_as_service():
    clock = FakeClock()
    admission = Admission(max_pending=1000, timeout_s=2, clock=clock)
    serve_items(admission, clock, count=10, item_s=0.5)
    admission.enter(4)
    admission.leave(4, finished=False)
    admission.enter()
    assert admission.expected_wait_s() == pytest.approx(0.5)


@pytest.mark.parametrize(("item_s", "retry_after"), [(1e-6, 1), (1e6, 60)])
def test_retry_after_is_bounded(item_s, retry_after):
    clock = FakeClock()
    admission = Admission(max_pending=1000, timeout_s=2, clock=clock)
    serve_items(admission, clock, count=1, item_s=item_s)
    admission.enter(2)
    assert admission.retry_after() == retry_after


def test_low_priority_work_runs_one_at_a_time_and_waits_for_quiet_queues():
    async def main():
        clock = FakeClock()
        turns = LowPriorityTurns(clock)
        predict = Admission(max_pending=10, timeout_s=1, clock=clock)
        turns.queues.append(predict)
        events: list[str] = []

        async def explain(name: str) -> None:
            async with turns.turn():
                events.append(f"{name} starts")
                clock.now += 1.0
                await asyncio.sleep(0)
                events.append(f"{name} ends")

        await explain("first")
        predict.enter()
        task = asyncio.create_task(explain("second"))
        await asyncio.sleep(0.05)
        assert events == ["first starts", "first ends"]
        predict.leave(finished=True)
        await asyncio.sleep(0.05)
        assert events == ["first starts", "first ends"]  # not yet quiet
        clock.now += 2 * QUIET_S
        await task
        assert events[2:] == ["second starts", "second ends"]
        predict.enter()
        task = asyncio.create_task(explain("third"))
        clock.now += 1.0 / BUSY_SHARE - 1.0 - 0.01
        await asyncio.sleep(0.05)
        assert len(events) == 4
        clock.now += 0.02  # a tenth of the time is guaranteed, even if predict requests never stop
        await task
        assert len(events) == 6

    async def bounded():
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())
