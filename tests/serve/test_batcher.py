"""Batches: everyone gets their own answer, a lone client never waits, the first of many only for so long."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitral.serve.batcher import Batcher
from vitral.serve.limits import Refused, Room

PATIENCE = 20  # seconds for a test, on a busy machine
LONG = 3 * PATIENCE  # who waits for this fails


class Model:
    """Squares numbers, and remembers in which batches and in which threads they came."""

    def __init__(self, takes: float = 0.0, gate: threading.Event | None = None) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.takes, self.gate = takes, gate

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(60)
        time.sleep(self.takes)
        if -1 in items:
            raise ValueError("the model failed")
        return [item**2 for item in items]


def run(model, body, *, batch=4, wait_s=0.0, queue=1000, workers=1):
    async def main():
        with ThreadPoolExecutor(workers, thread_name_prefix="model") as threads:
            batcher = Batcher(model, threads, batch=batch, wait_s=wait_s, queue=queue, workers=workers)
            batcher.start()
            try:
                async with asyncio.timeout(PATIENCE):
                    return await body(batcher)
            finally:
                await batcher.stop()
                assert (batcher.places, batcher.announced) == (0, 0)

    return asyncio.run(main())


async def ask(batcher, item, decode=0.0):
    with batcher.place() as place:
        await asyncio.sleep(decode)
        return await place.ask(item)


async def ask_after(event, batcher, item):
    """One whose image is decoded when something has happened."""
    with batcher.place() as place:
        await event.wait()
        return await place.ask(item)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0, 0.001, 0.004])), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_everyone_gets_their_own_answer_in_batches_that_are_not_too_large(asked, batch, workers):
    model = Model()

    async def body(batcher):
        return await asyncio.gather(*(ask(batcher, item, decode) for item, decode in asked))

    assert run(model, body, batch=batch, wait_s=0.002, workers=workers) == [item**2 for item, _ in asked]
    assert sorted(item for batch in model.batches for item in batch) == sorted(item for item, _ in asked)
    assert max(map(len, model.batches)) <= batch
    assert len(model.threads) <= workers


def test_a_lone_image_does_not_wait():
    async def body(batcher):
        return await ask(batcher, 3)

    assert run(Model(), body, wait_s=LONG) == 9


def test_images_that_are_decoded_at_different_speeds_run_together():
    model = Model()

    async def body(batcher):
        return await asyncio.gather(*(ask(batcher, n, decode=0.01 * n) for n in range(4)))

    run(model, body, batch=8, wait_s=LONG)
    assert [sorted(batch) for batch in model.batches] == [[0, 1, 2, 3]]


def test_the_first_waits_no_longer_than_the_bound():
    model = Model()

    async def body(batcher):
        done = asyncio.Event()
        slow = asyncio.create_task(ask_after(done, batcher, 2))
        started = time.perf_counter()
        await ask(batcher, 1)
        first = time.perf_counter() - started
        done.set()
        await slow
        return first

    assert run(model, body, wait_s=0.15) >= 0.13
    assert model.batches == [[1], [2]]


def test_a_full_batch_does_not_wait():
    async def body(batcher):
        done = asyncio.Event()
        slow = asyncio.create_task(ask_after(done, batcher, 9))
        answers = await asyncio.gather(ask(batcher, 1), ask(batcher, 2))
        done.set()
        return [*answers, await slow]

    assert run(Model(), body, batch=2, wait_s=LONG) == [1, 4, 81]


def test_the_next_batch_gathers_while_the_model_computes():
    gate = threading.Event()
    model = Model(gate=gate)

    async def body(batcher):
        first = asyncio.create_task(ask(batcher, 1))
        while not model.batches:
            await asyncio.sleep(0.005)
        others = [asyncio.create_task(ask(batcher, n)) for n in (2, 3, 4)]
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(first, *others)

    assert run(model, body) == [1, 4, 9, 16]
    assert model.batches == [[1], [2, 3, 4]]


def test_workers_share_what_is_there():
    gate = threading.Event()
    model = Model(gate=gate)

    async def body(batcher):
        waiting = [asyncio.create_task(ask(batcher, n)) for n in range(6)]
        while len(model.batches) < 2:
            await asyncio.sleep(0.005)
        gate.set()
        return await asyncio.gather(*waiting)

    assert run(model, body, batch=8, workers=2) == [0, 1, 4, 9, 16, 25]
    assert [len(batch) for batch in model.batches] == [3, 3]


def test_a_full_queue_refuses_and_recovers():
    gate = threading.Event()

    async def body(batcher):
        waiting = [asyncio.create_task(ask(batcher, n)) for n in range(5)]
        await asyncio.sleep(0.02)
        with pytest.raises(Refused) as refused:
            await ask(batcher, 9)
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
        gate.set()
        await asyncio.gather(*waiting)
        return await ask(batcher, 9)

    assert run(Model(gate=gate), body, queue=5) == 81


def test_who_gave_up_is_not_computed():
    gate = threading.Event()
    model = Model(gate=gate)

    async def body(batcher):
        first = asyncio.create_task(ask(batcher, 1))
        while not model.batches:
            await asyncio.sleep(0.005)
        gone, stays = asyncio.create_task(ask(batcher, 2)), asyncio.create_task(ask(batcher, 3))
        await asyncio.sleep(0.02)
        gone.cancel()
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(first, stays)

    assert run(model, body) == [1, 9]
    assert model.batches == [[1], [3]]


def test_a_model_that_fails_fails_its_batch_and_no_other():
    async def body(batcher):
        bad = await asyncio.gather(ask(batcher, -1), ask(batcher, 2), return_exceptions=True)
        return bad, await ask(batcher, 3)

    bad, good = run(Model(), body)
    assert {str(error) for error in bad} == {"the model failed"}
    assert good == 9


def test_an_image_that_cannot_be_read_does_not_keep_the_others_waiting():
    async def body(batcher):
        async def broken():
            with batcher.place():
                await asyncio.sleep(0.05)

        return await asyncio.gather(broken(), ask(batcher, 1))

    assert run(Model(), body, wait_s=LONG) == [None, 1]


def test_a_room_gives_back_what_was_taken():
    room = Room(10, "full")
    with room.holding(7), pytest.raises(Refused):
        room.take(4)
    room.take(10)
    room.give(10)
    assert room.taken == 0
