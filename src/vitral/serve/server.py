"""The process: uvicorn with the timeouts it lacks, a shutdown that answers what was accepted, and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.device.hardware import Device
from vitral.errors import VitralError
from vitral.inference.engine_selection import Wish
from vitral.inference.predictor import Predictor
from vitral.serve.app import make_app
from vitral.serve.limits import Limits
from vitral.serve.metrics import Meters
from vitral.serve.middleware import State, digests
from vitral.serve.models import Served, model_threads, name_all

Log = Literal["text", "json"]
SAID = b'{"error": "there are too many connections: try again in a moment"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(SAID), SAID)
)


def protocol(limits: Limits, meters: Meters) -> type[H11Protocol]:
    """HTTP/1.1 that does not wait for ever: for headers, for an answer to be fetched, for its turn."""

    class Patient(H11Protocol):
        watch: asyncio.TimerHandle | None = None  # headers that are not whole
        stuck: asyncio.TimerHandle | None = None  # an answer that nobody fetches
        last: asyncio.TimerHandle | None = None  # the same of the last one, before the connection is closed

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(FULL)
                transport.close()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._watch()
            else:
                self._unwatch()

        def _watch(self) -> None:
            if self.watch is None:
                self.watch = self.loop.call_later(limits.header_s, self._drop, "headers")

        def _unwatch(self) -> None:
            if self.watch is not None:
                self.watch.cancel()
                self.watch = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stuck = self.loop.call_later(limits.pause_s, self._drop, "unfetched")

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.stuck is not None:
                self.stuck.cancel()
                self.stuck = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._closing()

        def send_400_response(self, msg: str) -> None:
            super().send_400_response(msg)
            self._closing()

        def _closing(self) -> None:
            """A connection that is to be closed once its last answer is fetched: it need not be fetched ever."""
            if self.transport.is_closing() and self.last is None:
                self.last = self.loop.call_later(limits.pause_s, self._drop, "unfetched")

        def _drop(self, why: str) -> None:
            meters.dropped.labels(why).inc()
            self.transport.abort()

        def timeout_keep_alive_handler(self) -> None:
            if self.transport.get_write_buffer_size():
                self._drop("unfetched")
            else:
                super().timeout_keep_alive_handler()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            for timer in (self.stuck, self.last):
                if timer is not None:
                    timer.cancel()
            self._unset_keepalive_if_required()
            super().connection_lost(exc)

    return Patient


class Draining(uvicorn.Server):
    """SIGTERM: not ready any more, then `drain_s` seconds of answering, then no new connections, then the end.

    Ctrl-C does not drain; a second one does not wait for answers either.
    """

    def __init__(self, config: uvicorn.Config, state: State, started: Callable[[], None]) -> None:
        super().__init__(config)
        self.state, self.leaves_at, self.on_start = state, float("inf"), started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.state.draining and sig == signal.SIGINT:
            self.force_exit = True
        if not self.state.draining:
            self.state.draining = True
            self.leaves_at = time.monotonic() + (self.state.limits.drain_s if sig == signal.SIGTERM else 0)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self.force_exit or time.monotonic() >= self.leaves_at
        return await super().on_tick(counter)


class Lines(logging.Formatter):
    """One line an event: JSON for programs, words for people."""

    def __init__(self, kind: Log) -> None:
        super().__init__()
        self.kind = kind

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        trouble = self.formatException(record.exc_info) if record.exc_info else ""
        if self.kind == "json":
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
            more = {"trouble": trouble} if trouble else {}
            said = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()} | fields | more
            return json.dumps(said, ensure_ascii=False)
        if record.getMessage() == "request" and "route" in fields:
            images = f"  {fields['images']} image{'s' * (fields['images'] != 1)}" if "images" in fields else ""
            return f"{fields['method']:<5}{fields['status']}  {fields['ms']:>7.1f} ms  {fields['route']}{images}"
        return "\n".join(filter(None, [record.getMessage(), *(f"{k}: {v}" for k, v in fields.items()), trouble]))


def log_to(stream: Any, kind: Log) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines(kind))
    for name, level in (("vitral.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def bind(host: str, port: int) -> socket.socket:
    """The port, or why it cannot be had, before a model is loaded for nothing."""
    if not 0 <= port < 2**16:
        raise VitralError(f"there is no port {port}", "they go from 1 to 65535; 0: any free one")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family[0], family[1], family[2])
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(family[4])
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise VitralError(f"cannot listen on {host}:{port}: {said}", "choose another with --port or --host") from error
    return bound


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """That this process may use: of the machine, of its affinity, of its control group (containers)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = quota_file.read_text().split()
        cores = min(cores, max(round(int(quota) / int(period)), 1))
    return cores


def share_cores(cores: int, threads: int | None) -> int:
    """How many batches run side by side, when each has `threads` of the cores.

    A batch on all cores waits for the slowest of them after each layer, and decoding takes turns with it: few threads
    and several batches get more done, and a single image is not much slower for it.
    """
    if threads is None:
        told = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(told) if told.isdecimal() and int(told) else 1 if cores <= 2 else 2 if cores <= 8 else 4
        torch.set_num_threads(threads)
    return max(cores // threads, 1)


def serve(
    runs: Sequence[str],
    *,
    names: Sequence[str] = (),
    labels: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    device: Device = "auto",
    precision: Wish = "auto",
    threads: int | None = None,
    log: Log = "text",
) -> None:
    """Serve models until a signal says to stop."""
    limits = limits or Limits()
    chosen = name_all(runs, names)
    state = State(limits=limits, keys=digests(keys))
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limits say what is too large
    with bind(host, port) as bound, ExitStack() as stack:
        predictors = [
            Predictor.load(run, device=device, labels=labels, precision=precision, threads=threads, many=True)
            for run in runs
        ]
        cores, workers = usable_cores(), 1
        if all(predictor.hardware.device.type == "cpu" for predictor in predictors):
            workers = share_cores(cores, threads)
        decoding = stack.enter_context(ThreadPoolExecutor(max(2, min(cores, 8)), thread_name_prefix="decode"))
        computing = stack.enter_context(model_threads(workers))
        models = [
            Served(name, predictor, limits, decoding, computing, state.meters, workers)
            for name, predictor in zip(chosen, predictors, strict=True)
        ]
        log_to(sys.stderr, log)
        where = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(models, state),
            http=protocol(limits, state.meters),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here depends on who asks
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=int(limits.body_s + limits.request_s) + 5,
            h11_max_incomplete_event_size=32 * 1024,
            backlog=min(limits.connections, 1024),
        )
        Draining(config, state, lambda: announce(models, where, log)).run(sockets=[bound])
    logging.getLogger("vitral.serve").info("stopped")


def announce(models: Sequence[Served], where: str, log: Log) -> None:
    if log == "json":
        said = [{"name": m.name, "version": m.version, "understood": m.predictor.notes} for m in models]
        logging.getLogger("vitral.serve").info("listening", extra={"fields": {"at": where, "models": said}})
        return
    for model in models:
        asked = model.predictor
        described = f"{len(asked.classes)} classes, version {model.version}, {asked.choice}"
        print("\n".join([f"{model.name:<16} {described}", *(f"  {note}" for note in asked.notes)]))
    workers = models[0].batcher.workers
    if workers > 1:
        threads = torch.get_num_threads()
        print(f"{'':<16} {workers} batches side by side, {threads} thread{'s' * (threads > 1)} each")
    print(f"\nThe page         {where}/\nFor programs     {where}/docs\nStop with Ctrl-C.\n", flush=True)
