"""Dynamic batching: results match their items, a single client never waits, and waiting is bounded."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitral.serve.batcher import Batcher
from vitral.serve.limits import Budget, RequestError

TEST_TIMEOUT = 20  # seconds, also on a busy machine
NEVER = 3 * TEST_TIMEOUT  # a test that waits for this fails


class SquaringModel:
    """Squares integers and records the batches and the threads."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.gate = gate

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(60)
        if -1 in items:
            raise ValueError("the model failed")
        return [item**2 for item in items]


def run(model, body, *, max_batch=4, wait_s=0.0, max_queue=1000, queue_timeout_s=NEVER, workers=1, **options):
    async def main():
        with ThreadPoolExecutor(workers, thread_name_prefix="model") as pool:
            batcher = Batcher(
                model,
                pool,
                max_batch=max_batch,
                wait_s=wait_s,
                max_queue=max_queue,
                queue_timeout_s=queue_timeout_s,
                workers=workers,
                **options,
            )
            batcher.start()
            try:
                async with asyncio.timeout(TEST_TIMEOUT):
                    return await body(batcher)
            finally:
                await batcher.stop()
                assert (batcher.pending, batcher.decoding) == (0, 0)

    return asyncio.run(main())


async def submit(batcher, item, decode_seconds=0.0):
    async with batcher.ticket() as ticket:
        await asyncio.sleep(decode_seconds)
        return await ticket.submit(item)


async def submit_after(event, batcher, item):
    """Submit an item whose decoding ends with an event."""
    async with batcher.ticket() as ticket:
        await event.wait()
        return await ticket.submit(item)


async def start_batch(batcher, model, item):
    """Submit an item and wait until the model runs; returns the task that waits for the result."""
    task = asyncio.create_task(submit(batcher, item))
    while not model.batches:
        await asyncio.sleep(0.005)
    return task


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0, 0.001, 0.004])), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_results_match_their_items_and_batches_are_bounded(requests, max_batch, workers):
    model = SquaringModel()

    async def body(batcher):
        return await asyncio.gather(*(submit(batcher, item, seconds) for item, seconds in requests))

    assert run(model, body, max_batch=max_batch, wait_s=0.002, workers=workers) == [item**2 for item, _ in requests]
    assert sorted(item for batch in model.batches for item in batch) == sorted(item for item, _ in requests)
    assert max(map(len, model.batches)) <= max_batch
    assert len(model.threads) <= workers


def test_single_item_does_not_wait():
    async def body(batcher):
        return await submit(batcher, 3)

    assert run(SquaringModel(), body, wait_s=NEVER) == 9


def test_items_decoded_at_different_speeds_share_a_batch():
    model = SquaringModel()

    async def body(batcher):
        return await asyncio.gather(*(submit(batcher, n, decode_seconds=0.01 * n) for n in range(4)))

    run(model, body, max_batch=8, wait_s=NEVER)
    assert [sorted(batch) for batch in model.batches] == [[0, 1, 2, 3]]


def test_first_item_waits_at_most_wait_s():
    model = SquaringModel()

    async def body(batcher):
        done = asyncio.Event()
        slow = asyncio.create_task(submit_after(done, batcher, 2))
        started = time.perf_counter()
        await submit(batcher, 1)
        first = time.perf_counter() - started
        done.set()
        await slow
        return first

    assert run(model, body, wait_s=0.15) >= 0.13
    assert model.batches == [[1], [2]]


def test_full_batch_does_not_wait():
    async def body(batcher):
        done = asyncio.Event()
        slow = asyncio.create_task(submit_after(done, batcher, 9))
        results = await asyncio.gather(submit(batcher, 1), submit(batcher, 2))
        done.set()
        return [*results, await slow]

    assert run(SquaringModel(), body, max_batch=2, wait_s=NEVER) == [1, 4, 81]


def test_next_batch_collects_while_the_model_runs():
    gate = threading.Event()
    model = SquaringModel(gate=gate)

    async def body(batcher):
        first = await start_batch(batcher, model, 1)
        others = [asyncio.create_task(submit(batcher, n)) for n in (2, 3, 4)]
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(first, *others)

    assert run(model, body) == [1, 4, 9, 16]
    assert model.batches == [[1], [2, 3, 4]]


def test_workers_share_the_pending_items():
    gate = threading.Event()
    model = SquaringModel(gate=gate)

    async def body(batcher):
        tasks = [asyncio.create_task(submit(batcher, n)) for n in range(6)]
        while len(model.batches) < 2:
            await asyncio.sleep(0.005)
        gate.set()
        return await asyncio.gather(*tasks)

    assert run(model, body, max_batch=8, workers=2) == [0, 1, 4, 9, 16, 25]
    assert [len(batch) for batch in model.batches] == [3, 3]


def test_full_queue_refuses_and_recovers():
    gate = threading.Event()

    async def body(batcher):
        tasks = [asyncio.create_task(submit(batcher, n)) for n in range(5)]
        await asyncio.sleep(0.02)
        with pytest.raises(RequestError) as error:
            await submit(batcher, 9)
        assert (error.value.status, error.value.headers) == (429, {"Retry-After": "1"})
        gate.set()
        await asyncio.gather(*tasks)
        return await submit(batcher, 9)

    assert run(SquaringModel(gate=gate), body, max_queue=5) == 81


def test_item_that_waits_too_long_is_refused_and_not_processed():
    gate = threading.Event()
    model = SquaringModel(gate=gate)

    async def body(batcher):
        first = await start_batch(batcher, model, 1)
        with pytest.raises(RequestError, match=r"still queued after 0.1 seconds") as error:
            await submit(batcher, 2)
        assert (error.value.status, error.value.code) == (503, "timeout")
        gate.set()
        return await first

    assert run(model, body, queue_timeout_s=0.1) == 1  # a running batch is not interrupted
    assert model.batches == [[1]]


def test_decoding_and_later_batches_of_a_request_do_not_count_as_waiting():
    class SlowModel(SquaringModel):
        def __call__(self, items):
            time.sleep(0.3)
            return super().__call__(items)

    async def body(batcher):
        async with batcher.ticket(3) as ticket:
            ticket.pause_timeout()
            await asyncio.sleep(0.3)  # decoding
            return await asyncio.gather(*(ticket.submit(n) for n in (1, 2, 3)))

    assert run(SlowModel(), body, max_batch=1, queue_timeout_s=0.2) == [1, 4, 9]


def test_cancelled_item_is_not_processed():
    gate = threading.Event()
    model = SquaringModel(gate=gate)

    async def body(batcher):
        first = await start_batch(batcher, model, 1)
        cancelled, kept = asyncio.create_task(submit(batcher, 2)), asyncio.create_task(submit(batcher, 3))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(first, kept)

    assert run(model, body) == [1, 9]
    assert model.batches == [[1], [3]]


def test_model_failure_affects_only_its_batch():
    async def body(batcher):
        failures = await asyncio.gather(submit(batcher, -1), submit(batcher, 2), return_exceptions=True)
        return failures, await submit(batcher, 3)

    failures, result = run(SquaringModel(), body)
    assert {str(error) for error in failures} == {"the model failed"}
    assert result == 9


def test_unreadable_image_does_not_delay_the_others():
    async def body(batcher):
        async def unreadable():
            async with batcher.ticket():
                await asyncio.sleep(0.05)

        return await asyncio.gather(unreadable(), submit(batcher, 1))

    assert run(SquaringModel(), body, wait_s=NEVER) == [None, 1]


def test_budget_releases_what_was_acquired():
    budget = Budget(10, "full")
    with budget.hold(7), pytest.raises(RequestError):
        budget.acquire(4)
    budget.acquire(10)
    budget.release(10)
    assert budget.used == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=24))
def test_items_with_different_keys_never_share_a_batch(items: list[int]) -> None:
    model = SquaringModel()

    async def body(batcher):
        async with batcher.ticket(len(items)) as ticket:
            return await asyncio.gather(*(ticket.submit(item) for item in items))

    results = run(model, body, batch_key=lambda item: item % 3)
    assert results == [item**2 for item in items]
    assert all(len({item % 3 for item in batch}) == 1 for batch in model.batches)
    assert max(map(len, model.batches)) <= 4
