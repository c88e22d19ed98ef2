"""Checkpoints are written atomically, read without running code, and refused with a clear error if damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from vitral.errors import VitralError
from vitral.training import checkpoint
from vitral.training.sharded_checkpoint import restore_replaced

STATE: dict[str, Any] = {"model": {"w": torch.arange(6.0).view(2, 3)}, "best": {"top1": 0.5}, "ema": None}


def test_load_returns_what_was_saved(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, STATE, keep=2)
    assert path == tmp_path / "step-000000007.pt"
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    assert (loaded["step"], loaded["best"], loaded["ema"]) == (7, {"top1": 0.5}, None)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_checkpoints_with_the_highest_steps_are_kept(tmp_path: Path, keep: int) -> None:
    steps = [9, 10, 99, 100, 100_000]
    for step in steps:
        checkpoint.save(tmp_path, step, STATE, keep=keep)
    assert [int(path.stem.removeprefix("step-")) for path in sorted(tmp_path.iterdir())] == steps[-keep:]
    assert checkpoint.newest(tmp_path) == tmp_path / "step-000100000.pt"


def test_newest_is_none_without_checkpoints(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def test_newest_before_another_checkpoint(tmp_path: Path) -> None:
    first, second = (checkpoint.save(tmp_path, step, STATE, keep=2) for step in (1, 2))
    assert checkpoint.newest(tmp_path, before=second) == first
    assert checkpoint.newest(tmp_path, before=first) is None


class FileOnFullDisk:
    """Accepts a number of bytes, then raises ENOSPC."""

    def __init__(self, file: Any, free_bytes: int) -> None:
        self.file, self.free_bytes = file, free_bytes

    def write(self, content: Any) -> int:
        size = len(memoryview(content).cast("B"))
        if size > self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free_bytes -= size
        self.file.write(content)
        return size

    def __enter__(self) -> FileOnFullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("free_bytes", [0, 100, 1500])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    previous = checkpoint.save(tmp_path, 1, STATE, keep=1)
    content = previous.read_bytes()
    real_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args: FileOnFullDisk(real_open(self, *args), free_bytes))
    with pytest.raises(VitralError, match=r"cannot write the checkpoint .*step-000000002\.pt: No space left") as error:
        checkpoint.save(tmp_path, 2, STATE, keep=1)
    monkeypatch.undo()
    assert error.value.hint == "Free some disk space; the previous checkpoint step-000000001.pt is intact"
    assert [path.name for path in tmp_path.iterdir()] == [previous.name]
    assert previous.read_bytes() == content
    assert checkpoint.load(previous)["step"] == 1


def test_a_full_disk_at_the_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args: FileOnFullDisk(real_open(self, *args), 10))
    with pytest.raises(VitralError) as error:
        checkpoint.save(tmp_path, 2, STATE, keep=1)
    assert "no checkpoint exists yet" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_while_saving_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = checkpoint.save(tmp_path, 1, STATE, keep=1)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, STATE, keep=1)
    assert list(tmp_path.iterdir()) == [previous]


def test_saving_into_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match=r"cannot write the checkpoint .*No such file") as error:
        checkpoint.save(tmp_path / "missing", 1, STATE, keep=1)
    assert error.value.hint == "Check that the folder is writable; no checkpoint exists yet"


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, size: int) -> None:
    path = checkpoint.save(tmp_path, 3, STATE, keep=1)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(VitralError, match=r"cannot read the checkpoint .*step-000000003\.pt") as error:
        checkpoint.load(path)
    assert error.value.hint == "Delete it to resume from the previous one"


@pytest.mark.parametrize("number", [2, 99])
def test_another_format_is_refused_and_not_replaced_by_an_older_checkpoint(tmp_path: Path, number: int) -> None:
    """Format 2 had no digest."""
    checkpoint.save(tmp_path, 1, STATE, keep=2)
    path = tmp_path / "step-000000002.pt"
    torch.save({"format": number, "step": 2}, path)
    message = f"has format {number}; this version of vitral reads format {checkpoint.FORMAT}"
    for load in (lambda: checkpoint.load(path), lambda: checkpoint.load_newest(tmp_path)):
        with pytest.raises(VitralError, match=message):
            load()


@pytest.mark.parametrize("content", [{"step": 1}, [1, 2, 3]])
def test_file_without_digest_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "step-000000001.pt"
    torch.save(content, path)
    with pytest.raises(VitralError, match="does not end with its SHA-256"):
        checkpoint.load(path)


def test_digest_is_the_comment_of_a_valid_zip_archive(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, STATE, keep=1)
    with zipfile.ZipFile(path) as archive:
        assert re.fullmatch(rb"sha256:[0-9a-f]{64}", archive.comment)
        assert archive.testzip() is None
    content = path.read_bytes()
    original = content[: -len(archive.comment) - 2] + bytes(2)
    assert archive.comment == b"sha256:" + hashlib.sha256(original).hexdigest().encode()
    assert torch.equal(torch.load(path, weights_only=True)["model"]["w"], STATE["model"]["w"])


def test_newest_intact_checkpoint_is_loaded_and_damaged_ones_are_deleted(tmp_path: Path) -> None:
    for step in range(1, 5):
        checkpoint.save(tmp_path, step, STATE, keep=9)
    for step in (3, 4):
        (tmp_path / f"step-{step:09d}.pt").write_bytes(b"damaged")
    messages: list[str] = []
    loaded = checkpoint.load_newest(tmp_path, log=messages.append)
    assert loaded is not None
    assert (loaded[0].name, loaded[1]["step"]) == ("step-000000002.pt", 2)
    assert messages == [
        "step-000000004.pt is damaged (it is not complete); step-000000003.pt is damaged (it is not complete); "
        "using step-000000002.pt"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001.pt", "step-000000002.pt"]
    assert checkpoint.load_newest(tmp_path, before=tmp_path / "step-000000001.pt") is None


def test_replaced_sharded_folder_survives_a_kill_between_the_renames(tmp_path: Path) -> None:
    old = tmp_path / ".step-000000003.sharded.old"
    old.mkdir()
    restore_replaced(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003.sharded"]
    old.mkdir()
    restore_replaced(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003.sharded"]


class CreateFileWhenUnpickled:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("serialisation", ["torch", "pickle", "legacy torch"])
def test_a_checkpoint_that_contains_code_is_refused_without_running_it(tmp_path: Path, serialisation: str) -> None:
    marker, path = tmp_path / "executed", tmp_path / "step-000000001.pt"
    content = {"format": checkpoint.FORMAT, "step": 1, "model": CreateFileWhenUnpickled(marker)}
    if serialisation == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=serialisation == "torch")
    with pytest.raises(VitralError, match="cannot read the checkpoint"):
        checkpoint.load(path)
    assert not marker.exists()
    torch.load(path, weights_only=False) if serialisation != "pickle" else pickle.loads(path.read_bytes())
    assert marker.exists(), "unpickling it does run the code"
