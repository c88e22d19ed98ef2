"""A real server process under abuse: malformed requests, slow clients, overload and shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from support.served import make_image, server, tiny_model
from vitral.serve.connection import make_protocol
from vitral.serve.limits import YIELD_AFTER_S, Limits
from vitral.serve.metrics import ServerMetrics

PREDICT = "/v1/models/tiny/predict"
SHORT_TIMEOUTS = ("--header-timeout-s", 1, "--body-timeout-s", 2, "--stall-timeout-s", 1)
SMALL_BODIES = ("--max-body-mib", 2, "--max-total-body-mib", 16)
DEFAULT_TIMEOUT = min(Limits().header_timeout_s, Limits().stall_timeout_s)  # ten times the short ones: a safe margin


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def strict(model):
    """A server with short timeouts."""
    with server(model, *SHORT_TIMEOUTS, *SMALL_BODIES) as running:
        yield running


def exchange_bytes(port: int, *chunks: bytes, pause: float = 0.0, timeout: float = 60.0) -> bytes:
    """Send raw bytes while receiving; returns everything received until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection, ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive_all, connection)
        try:
            for chunk in chunks:
                connection.sendall(chunk)
                time.sleep(pause)
        except ConnectionError:
            pass
        return received.result()


def receive_all(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"POST {PREDICT} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1]) if response.startswith(b"HTTP/1.1 ") else 0


def is_alive(running) -> bool:
    return httpx.post(running.url + PREDICT, content=make_image(), timeout=60).status_code == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xab" * 200,  # a TLS handshake
        b"GET /\r\n\r\n",
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnot-hex\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 600_000 + b"\r\n\r\n",
        b"\0" * 5000,
    ],
)
def test_garbage_is_refused(strict, garbage):
    assert status(exchange_bytes(strict.port, garbage)) in (0, 400, 431)
    assert is_alive(strict)


def test_incomplete_body_times_out(strict):
    started = time.monotonic()
    assert status(exchange_bytes(strict.port, post(b"x" * 100, length=5000))) == 408
    assert time.monotonic() - started < DEFAULT_TIMEOUT
    assert is_alive(strict)


def test_slow_body_times_out(strict):
    response = exchange_bytes(strict.port, post(b"x", length=5000), *[b"x"] * 7, pause=0.5)
    assert status(response) == 408


def test_slow_headers_time_out(strict):
    started = time.monotonic()
    assert exchange_bytes(strict.port, b"GET / HT", *[b"x"] * 5, pause=0.4) == b""
    assert time.monotonic() - started < DEFAULT_TIMEOUT


def test_silent_connection_is_closed(strict):
    started = time.monotonic()
    assert exchange_bytes(strict.port) == b""
    assert time.monotonic() - started < DEFAULT_TIMEOUT


def test_unread_response_is_dropped(strict):
    """Send requests without reading any response until the buffers are full and the server drops the connection.

    The drop is read from the metrics: a client with full buffers may take a minute to notice it.
    """
    before, deadline = dropped_connections(strict), time.monotonic() + 60
    with socket.create_connection(("127.0.0.1", strict.port), timeout=1) as connection:
        while dropped_connections(strict) == before and time.monotonic() < deadline:
            with suppress(TimeoutError, ConnectionError):
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
    assert dropped_connections(strict) > before
    assert is_alive(strict)


def dropped_connections(running) -> float:
    text = httpx.get(f"{running.url}/metrics", timeout=60).text
    value = text.partition('vitral_dropped_connections_total{reason="unread_response"} ')[2].partition("\n")[0]
    return float(value or 0)


def test_slow_clients_do_not_delay_others(strict):
    connections = [socket.create_connection(("127.0.0.1", strict.port)) for _ in range(100)]
    for connection in connections:
        connection.sendall(post(b"x" * 50, length=4000))
    assert is_alive(strict)  # one after the other, the hundred timeouts would take minutes
    for connection in connections:
        connection.close()


@contextmanager
def slow_bodies(running, count: int, sent: int = 1):
    """Connections that have sent the first bytes of a body of 5,000 bytes."""
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=60))
            connection.sendall(post(b"x" * sent, length=5000))
            connections.append(connection)
        yield connections


def get(running, path: str) -> int:
    return httpx.get(running.url + path, timeout=60).status_code


def test_slow_bodies_take_no_slot(model):
    with server(model, "--max-requests", 2) as running, slow_bodies(running, 8):
        assert is_alive(running)
        assert [get(running, path) for path in ("/metrics", "/healthz", "/readyz", "/v1/models")] == [200] * 4


def test_body_below_the_minimum_rate_times_out(model):
    """Ten bytes per second are progress, but not enough."""
    with server(model, "--stall-timeout-s", 1, "--body-timeout-s", 600) as running:
        started = time.monotonic()
        response = exchange_bytes(running.port, post(b"x", length=5000), *[b"x"] * 300, pause=0.1)
    assert status(response) == 408
    assert time.monotonic() - started < 25  # of the 30 s that the client would have sent
    assert b"Send at least 1 KiB/s" in response


@pytest.mark.slow
def test_incomplete_requests_give_way_when_connections_run_out(model):
    """More connections than allowed: those that never complete a request are closed, and everyone else is served."""
    with server(model, "--max-connections", 8) as running, slow_bodies(running, 6) as connections:
        for _ in range(2):
            connections.append(socket.create_connection(("127.0.0.1", running.port)))  # sends nothing
        time.sleep(YIELD_AFTER_S + 0.5)
        assert [get(running, path) for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        assert is_alive(running)
        assert status(receive_all(connections[0])) == 503
        for connection in connections[6:]:
            connection.close()


@pytest.mark.slow
def test_incomplete_bodies_give_way_when_memory_runs_out(model):
    """Four clients hold all the memory for bodies and send just enough to stay connected."""
    with server(model, "--max-body-mib", 1, "--max-total-body-mib", 4) as running, ExitStack() as stack:
        held = post(b"x" * 1_040_000, length=2**20)
        holders = []
        for _ in range(4):
            holders.append(stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=60)))
            holders[-1].sendall(held)
        time.sleep(YIELD_AFTER_S + 0.5)
        body = make_image(size=(400, 300))
        assert len(body) > 4 * 2**20 - 4 * 1_040_000  # more than what is left
        assert httpx.post(running.url + PREDICT, content=body, timeout=60).status_code == 200
        assert status(receive_all(holders[0])) == 408


@pytest.mark.slow
def test_slow_body_flood_delays_nobody(model):
    """More slow bodies than slots, one byte per second each, until the server has ended all of them."""
    with (
        server(model, "--stall-timeout-s", 4) as running,
        slow_bodies(running, 300) as connections,
        ThreadPoolExecutor(1) as pool,
    ):

        def drip() -> None:
            for _ in range(8):
                time.sleep(1)
                for connection in connections:
                    with suppress(ConnectionError):
                        connection.sendall(b"x")

        dripping, seconds = pool.submit(drip), []
        while not dripping.done():
            started = time.monotonic()
            assert is_alive(running)
            assert get(running, "/metrics") == get(running, "/readyz") == 200
            seconds.append(time.monotonic() - started)
            time.sleep(0.1)
        assert statistics.median(seconds) < 2
        assert {status(receive_all(connection)) for connection in connections} <= {408, 0}


def test_oversized_chunked_body_is_refused(strict):
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert status(exchange_bytes(strict.port, head, *[chunk] * 40, b"0\r\n\r\n")) == 413
    assert is_alive(strict)


@pytest.mark.parametrize("order", [1, -1])
def test_two_body_lengths_close_the_connection(strict, order):
    """Whatever follows the body must not be taken for a request."""
    headers = ["Content-Length: 4", "Transfer-Encoding: chunked"][::order]
    lines = [f"POST {PREDICT} HTTP/1.1", "Host: localhost", *headers, "", ""]
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    response = exchange_bytes(strict.port, "\r\n".join(lines).encode() + b"0\r\n\r\n" + smuggled)
    assert status(response) == 400
    assert b"connection: close" in response.lower()
    assert b"the request has both Content-Length and Transfer-Encoding" in response
    assert response.count(b"HTTP/1.1 ") == 1


def test_head_has_no_body_on_the_wire(strict):
    request = b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    response = exchange_bytes(strict.port, request + last)
    head, _, rest = response.partition(b"\r\n\r\n")
    assert (status(head), status(rest)) == (200, 200)  # the second response follows at once
    assert b"content-length: 15" in head.lower()


def test_foreign_host_is_refused_and_never_repeated_in_a_header(strict):
    for path in ("/", "/v1/models/", "/healthz"):
        request = f"GET {path} HTTP/1.1\r\nHost: attacker.example\r\nConnection: close\r\n\r\n"
        response = exchange_bytes(strict.port, request.encode())
        assert status(response) == 400
        assert b"attacker" not in response.partition(b"\r\n\r\n")[0]


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, str]:
    """One request on a persistent connection: status and headers of the response, whose body is read and discarded."""
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length: ")[2].split("\r")[0]))
    return int(head.split()[1]), head


async def load(running, clients: int, body: bytes, is_done, until_closed: bool = False):
    """Clients that send requests back to back until `is_done(statuses)`: counts of statuses, and connection errors."""
    statuses: Counter[int] = Counter()
    failures: list[str] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        try:
            while not is_done(statuses):
                code, head = await exchange(reader, writer, post(body))
                statuses[code] += 1
                if until_closed and "connection: close" in head:
                    return
                if code == 429:
                    assert "retry-after: " in head
                    await asyncio.sleep(0.02)
        except (OSError, EOFError) as error:
            failures.append(repr(error))
        finally:
            writer.close()

    async with asyncio.timeout(200):
        await asyncio.gather(*(client() for _ in range(clients)))
    return statuses, failures


@pytest.mark.slow
def test_overload_is_refused_and_memory_stays_bounded(model):
    """100 clients, a queue of 20 images."""
    body = make_image(size=(800, 600), format="JPEG")
    limits = ("--max-queue", 20, "--max-requests", 60, "--max-total-body-mib", 40)
    with server(model, *limits) as running:
        asyncio.run(load(running, 4, body, lambda counts: counts[200] > 40))
        before = running.memory_mib
        enough = lambda counts: counts[200] > 40 and counts[429] > 200  # noqa: E731
        statuses, failures = asyncio.run(load(running, 100, body, enough))
        assert failures == []
        assert set(statuses) <= {200, 429, 503}
        assert running.memory_mib - before < 250
        text = httpx.get(f"{running.url}/metrics", timeout=60).text
        assert "vitral_request_body_bytes 0.0" in text
        assert 'vitral_queued_images{model="tiny"} 0.0' in text


def test_sigterm_under_load_completes_all_accepted_requests(model):
    """The last response on each persistent connection says `Connection: close`; no connection is cut off."""
    with server(model, "--drain-s", 3, "--queue-timeout-s", 60) as running:

        async def main():
            busy = asyncio.Event()

            def is_done(statuses) -> bool:
                if sum(statuses.values()) > 100:
                    busy.set()
                return False

            clients = asyncio.create_task(load(running, 24, make_image(size=(300, 200)), is_done, until_closed=True))
            await busy.wait()
            running.terminate()
            async with httpx.AsyncClient(timeout=60) as http:
                while (ready := await http.get(f"{running.url}/readyz")).status_code == 200:
                    await asyncio.sleep(0.02)
                health = await http.get(f"{running.url}/healthz")
                new = await http.post(running.url + PREDICT, content=make_image())  # load balancers need time to notice
            return ready, health, new, await clients

        ready, health, new, (statuses, failures) = asyncio.run(main())
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert (health.status_code, new.status_code) == (200, 200)
        assert failures == []
        assert set(statuses) == {200}
        assert sum(statuses.values()) > 24
        assert running.wait() == 0
        completed = [entry for entry in running.log_entries("request") if entry["status"] == 200 and "images" in entry]
        assert len(completed) == sum(statuses.values()) + 1
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url)


@pytest.mark.slow
def test_sigterm_waits_for_an_incomplete_body(model):
    with server(model, "--drain-s", 0) as running:
        request = post(make_image())
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
            connection.sendall(request[:-50])
            time.sleep(1)
            running.terminate()
            time.sleep(1)
            connection.sendall(request[-50:])
            assert status(receive_all(connection)) == 200
        assert running.wait() == 0


def test_every_log_line_is_json(strict):
    is_alive(strict)
    for line in strict.lines:
        assert {"time", "level", "event"} <= json.loads(line).keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_no_undocumented_response(model, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    with server(model) as running:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{running.url}/openapi.json"]
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        options = ["--checks", checks, "--max-examples", "60", "--seed", "1", "--no-color"]
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-6000:]
        assert running.process.poll() is None


@pytest.mark.parametrize(
    "request_bytes", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"]
)
def test_closing_connection_with_an_unread_response_is_aborted(request_bytes):
    """The rest of a response can be too short to pause writing and still never be read by the client."""

    class UnreadTransport(asyncio.Transport):
        closed = aborted = False

        def write(self, data):
            pass

        def close(self):
            self.closed = True  # data in the write buffer keeps the connection open

        def abort(self):
            self.aborted = True

        def is_closing(self):
            return self.closed

        def get_extra_info(self, name, default=None):
            return default

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main():
        config = uvicorn.Config(app, log_config=None)
        config.load()
        protocol_class = make_protocol(Limits(stall_timeout_s=1), ServerMetrics())
        protocol = protocol_class(config=config, server_state=ServerState(), app_state={})
        transport = UnreadTransport()
        protocol.connection_made(transport)
        protocol.data_received(request_bytes)
        async with asyncio.timeout(20):
            while not transport.closed:
                await asyncio.sleep(0.01)
            assert not transport.aborted
            while not transport.aborted:
                await asyncio.sleep(0.01)

    asyncio.run(main())
