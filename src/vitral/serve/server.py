"""The server process: load the models, listen, log, and shut down without dropping accepted requests."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from PIL import Image

from vitral.device.cpu import available_cpus
from vitral.device.select import DeviceOption
from vitral.errors import VitralError
from vitral.inference.engine import EngineName
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.serve.app import create_app
from vitral.serve.connection import make_protocol
from vitral.serve.explorer import ExplorerSetting, is_explorer_offered
from vitral.serve.hosts import allowed_hosts
from vitral.serve.limits import Limits
from vitral.serve.logs import LogFormat, configure_logging
from vitral.serve.middleware import ServerState, hash_keys
from vitral.serve.models import ServedModel, model_names, start_model_threads
from vitral.utils.text import count_text

MAX_HEADER_BYTES = 32 * 1024
# A model thread needs the interpreter lock between operations. While the event loop is busy, for example refusing
# requests, it would wait for the default of 5 ms every time.
THREAD_SWITCH_S = 0.0005


class DrainingServer(uvicorn.Server):
    """On SIGTERM: fail the readiness check, keep serving for `drain_s` seconds, then stop accepting and finish.

    Ctrl-C skips the draining; a second Ctrl-C also aborts the requests in progress.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self.state, self.exit_time, self.on_started = state, float("inf"), on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.state.draining and sig == signal.SIGINT:
            self.force_exit = True
        if not self.state.draining:
            self.state.draining = True
            self.exit_time = time.monotonic() + (self.state.limits.drain_s if sig == signal.SIGTERM else 0)

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self.force_exit or time.monotonic() >= self.exit_time
        return await super().on_tick(counter)


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind before the models are loaded, so that a port in use is reported at once."""
    if not 0 <= port < 2**16:
        raise VitralError(f"invalid port {port}", "Use a port from 1 to 65535, or 0 for any free port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family[0], family[1], family[2])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(family[4])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise VitralError(f"cannot listen on {host}:{port}: {reason}", "Choose another --port or --host") from error
    return listener


def concurrent_batches(cpus: int, threads: int | None) -> int:
    """Number of batches to run at a time on a CPU, each with `threads` threads (set here if None).

    A batch on all cores waits for the slowest core after every layer and competes with decoding. Several batches with
    few threads each have a higher throughput, and the latency of a single image is hardly worse.
    """
    if threads is None:
        omp_threads = os.environ.get("OMP_NUM_THREADS", "")
        if omp_threads.isdecimal() and int(omp_threads):
            threads = int(omp_threads)
        else:
            threads = 1 if cpus <= 2 else 2 if cpus <= 8 else 4
        torch.set_num_threads(threads)
    return max(cpus // threads, 1)


def divide_cpus(predictors: Sequence[Predictor], threads: int | None) -> int:
    """`concurrent_batches` of this machine. The engines then state the number of threads that each batch has."""
    workers = concurrent_batches(available_cpus(), threads)
    for predictor in predictors:
        predictor.engine = replace(predictor.engine, threads=torch.get_num_threads())
    return workers


def serve(
    sources: Sequence[str],
    *,
    names: Sequence[str] = (),
    labels: Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: Sequence[str] | None = None,
    hosts: Sequence[str] = (),
    limits: Limits | None = None,
    device: DeviceOption = "auto",
    engine: EngineName = "auto",
    tome_r: int = 0,
    threads: int | None = None,
    log: LogFormat = "text",
    explorer: ExplorerSetting = "auto",
) -> None:
    """Serve models over HTTP until a signal stops the process.

    sources: run folders, model folders, checkpoints, hub names or bundled models.
    names: names of the models in the URLs, one per source; derived from the sources if empty.
    options: what the files of checkpoints of other libraries do not contain; applies to all models.
    keys: accepted API keys; None: no key needed.
    hosts: names accepted in the Host header, in addition to localhost and the address in `host`.
    explorer: whether /explorer/ runs the models in the browser, which publishes their weights. "auto": on localhost,
        without keys.
    """
    limits = limits or Limits()
    url_names = model_names(sources, names)
    state = ServerState(
        limits=limits,
        key_digests=hash_keys(keys),
        hosts=allowed_hosts(host, hosts),
        offers_explorer=is_explorer_offered(explorer, host, keys),
    )
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # max_megapixels decides
    with bind_socket(host, port) as listener, ExitStack() as stack:
        predictors = [
            Predictor.load(
                source,
                device=device,
                labels=labels,
                options=options,
                engine=engine,
                threads=threads,
                throughput=True,
                tome_r=tome_r,
            )
            for source in sources
        ]
        for predictor in predictors:
            predictor.require_head()
        on_cpu = all(predictor.hardware.device.type == "cpu" for predictor in predictors)
        workers = divide_cpus(predictors, threads) if on_cpu else 1
        decoders = max(2, min(available_cpus(), 8))
        model_threads = stack.enter_context(start_model_threads(decoders=decoders, workers=workers, on_cpu=on_cpu))
        models = [
            ServedModel(name, predictor, limits, model_threads, state.metrics)
            for name, predictor in zip(url_names, predictors, strict=True)
        ]
        configure_logging(sys.stderr, log)
        sys.setswitchinterval(THREAD_SWITCH_S)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        config = _uvicorn_config(models, state)
        DrainingServer(config, state, lambda: report_startup(models, url, log)).run(sockets=[listener])
    logging.getLogger("vitral.serve").info("stopped")


def _uvicorn_config(models: Sequence[ServedModel], state: ServerState) -> uvicorn.Config:
    limits = state.limits
    return uvicorn.Config(
        create_app(models, state),
        http=make_protocol(limits, state.metrics),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing depends on the client's address
        timeout_keep_alive=int(limits.keep_alive_s),
        timeout_graceful_shutdown=int(limits.body_timeout_s + limits.request_timeout_s) + 5,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=min(limits.max_connections, 1024),
    )


def report_startup(models: Sequence[ServedModel], url: str, log: LogFormat) -> None:
    """Print the models and the URL for people, or log them as one JSON line."""
    if log == "json":
        described = [
            {
                "name": model.name,
                "version": model.version,
                "engine": model.predictor.engine.info(),
                "notes": model.predictor.notes,
            }
            for model in models
        ]
        logging.getLogger("vitral.serve").info("listening", extra={"fields": {"url": url, "models": described}})
        return
    for model in models:
        predictor = model.predictor
        print(f"{model.name:<16} {len(predictor.classes)} classes, version {model.version}, {predictor.engine}")
        for note in predictor.notes:
            print(f"  {note}")
    workers = models[0].threads.workers
    if workers > 1:
        threads = torch.get_num_threads()
        print(f"{'':<16} {workers} concurrent batches, {count_text(threads, 'thread')} each")
    explorer = f"Explorer         {url}/explorer/\n" if any(model.in_explorer for model in models) else ""
    print(f"\nWeb page         {url}/\n{explorer}API docs         {url}/docs\nStop with Ctrl-C.\n", flush=True)
