"""Worker processes that decode files into one shared buffer. One that dies ends the training with its reason.

Plain child processes and not `multiprocessing`: a script that calls `vitral.train` needs no `__main__` guard, nothing
is forked beside the threads of a GPU, and nothing is pickled. Pixels are written where they are needed; only names
travel.
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

from vitral.errors import VitralError

MANY = 5000  # files from which a worker earns back the import of torch, which scales large pictures faster
CHUNK = 8  # files a message: enough to hide the pipe, few enough that workers end together


class Source(NamedTuple):
    """Where the bytes of an image are: a whole file, or a part of a shard here or elsewhere."""

    where: str
    offset: int = 0
    size: int = -1  # the whole file

    def __str__(self) -> str:
        return self.where if self.size < 0 else f"{self.where} at byte {self.offset}"


Troubles = dict[int, str]  # what is wrong with the file that should have filled a row


class Workers:
    """`fill(rows, sources)` decodes sources into rows of an array N C H W that begins at byte `offset` of a file."""

    def __init__(
        self, fd: int, shape: tuple[int, ...], interpolation: str, quick: bool, count: int = 0, offset: int = 0
    ) -> None:
        self.count = count or os.cpu_count() or 1
        words = [
            sys.executable,
            "-m",
            "vitral.data.files.worker",
            str(fd),
            str(offset),
            *map(str, shape),
            interpolation,
        ]
        words.append("quick" if quick else "exact")
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[str]] = []
        for _ in range(self.count):
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[fd],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # the workers are the threads
                start_new_session=True,  # Ctrl-C is the training's business; it ends its workers itself
            )
            self._all.append(process)
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="decode")
        self._end = weakref.finalize(self, _end, self._all, self._threads)

    def fill(self, rows: Sequence[int], sources: Sequence[Source]) -> list[Future[Troubles]]:
        """Begin to decode; the results say which rows could not be filled, and why."""
        return [
            self._threads.submit(self._ask, rows[start : start + CHUNK], sources[start : start + CHUNK])
            for start in range(0, len(rows), CHUNK)
        ]

    def _ask(self, rows: Sequence[int], sources: Sequence[Source]) -> Troubles:
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"rows": list(rows), "sources": list(sources)}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            answer = ""
        finally:
            self._idle.put(process)
        if not answer:
            raise _died(process, sources)
        return {int(row): what for row, what in json.loads(answer)["troubles"].items()}

    def close(self) -> None:
        self._end()


def _died(process: subprocess.Popen[str], sources: Sequence[Source]) -> VitralError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    code = process.returncode
    first = f"{sources[0]}" + (f" or one of the {len(sources) - 1} after it" if len(sources) > 1 else "")
    if code == -9:
        return VitralError(
            "a worker process that decodes images was killed, as the system does when memory runs out",
            "what was saved is whole; give the machine more memory, or ask for fewer: --data.workers 1",
        )
    how = f"by signal {-code}" if code is not None and code < 0 else f"with status {code}"
    return VitralError(
        f"a worker process that decodes images ended {how}, at {first}",
        "what was saved is whole; move that file away and try again",
    )


def _end(processes: list[subprocess.Popen[str]], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def shared_buffer(shape: tuple[int, ...]) -> tuple[int, np.ndarray[Any, Any]]:
    """Memory that this process and its workers see, without a name that could be left behind: descriptor and array."""
    size = int(np.prod(shape, dtype=np.int64))
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("vitral-batches")
    else:
        with tempfile.NamedTemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    with open(fd, "r+b", closefd=False) as file:
        array = np.memmap(file, dtype=np.uint8, mode="r+", shape=shape)
    return fd, array
