"""`python -m vitral ...`, or a script, in a process of its own, forked from a server that has imported torch.

Forking saves the seconds that the imports take; otherwise the processes behave like any other. Tests of what a fresh
interpreter does (what it imports, what it reads from its environment at startup) use `subprocess` instead.
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
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    "vitral.api.training",
    "vitral.api.evaluation",
    "vitral.api.deployment",
    "vitral.training.trainer",
    "vitral.serve.server",
    "uvicorn",
    "torch._dynamo",
    "sklearn.datasets",
)
MAX_REQUEST_BYTES = 1 << 17
RUNNING = b"running"
HANG_SECONDS = 1200  # only ends a process that hangs: no test depends on how fast a process is

_request_lock = threading.Lock()  # replies carry no identifier: one request at a time


class Process:
    """The part of `subprocess.Popen` that the tests use. Output goes to temporary files; `stderr` may be a pipe."""

    def __init__(
        self,
        *arguments: object,
        script: Path | None = None,
        environment: dict[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self.output, self.files = ["", ""], [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        request = {
            "arguments": [str(argument) for argument in arguments],
            "script": script and str(script),
            "cwd": str(Path.cwd()),
            "environment": dict(os.environ) if environment is None else environment,
        }
        descriptors = [self.files[0].fileno(), self.files[1].fileno() if stderr is None else stderr]
        self.pid = int(_request(json.dumps(request).encode(), descriptors))
        self.returncode: int | None = None

    def __del__(self) -> None:
        for file in self.files:
            file.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            reply = _request(str(self.pid).encode())
            self.returncode = None if reply == RUNNING else int(reply)
        return self.returncode

    def wait(self, timeout: float = HANG_SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = HANG_SECONDS) -> tuple[str, str]:
        """Wait for the process; returns its stdout and stderr."""
        self.wait(timeout)
        for number, file in enumerate(self.files):
            if not file.closed:
                file.seek(0)
                self.output[number] = file.read()
                file.close()
        return self.output[0], self.output[1]


def run_ranks(script: Path, *arguments: object, world_size: int = 2) -> None:
    """Run a script as the ranks of one job and wait for all of them. If a rank fails, show the output of every rank.

    This process hosts the rendezvous store, as torchrun does, so that no port is chosen before it is bound. Gloo uses
    the loopback interface, so that the machine's host name and network do not matter.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    ranks = []
    for rank in range(world_size):
        variables = {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        ranks.append(Process(*arguments, script=script, environment=os.environ | variables))
    failed = _wait_for_ranks(ranks)
    if failed:
        raise AssertionError("\n".join([failed, *(_describe(rank, process) for rank, process in enumerate(ranks))]))


def _wait_for_ranks(ranks: list[Process]) -> str | None:
    """Wait until all ranks have ended; returns which rank failed first, or None.

    The other ranks usually notice the failure at their next collective. They are killed if they do not.
    """
    deadline, failed = time.monotonic() + HANG_SECONDS, None
    while any(process.poll() is None for process in ranks):
        if failed is None and (codes := [rank for rank, process in enumerate(ranks) if process.returncode]):
            failed = f"rank {codes[0]} failed first"
            deadline = min(deadline, time.monotonic() + 60)
        if time.monotonic() > deadline:
            failed = failed or f"the ranks did not end within {HANG_SECONDS} s"
            for process in ranks:
                process.kill()
        time.sleep(0.01)
    if failed is None and any(process.returncode for process in ranks):
        failed = "a rank failed"
    return failed


def _describe(rank: int, process: Process) -> str:
    stdout, stderr = process.communicate()
    return f"--- rank {rank}: exit status {process.returncode}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"


def _request(content: bytes, descriptors: Sequence[int] = ()) -> bytes:
    """Send a request to the fork server and return its reply."""
    with _request_lock, suppress(ConnectionError):
        socket.send_fds(fork_server(), [content], descriptors)
        if reply := fork_server().recv(64):
            return reply
    raise RuntimeError("the fork server has ended; its traceback is in the captured stderr")


@cache
def fork_server() -> socket.socket:
    """The connection to the process that forks. It ends when this process closes the connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve(connection: socket.socket) -> None:
    """Fork for each request with file descriptors; reply to requests without them with a child's exit status."""
    for name in PRELOADED:
        import_module(name)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if not request:
            os._exit(0)  # the interpreter's own shutdown may hang in threads of imported libraries
        if not descriptors:
            pid, status = os.waitpid(int(request), os.WNOHANG)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode() if pid else RUNNING)
        elif pid := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(pid).encode())
        else:
            connection.close()
            run_program(**json.loads(request), descriptors=descriptors)


def run_program(
    arguments: list[str], script: str | None, cwd: str, environment: dict[str, str], descriptors: list[int]
) -> NoReturn:
    """Do what `python` does after its startup."""
    for number, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script or "vitral", *arguments]
    code: object = 0
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module("vitral", run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)


def exit_process(code: object) -> NoReturn:
    """Like `sys.exit`, without the final cleanup of the interpreter, in which library threads may abort."""
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads of idle pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # scripts import `support`, as tests do
    serve(socket.socket(fileno=int(sys.argv[1])))
