"""`python -m vitral …`, or a script, in a process of its own: forked from one that has imported torch and done no more.

It is killed, signalled, waited for and listened to like any other, without the seconds that the imports take. What a
fresh interpreter does (what it imports, what it reads from its environment while starting) is tested where it matters,
with `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

IMPORTED = (
    "vitral.api", "vitral.training.trainer", "vitral.serve.server", "uvicorn", "tyro", "torch._dynamo",
    "sklearn.datasets",
)  # fmt: skip
LONGEST = 1 << 17  # bytes of what is asked for


class Process:
    """Of `subprocess.Popen`, what the tests use; its output goes to files, or to `stderr`, a pipe's end."""

    def __init__(
        self,
        *words: object,
        script: Path | None = None,
        environment: dict[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self.said, self.files = ["", ""], [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        asked = {
            "words": [str(word) for word in words],
            "script": script and str(script),
            "cwd": str(Path.cwd()),
            "environment": dict(os.environ) if environment is None else environment,
        }
        ends = [self.files[0].fileno(), self.files[1].fileno() if stderr is None else stderr]
        socket.send_fds(nursery(), [json.dumps(asked).encode()], ends)
        self.pid = int(nursery().recv(64))
        self.returncode: int | None = None

    def __del__(self) -> None:
        for file in self.files:
            file.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            nursery().send(str(self.pid).encode())
            ended = nursery().recv(64).decode()
            self.returncode = int(ended) if ended != "runs" else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """All that it said, once it has ended."""
        self.wait(timeout)
        for number, file in enumerate(self.files):
            if not file.closed:
                file.seek(0)
                self.said[number] = file.read()
                file.close()
        return self.said[0], self.said[1]


@cache
def nursery() -> socket.socket:
    """The line to the process that forks: it ends when this one does."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, __file__, str(there.fileno())], pass_fds=[there.fileno()])
    there.close()

    def end() -> None:
        here.close()
        process.wait(10)

    atexit.register(end)
    return here


def serve(line: socket.socket) -> None:
    for name in IMPORTED:
        import_module(name)
    while True:
        asked, ends, _, _ = socket.recv_fds(line, LONGEST, 2)
        if not asked:
            return
        if not ends:
            pid, status = os.waitpid(int(asked), os.WNOHANG)
            line.send(str(os.waitstatus_to_exitcode(status)).encode() if pid else b"runs")
        elif pid := os.fork():
            for end in ends:
                os.close(end)
            line.send(str(pid).encode())
        else:
            line.close()
            return become(**json.loads(asked), ends=ends)


def become(words: list[str], script: str | None, cwd: str, environment: dict[str, str], ends: list[int]) -> None:
    """What `python` does once it has started."""
    for number, end in zip((1, 2), ends, strict=True):
        os.dup2(end, number)
        os.close(end)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script or "vitral", *words]
    code: object = 0
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module("vitral", run_name="__main__", alter_sys=True)
    except SystemExit as asked:
        code = asked.code
    except BaseException:
        traceback.print_exc()
        code = 1
    depart(code)


def depart(code: object) -> NoReturn:
    """As `sys.exit`, but for the interpreter's own end, in which threads of libraries, forked or not, may abort."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # which wakes the threads of idle pools, and waits for all
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
