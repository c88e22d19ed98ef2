"""A real server process under floods: accepted predict requests stay fast, the others are told when to retry."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from dataclasses import dataclass, field

import httpx
import pytest
from PIL import Image

from support.served import make_image, server, tiny_model

PREDICT, EXPLAIN = "/v1/models/{}/predict", "/v1/models/{}/explain?methods=rollout,relevance,gradcam&attention=true"


def blank_image(width: int, height: int) -> bytes:
    """A small file that takes long to decode."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, format="PNG")
    return file.getvalue()


LARGE = blank_image(2000, 1500)


@dataclass
class Outcome:
    """Seconds of the accepted requests, and the Retry-After of the refused ones."""

    seconds: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)

    def add(self, response: httpx.Response, seconds: float) -> None:
        if response.status_code == 200:
            self.seconds.append(seconds)
        else:
            assert response.status_code in (429, 503), response.text
            self.retry_after.append(int(response.headers["retry-after"]))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overload")
    with server(tiny_model(folder / "a"), tiny_model(folder / "b")) as running:
        yield running


async def send(http: httpx.AsyncClient, url: str, body: bytes, outcome: Outcome) -> None:
    started = time.perf_counter()
    response = await http.post(url, content=body)
    outcome.add(response, time.perf_counter() - started)


async def send_once(running, body: bytes, outcome: Outcome) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        await send(http, running.url + PREDICT.format("a"), body, outcome)


async def send_until(done: asyncio.Event, url: str, body: bytes, outcome: Outcome) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        while not done.is_set():
            refused = len(outcome.retry_after)
            await send(http, url, body, outcome)
            if len(outcome.retry_after) > refused:
                await asyncio.sleep(0.1)


async def under_flood(running, path: str, clients: int, body: bytes, count: int) -> tuple[Outcome, Outcome]:
    """Outcomes of `count` predict requests to model a, one after the other, and of the flood around them."""
    done, accepted, flood = asyncio.Event(), Outcome(), Outcome()
    tasks = [asyncio.create_task(send_until(done, running.url + path, body, flood)) for _ in range(clients)]
    await asyncio.sleep(1.5 if clients else 0)
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(count):
            await send(http, running.url + PREDICT.format("a"), make_image(), accepted)
    done.set()
    await asyncio.gather(*tasks)
    return accepted, flood


@pytest.mark.slow
@pytest.mark.parametrize("flooded", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_explain_flood_does_not_delay_predict(running, flooded):
    """The flood goes to the same model, and then to the other one."""
    idle, _ = asyncio.run(under_flood(running, "", 0, b"", count=10))
    accepted, flood = asyncio.run(under_flood(running, EXPLAIN.format(flooded), 24, LARGE, count=10))
    assert len(accepted.seconds) == 10
    assert statistics.median(accepted.seconds) < 10 * statistics.median(idle.seconds) + 0.5
    assert flood.seconds  # explain requests still get their turn
    assert flood.retry_after  # more clients than the queue has room for
    assert all(1 <= seconds <= 60 for seconds in flood.retry_after)


@pytest.mark.slow
def test_predict_flood_does_not_starve_another_model(running):
    alone = Outcome()
    asyncio.run(send_once(running, LARGE, alone))
    accepted, flood = asyncio.run(under_flood(running, PREDICT.format("b"), 24, LARGE, count=10))
    assert len(accepted.seconds) == 10
    assert statistics.median(accepted.seconds) < 2 + 4 * alone.seconds[0]
    assert flood.seconds


@pytest.mark.slow
def test_accepted_requests_stay_fast_under_overload(running):
    """Forty clients where two keep the server busy."""
    alone = Outcome()
    asyncio.run(send_once(running, LARGE, alone))
    accepted, flood = asyncio.run(under_flood(running, PREDICT.format("a"), 40, LARGE, count=4))
    assert statistics.median(flood.seconds + accepted.seconds) < 2 + 4 * alone.seconds[0]
    assert flood.retry_after
