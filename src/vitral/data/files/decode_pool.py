"""Threads or processes that decode images into one shared file. If a process dies, the run ends with the reason.

Uses plain child processes instead of `multiprocessing`: scripts that call `vitral.train` need no `__main__` guard,
nothing is forked while GPU threads are running, and nothing is pickled. Pixels are written into the file; only paths
are sent. A process decodes in a few threads, which share its imports and memory. Until the first process is ready,
threads of the calling process decode.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vitral.data.files.decode_process import Decoded, DecodeOptions, RowFile, decode_into
from vitral.data.files.location import ImageLocation
from vitral.data.geometry import Size
from vitral.data.pixels import PixelType
from vitral.data.preprocess import Preprocessing
from vitral.data.resize_crop import TORCH_MIN_PIXELS
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError

THREADS_PER_PROCESS = 4  # an image holds the GIL for about a tenth of its time
MAX_FILES_PER_CALL = 8  # hides the latency of a call; the last calls have fewer, so that all threads finish together


def decode_options(split: str, stored: Preprocessing) -> DecodeOptions:
    """Options for decoding images of a split at the size and crop of `stored`.

    Training images are decoded as fast as possible. Validation and test images are decoded in full and resized with
    Pillow: every reported number is measured on the pixels that `Predictor` computes from the same files.
    """
    is_train = split == "train"
    max_pixels = 4 * math.prod(stored.image_size)  # of JPEGs: larger ones are decoded at reduced size
    return DecodeOptions(
        interpolation=stored.interpolation,
        crop=stored.crop,
        resize=stored.resize,
        torch_resize=is_train and max_pixels >= TORCH_MIN_PIXELS,
        allow_reduced_jpeg=is_train,
        dtype=stored.dtype,
        layout=stored.layout,
        channel_names=stored.channel_names,
    )


OnDecoded = Callable[[Decoded], None]  # called in any thread


class Connection(NamedTuple):
    """A socket that one thread of a worker process serves."""

    process: subprocess.Popen[bytes]
    stream: IO[str]


class DecodeWorkers:
    """Processes that decode images into rows of `target`.

    `count` is the number of images that are decoded at a time; 0: one per CPU.
    """

    def __init__(
        self, target: RowFile, options: DecodeOptions, *, count: int = 0, on_decoded: OnDecoded | None = None
    ) -> None:
        self.count, self._on_decoded = count or available_cpus(), on_decoded
        self._target, self._options = target, options
        args = [str(target.fd), str(target.offset), *map(str, target.shape), json.dumps(options._asdict())]
        self._idle: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()  # None: decode in this process
        self._is_ready = threading.Event()
        self._connections: list[Connection] = []
        for first in range(0, self.count, THREADS_PER_PROCESS):
            self._connections += _start_process(args, target.fd, min(THREADS_PER_PROCESS, self.count - first))
        for connection in self._connections:
            self._idle.put(None)
            args_ready = (connection, self._idle, self._is_ready)
            threading.Thread(target=_wait_until_ready, args=args_ready, name="decode-start", daemon=True).start()
        # One more than there are connections, so that none waits for `on_decoded`.
        self._threads = ThreadPoolExecutor(self.count + 1, thread_name_prefix="decode")
        self._finalizer = weakref.finalize(self, _shut_down, self._connections, self._threads)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return list({connection.process.pid: connection.process for connection in self._connections}.values())

    def wait_until_ready(self) -> None:
        """Return when the first process has started; until then, this process decodes."""
        self._is_ready.wait()

    def decode(
        self, rows: Sequence[int], locations: Sequence[ImageLocation], sizes: Sequence[Size] | None = None
    ) -> list[Future[Decoded]]:
        """Start decoding `locations` into `rows`, at `sizes` if they differ. Returns one future per row.

        A future may be shared by several rows.
        """
        return _submit(self._threads, self._request, rows, locations, sizes, self.count)

    def _request(
        self, rows: Sequence[int], locations: Sequence[ImageLocation], sizes: Sequence[Size] | None
    ) -> Decoded:
        connection = self._idle.get()
        while connection is None and self._is_ready.is_set():
            connection = self._idle.get()
        if connection is None:
            try:
                decoded = decode_into(self._target, rows, locations, self._options, sizes)
            finally:
                if not self._is_ready.is_set():
                    self._idle.put(None)
        else:
            decoded = self._send(connection, rows, locations, sizes)
        if self._on_decoded is not None:
            self._on_decoded(decoded)
        return decoded

    def _send(
        self,
        connection: Connection,
        rows: Sequence[int],
        locations: Sequence[ImageLocation],
        sizes: Sequence[Size] | None,
    ) -> Decoded:
        try:
            request = {"rows": list(rows), "locations": list(locations), "sizes": sizes}
            connection.stream.write(json.dumps(request) + "\n")
            connection.stream.flush()
            reply = connection.stream.readline()
        except (OSError, ValueError):
            reply = ""
        finally:
            self._idle.put(connection)
        if not reply:
            raise _worker_died_error(connection.process, locations)
        return Decoded(
            **{field: {int(row): value for row, value in values.items()} for field, values in json.loads(reply).items()}
        )

    def close(self) -> None:
        self._finalizer()


class DecodeThreads:
    """Threads of this process that decode images into rows of `target`.

    They start at once and share the imports of this process, but more than a few compete for the GIL.
    """

    def __init__(
        self, target: RowFile, options: DecodeOptions, *, count: int = 0, on_decoded: OnDecoded | None = None
    ) -> None:
        self.target, self.options, self._on_decoded = target, options, on_decoded
        self.count = count or available_cpus()
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="decode")

    def decode(
        self, rows: Sequence[int], locations: Sequence[ImageLocation], sizes: Sequence[Size] | None = None
    ) -> list[Future[Decoded]]:
        """As `DecodeWorkers.decode`."""
        return _submit(self._threads, self._decode, rows, locations, sizes, self.count)

    def _decode(self, rows: Sequence[int], locations: Sequence[ImageLocation], sizes: Sequence[Size] | None) -> Decoded:
        decoded = decode_into(self.target, rows, locations, self.options, sizes)
        if self._on_decoded is not None:
            self._on_decoded(decoded)
        return decoded

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _submit(
    threads: ThreadPoolExecutor,
    decode: Callable[..., Decoded],
    rows: Sequence[int],
    locations: Sequence[ImageLocation],
    sizes: Sequence[Size] | None,
    num_parallel: int,
) -> list[Future[Decoded]]:
    """Call `decode` in threads with a few rows at a time. Returns the future of each row."""
    futures: list[Future[Decoded]] = []
    while len(futures) < len(rows):
        share = (len(rows) - len(futures)) // (2 * num_parallel)
        part = slice(len(futures), len(futures) + min(max(share, 1), MAX_FILES_PER_CALL))
        future = threads.submit(decode, rows[part], locations[part], None if sizes is None else sizes[part])
        futures += [future] * len(rows[part])
    return futures


def _start_process(args: Sequence[str], fd: int, num_threads: int) -> list[Connection]:
    package_root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    pairs = [socket.socketpair() for _ in range(num_threads)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    process = subprocess.Popen(
        [sys.executable, "-m", "vitral.data.files.decode_process", *args, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd, *numbers],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # parallelism is across threads and workers
        start_new_session=True,  # Ctrl-C reaches only the training process, which then ends its workers
    )
    connections = []
    for ours, theirs in pairs:
        theirs.close()  # a worker that dies then ends the stream
        connections.append(Connection(process, ours.makefile("rw")))
        ours.close()  # the stream keeps it open
    return connections


def _wait_until_ready(
    connection: Connection, idle: queue.SimpleQueue[Connection | None], is_ready: threading.Event
) -> None:
    """Thread body: hand a connection out when its worker has started. If it died, the next request reports that."""
    with contextlib.suppress(OSError, ValueError):
        connection.stream.readline()
    idle.put(connection)
    is_ready.set()


def _worker_died_error(process: subprocess.Popen[bytes], locations: Sequence[ImageLocation]) -> VitralError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    code = process.returncode
    if code == -9:
        return VitralError(
            "an image decoding process was killed, probably because the system ran out of memory",
            "Saved checkpoints are intact. Use fewer processes (--data.workers 1) or a machine with more memory",
        )
    ending = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    others = f" or one of the next {len(locations) - 1} images" if len(locations) > 1 else ""
    return VitralError(
        f"an image decoding process {ending} at {locations[0]}{others}",
        "Saved checkpoints are intact. Remove the file and try again",
    )


def _shut_down(connections: list[Connection], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for connection in connections:
        connection.process.kill()
    for connection in connections:
        connection.process.wait()
        with contextlib.suppress(OSError):
            connection.stream.close()


def shared_buffer(shape: tuple[int, ...], dtype: PixelType) -> tuple[int, np.ndarray[Any, Any]]:
    """Descriptor and array of anonymous memory that can be shared with child processes."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("vitral-batches")
    else:
        with tempfile.NamedTemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    with open(fd, "r+b", closefd=False) as file:
        array = np.memmap(file, dtype=dtype, mode="r+", shape=shape)
    return fd, array
