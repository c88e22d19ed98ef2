"""Run a benchmark in this process, which has already imported torch."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RunBenchmark = Callable[..., str]


@pytest.fixture
def run_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunBenchmark:
    """`run_benchmark(module, *words)` returns what the benchmark prints.

    Its subprocesses that run the same file also run in this process, except those of gpu_throughput, which stay open.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    real_run = subprocess.run

    def run(benchmark: ModuleType, *words: object) -> str:
        script = str(benchmark.__file__)

        def run_in_process(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
            if script not in command:
                return real_run(command, **settings)
            monkeypatch.setattr(sys, "argv", command[command.index(script) :])
            with redirect_stdout(io.StringIO()) as output:
                benchmark.main()
            return subprocess.CompletedProcess(command, 0, output.getvalue(), "")

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "run", run_in_process)
            return run_in_process([script, *map(str, words)]).stdout

    return run
