"""Latency of predict requests that `vitral serve` accepts: idle, under floods of explain requests, and at 10x overload.

    python benchmarks/serve_overload.py [--preset Ti/16] [--seconds 15] [--flood 64] [--serve FLAGS]

One server process with two models of the same preset, `first` and `second`; the clients run in this process on the same
cores. One client sends predict requests to `first`, each as soon as it has received the previous response:

    idle             nothing else
    explain first    `--flood` clients send explain requests with all methods to the same model
    explain second   the same to the other model
    predict second   the same with predict requests to the other model

Then 32 clients measure the capacity, and `overload 10x` sends requests to `first` at ten times that rate, whether or
not the previous ones were answered. Latencies are those of responses with status 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _output import add_output_arguments, write_results
from serve import load_photographs, make_model

METHODS = "rollout,relevance,gradcam"
CAPACITY_CLIENTS, OVERLOAD, OVERLOAD_CONNECTIONS = 32, 10, 400


@dataclass
class Responses:
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)  # seconds, status 200 only

    def add(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.latencies.append(seconds)

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.latencies)
        return 1000 * ordered[int(percent / 100 * (len(ordered) - 1))] if ordered else float("nan")


class LoadClient:
    """One persistent connection."""

    def __init__(self, port: int, path: str, bodies: list[bytes]) -> None:
        self.port, self.path, self.bodies, self.sent = port, path, bodies, 0

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, responses: Responses) -> int:
        body = self.bodies[self.sent % len(self.bodies)]
        self.sent += 1
        started = time.perf_counter()
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        headers = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        await self.reader.readexactly(int(headers.partition(b"content-length: ")[2].split(b"\r")[0]))
        status = int(headers.split()[1])
        responses.add(status, time.perf_counter() - started)
        return status


async def closed_loop(client: LoadClient, deadline: float, pause: float = 0.05) -> Responses:
    """Send requests back to back; after a refusal, wait for `pause` seconds instead of Retry-After."""
    responses = Responses()
    await client.connect()
    while time.perf_counter() < deadline:
        if await client.send(responses) != 200:
            await asyncio.sleep(pause)
    client.writer.close()
    return responses


async def open_loop(clients: list[LoadClient], rate: float, seconds: float) -> Responses:
    """Send `rate` requests per second, on any connection that is free."""
    responses, idle, tasks = Responses(), list(clients), set()
    await asyncio.gather(*(client.connect() for client in clients))

    async def send(client: LoadClient) -> None:
        await client.send(responses)
        idle.append(client)

    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        while count < rate * elapsed and idle:
            task = asyncio.create_task(send(idle.pop()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            count += 1
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    for client in clients:
        client.writer.close()
    return responses


@asynccontextmanager
async def flood(port: int, path: str, bodies: list[bytes], count: int, deadline: float) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(closed_loop(LoadClient(port, path, bodies), deadline)) for _ in range(count)]
    await asyncio.sleep(1)
    yield
    await asyncio.gather(*tasks)


async def measure(port: int, bodies: list[bytes], seconds: float, flood_clients: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first, second = "/v1/models/first", "/v1/models/second"

    def report(name: str, responses: Responses, rate: float | None = None) -> None:
        row = {
            "load": name,
            "requests_per_second": rate,
            "accepted": len(responses.latencies),
            "refused": responses.statuses.total() - len(responses.latencies),
            "p50_ms": responses.percentile_ms(50),
            "p99_ms": responses.percentile_ms(99),
        }
        rows.append(row)
        print(
            f"{name:<16} n = {row['accepted']:>5}   p50 {row['p50_ms']:7.0f} ms   p99 {row['p99_ms']:7.0f} ms   "
            f"statuses {dict(responses.statuses)}",
            flush=True,
        )

    async def one_client() -> Responses:
        return await closed_loop(LoadClient(port, f"{first}/predict", bodies), time.perf_counter() + seconds)

    await one_client()
    report("idle", await one_client())
    for name, path in (
        ("explain first", f"{first}/explain?methods={METHODS}"),
        ("explain second", f"{second}/explain?methods={METHODS}"),
        ("predict second", f"{second}/predict"),
    ):
        async with flood(port, path, bodies, flood_clients, time.perf_counter() + seconds + 1):
            responses = await one_client()
        report(name, responses)
        await asyncio.sleep(2)
    deadline = time.perf_counter() + seconds
    clients = [LoadClient(port, f"{first}/predict", bodies) for _ in range(CAPACITY_CLIENTS)]
    results = await asyncio.gather(*(closed_loop(client, deadline) for client in clients))
    everything = Responses()
    for responses in results:
        everything.statuses += responses.statuses
        everything.latencies += responses.latencies
    capacity = len(everything.latencies) / seconds
    report(f"{CAPACITY_CLIENTS} clients", everything, capacity)
    clients = [LoadClient(port, f"{first}/predict", bodies) for _ in range(OVERLOAD_CONNECTIONS)]
    responses = await open_loop(clients, OVERLOAD * capacity, seconds)
    report(f"overload {OVERLOAD}x", responses, responses.statuses.total() / seconds)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Ti/16")
    parser.add_argument("--images", type=Path, help="folder with JPEG files (default: synthetic images)")
    parser.add_argument("--seconds", type=float, default=15, help="duration of each measurement")
    parser.add_argument("--flood", type=int, default=64, help="clients of a flood")
    parser.add_argument("--serve", default="", help="additional flags for vitral serve")
    add_output_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, args.preset)
        command = [sys.executable, "-m", "vitral", "serve", str(model), str(model), "--name", "first"]
        command += ["--name", "second", "--port", "0", "--log", "json", *args.serve.split()]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            port = int(
                json.loads(next(line for line in server.stderr if '"listening"' in line))["url"].rpartition(":")[2]
            )
            subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # keeps the pipe empty
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            rows = asyncio.run(measure(port, load_photographs(args.images), args.seconds, args.flood))
            write_results(args, rows, {"preset": args.preset, "flood": args.flood})
            server.send_signal(signal.SIGINT)
            server.wait(60)
        finally:
            if server.poll() is None:
                server.kill()


if __name__ == "__main__":
    main()
