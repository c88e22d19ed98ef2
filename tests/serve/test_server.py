"""A real server process, treated badly: it answers what it should, refuses the rest, and forgets nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from support.served import picture, server, tiny_model
from vitral.serve.limits import Limits
from vitral.serve.metrics import Meters
from vitral.serve.server import protocol

PREDICT = "/v1/models/tiny/predict"
QUICK = ("--header-s", 1, "--body-s", 2, "--pause-s", 1, "--body-mib", 2, "--held-mib", 16)
USUAL = min(Limits().header_s, Limits().pause_s)  # seconds, ten times as long: on a busy machine too


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def quick(model):
    """With short patience, so that the tests need little of it."""
    with server(model, *QUICK) as running:
        yield running


def talk(port: int, *pieces: bytes, pause: float = 0.0, patience: float = 60.0) -> bytes:
    """Send bytes as they are, listening all the while; what comes back until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as line, ThreadPoolExecutor(1) as ear:
        heard = ear.submit(listen, line)
        try:
            for piece in pieces:
                line.sendall(piece)
                time.sleep(pause)
        except ConnectionError:
            pass
        return heard.result()


def listen(line: socket.socket) -> bytes:
    heard = b""
    with suppress(ConnectionError):
        while more := line.recv(65536):
            heard += more
    return heard


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {PREDICT} HTTP/1.1", "Host: x", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0


def alive(running) -> bool:
    return httpx.post(running.url + PREDICT, content=picture(), timeout=20).status_code == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xab" * 200,  # a TLS greeting
        b"GET /\r\n\r\n",
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot-hex\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 600_000 + b"\r\n\r\n",
        b"\0" * 5000,
    ],
)
def test_garbage_instead_of_http_is_refused(quick, garbage):
    assert status(talk(quick.port, garbage)) in (0, 400, 431)
    assert alive(quick)


def test_a_half_sent_body_is_given_up(quick):
    started = time.monotonic()
    assert status(talk(quick.port, post(b"x" * 100, length=5000))) == 408
    assert time.monotonic() - started < USUAL
    assert alive(quick)


def test_a_body_that_trickles_is_given_up(quick):
    reply = talk(quick.port, post(b"x", length=5000), *[b"x"] * 7, pause=0.5)
    assert status(reply) == 408


def test_headers_that_trickle_are_given_up(quick):
    started = time.monotonic()
    assert talk(quick.port, b"GET / HT", *[b"x"] * 5, pause=0.4) == b""
    assert time.monotonic() - started < USUAL


def test_a_silent_connection_is_closed(quick):
    started = time.monotonic()
    assert talk(quick.port) == b""
    assert time.monotonic() - started < USUAL


def test_an_answer_that_nobody_fetches_does_not_stay(quick):
    """Requests sent without end on one connection, nothing read: its answers fill the buffers, then it is dropped.

    The server is asked whether it was: a client whose buffers are full may take a minute to notice.
    """
    before, until = unfetched(quick), time.monotonic() + 60
    with socket.create_connection(("127.0.0.1", quick.port), timeout=1) as line:
        while unfetched(quick) == before and time.monotonic() < until:
            with suppress(TimeoutError, ConnectionError):
                line.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    assert unfetched(quick) > before
    assert alive(quick)


def unfetched(running) -> float:
    said = httpx.get(f"{running.url}/metrics", timeout=20).text
    line = said.partition('vitral_dropped_connections_total{why="unfetched"} ')[2].partition("\n")[0]
    return float(line or 0)


def test_slow_clients_do_not_keep_others_waiting(quick):
    lines = [socket.create_connection(("127.0.0.1", quick.port)) for _ in range(100)]
    for line in lines:
        line.sendall(post(b"x" * 50, length=4000))
    assert alive(quick)  # within seconds: the hundred would take minutes, one after the other
    for line in lines:
        line.close()


def test_more_than_the_limit_is_refused_while_it_streams(quick):
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert status(talk(quick.port, head, *[chunk] * 40, b"0\r\n\r\n")) == 413
    assert alive(quick)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, str]:
    """One request on a connection that stays: status and headers of the answer, whose body is read to its end."""
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length: ")[2].split("\r")[0]))
    return int(head.split()[1]), head


async def load(running, clients: int, body: bytes, enough, until_told: bool = False):
    """Clients that ask again as soon as they are answered, until it is enough: statuses, and what went wrong."""
    statuses, failures = Counter(), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        try:
            while not enough(statuses):
                code, head = await exchange(reader, writer, post(body))
                statuses[code] += 1
                if until_told and "connection: close" in head:
                    return
                if code == 429:
                    assert "retry-after: 1" in head
                    await asyncio.sleep(0.02)
        except (OSError, EOFError) as error:
            failures.append(repr(error))
        finally:
            writer.close()

    async with asyncio.timeout(60):
        await asyncio.gather(*(client() for _ in range(clients)))
    return statuses, failures


def test_ten_times_too_much_is_refused_and_memory_stays_bounded(model):
    """200 clients for a queue of 20."""
    body = picture(size=(800, 600), format="JPEG")
    limits = ("--queue", 20, "--requests", 60, "--held-mib", 40)
    with server(model, *limits) as running:
        asyncio.run(load(running, 4, body, lambda told: told[200] > 40))
        before = running.memory_mib
        statuses, failures = asyncio.run(load(running, 200, body, lambda told: told[200] > 150 and told[429] > 1000))
        assert failures == []
        assert set(statuses) <= {200, 429, 503}
        assert running.memory_mib - before < 250
        text = httpx.get(f"{running.url}/metrics", timeout=20).text
        assert "vitral_held_bytes 0.0" in text
        assert 'vitral_waiting_images{model="tiny"} 0.0' in text


def test_sigterm_under_load_answers_all_that_was_accepted(model):
    """Clients keep their connections; each is told to leave with its last answer. Nobody is cut off."""
    with server(model, "--drain-s", 3) as running:

        async def main():
            busy = asyncio.Event()

            def enough(statuses) -> bool:
                if sum(statuses.values()) > 100:
                    busy.set()
                return False

            asked = asyncio.create_task(load(running, 24, picture(size=(300, 200)), enough, until_told=True))
            await busy.wait()
            running.terminate()
            async with httpx.AsyncClient(timeout=20) as http:
                while (ready := await http.get(f"{running.url}/readyz")).status_code == 200:
                    await asyncio.sleep(0.02)
                health = await http.get(f"{running.url}/healthz")
                new = await http.post(running.url + PREDICT, content=picture())  # balancers need time to notice
            return ready, health, new, await asked

        ready, health, new, (statuses, failures) = asyncio.run(main())
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert (health.status_code, new.status_code) == (200, 200)
        assert failures == []
        assert set(statuses) == {200}
        assert sum(statuses.values()) > 24
        assert running.ended() == 0
        answered = [entry for entry in running.logged("request") if entry["status"] == 200 and "images" in entry]
        assert len(answered) == sum(statuses.values()) + 1
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url)


@pytest.mark.slow
def test_sigterm_waits_for_a_body_that_is_on_its_way(model):
    with server(model, "--drain-s", 0) as running:
        whole = post(picture())
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as line:
            line.sendall(whole[:-50])
            time.sleep(1)
            running.terminate()
            time.sleep(1)
            line.sendall(whole[-50:])
            assert status(listen(line)) == 200
        assert running.ended() == 0


def test_the_log_of_a_process_is_json_line_by_line(quick):
    alive(quick)
    for line in quick.lines:
        assert {"time", "level", "event"} <= json.loads(line).keys()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_schemathesis_finds_no_answer_that_is_not_described(model, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    with server(model) as running:
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{running.url}/openapi.json"]
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        options = ["--checks", checks, "--max-examples", "60", "--seed", "1", "--no-color"]
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-6000:]
        assert running.process.poll() is None


@pytest.mark.parametrize("how", ["a request that is none", "the last answer"])
def test_a_connection_closed_before_its_answer_was_fetched_does_not_linger(how):
    """What is left of an answer may be too little to be called stuck, and still nobody fetches it."""

    class Full(asyncio.Transport):
        closed = aborted = False

        def write(self, data):
            pass

        def close(self):
            self.closed = True  # what is not sent yet stays, and the connection with it

        def abort(self):
            self.aborted = True

        def is_closing(self):
            return self.closed

        def get_extra_info(self, name, default=None):
            return default

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def met():
        config = uvicorn.Config(app, log_config=None)
        config.load()
        line = protocol(Limits(pause_s=1), Meters())(config=config, server_state=ServerState(), app_state={})
        full = Full()
        line.connection_made(full)
        last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        line.data_received(last if how == "the last answer" else b"nonsense\r\n\r\n")
        async with asyncio.timeout(20):
            while not full.closed:
                await asyncio.sleep(0.01)
            assert not full.aborted
            while not full.aborted:
                await asyncio.sleep(0.01)

    asyncio.run(met())
