"""Atomic writes: a reader sees the old file or the new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitral.errors import VitralError
from vitral.utils.atomic import atomic_write


def test_write_replaces_the_file_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    atomic_write(path, "grün")
    atomic_write(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "note.txt"
    atomic_write(path, "old")

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(VitralError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        atomic_write(path, "new")
    if isinstance(caught.value, VitralError):
        assert caught.value.what == f"cannot write {path}: No space left on device"
        assert "disk space" in caught.value.hint
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
