"""Worker processes that decode images into one shared buffer. If a worker dies, the run ends with the reason.

Uses plain child processes instead of `multiprocessing`: scripts that call `vitral.train` need no `__main__` guard,
nothing is forked while GPU threads are running, and nothing is pickled. Pixels are written directly into the buffer;
only paths are sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitral.data.files.worker import DecodeOptions
from vitral.data.geometry import Size
from vitral.data.pixels import PixelType
from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import available_cpus
from vitral.errors import VitralError

TORCH_RESIZE_MIN_FILES = 5000  # from here on, faster resizing outweighs the import of torch in every worker
FILES_PER_MESSAGE = 8  # hides the latency of the pipe; few enough that all workers finish at about the same time


def decode_options(split: str, stored: Preprocessing, count: int) -> DecodeOptions:
    """Options for decoding `count` images of a split at the size and crop of `stored`.

    Training images are decoded as fast as possible. Validation and test images are decoded in full and resized with
    Pillow: every reported number is measured on the pixels that `Predictor` computes from the same files.
    """
    is_train = split == "train"
    return DecodeOptions(
        interpolation=stored.interpolation,
        crop=stored.crop,
        resize=stored.resize,
        torch_resize=is_train and count >= TORCH_RESIZE_MIN_FILES,
        allow_reduced_jpeg=is_train,
        dtype=stored.dtype,
        layout=stored.layout,
        channel_names=stored.channel_names,
    )


class ImageLocation(NamedTuple):
    """Where the bytes of an image are: a whole file, or a byte range of a local or remote shard."""

    path: str  # or URL
    offset: int = 0
    size: int = -1  # -1: the whole file

    def __str__(self) -> str:
        return self.path if self.size < 0 else f"{self.path} at byte {self.offset}"


DecodeErrors = dict[int, str]  # row → error message


class DecodeWorkers:
    """Processes that decode images into an array of `shape` (N, C, H, W) at byte `offset` of the file `fd`."""

    def __init__(
        self, fd: int, shape: tuple[int, ...], options: DecodeOptions, *, count: int = 0, offset: int = 0
    ) -> None:
        self.count = count or available_cpus()
        command = [sys.executable, "-m", "vitral.data.files.worker", str(fd), str(offset), *map(str, shape)]
        command.append(json.dumps(options._asdict()))
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        for _ in range(self.count):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[fd],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # parallelism is across workers
                start_new_session=True,  # Ctrl-C reaches only the training process, which then ends its workers
            )
            self._processes.append(process)
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="decode")
        self._finalizer = weakref.finalize(self, _shut_down, self._processes, self._threads)

    def decode(
        self, rows: Sequence[int], locations: Sequence[ImageLocation], sizes: Sequence[Size] | None = None
    ) -> list[Future[DecodeErrors]]:
        """Start decoding `locations` into `rows`, at `sizes` if they differ. The results are the errors, by row."""
        starts = range(0, len(rows), FILES_PER_MESSAGE)
        chunks = [slice(start, start + FILES_PER_MESSAGE) for start in starts]
        return [
            self._threads.submit(self._request, rows[c], locations[c], None if sizes is None else sizes[c])
            for c in chunks
        ]

    def _request(
        self, rows: Sequence[int], locations: Sequence[ImageLocation], sizes: Sequence[Size] | None
    ) -> DecodeErrors:
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            request = {"rows": list(rows), "locations": list(locations), "sizes": sizes}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            reply = ""
        finally:
            self._idle.put(process)
        if not reply:
            raise _worker_died_error(process, locations)
        return {int(row): message for row, message in json.loads(reply)["errors"].items()}

    def close(self) -> None:
        self._finalizer()


def _worker_died_error(process: subprocess.Popen[str], locations: Sequence[ImageLocation]) -> VitralError:
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


def _shut_down(processes: list[subprocess.Popen[str]], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


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
