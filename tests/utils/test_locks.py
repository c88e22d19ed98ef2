"""File locks: one holder at a time, and no lock file afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import Timeout

from support.processes import Process
from vitral.utils.locks import file_lock

INCREMENT = """
import sys
from pathlib import Path
from vitral.utils.locks import file_lock

counter, lock = map(Path, sys.argv[1:])
for _ in range(12):
    with file_lock(lock):
        value = int(counter.read_text())
        counter.write_text(str(value + 1))
"""


def test_lock_file_is_deleted_also_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with file_lock(path):
        assert path.exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="inside"), file_lock(path):
        raise RuntimeError("inside")
    assert list(tmp_path.iterdir()) == []


def test_held_lock_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with file_lock(path):
        with pytest.raises(Timeout), file_lock(path, timeout=0):
            pass
        assert path.exists()


def test_lock_file_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()
    with file_lock(path, timeout=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_processes_exclude_each_other_although_the_file_is_deleted(tmp_path: Path) -> None:
    script, counter, lock = (tmp_path / name for name in ("increment.py", "counter", ".lock"))
    script.write_text(INCREMENT)
    counter.write_text("0")
    processes = [Process(counter, lock, script=script) for _ in range(3)]
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
    assert counter.read_text() == "36"
    assert not lock.exists()
