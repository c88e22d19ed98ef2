"""Checkpoints: whole or not there, read without running code, and clear about what is wrong with them."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from vitral.errors import VitralError
from vitral.training import checkpoint

STATE: dict[str, Any] = {"model": {"w": torch.arange(6.0).view(2, 3)}, "best": {"top1": 0.5}, "averaged": None}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, STATE, keep=2)
    assert path == tmp_path / "step-000000007.pt"
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    assert (loaded["step"], loaded["best"], loaded["averaged"]) == (7, {"top1": 0.5}, None)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept_by_step_not_by_age(tmp_path: Path, keep: int) -> None:
    for step in (9, 10, 99, 100, 100_000):
        checkpoint.save(tmp_path, step, STATE, keep=keep)
    left = [int(path.stem.removeprefix("step-")) for path in sorted(tmp_path.iterdir())]
    assert left == [9, 10, 99, 100, 100_000][-keep:]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step-000100000.pt"


def test_an_empty_folder_has_no_newest(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def test_what_a_killed_writer_left_does_not_count_and_is_cleared_away(tmp_path: Path) -> None:
    """A SIGKILL in the middle of writing leaves half a file under a temporary name."""
    (tmp_path / ".step-000000005.pt.12345").write_bytes(b"half")
    (tmp_path / ".best.safetensors.12345").write_bytes(b"half")
    other = tmp_path / "best.safetensors"
    other.write_bytes(b"whole")
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, 6, STATE, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "step-000000006.pt"]


class Full:
    """A file on a full disk: takes some bytes, then no more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: Any) -> int:
        size = len(memoryview(content).cast("B"))
        if size > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        self.file.write(content)
        return size

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 1500])
def test_a_full_disk_leaves_the_checkpoint_before_whole_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    before = checkpoint.save(tmp_path, 1, STATE, keep=1)
    content = before.read_bytes()
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *how: Full(opened(self, *how), room))
    with pytest.raises(VitralError, match=r"cannot save the checkpoint .*step-000000002\.pt: No space left") as caught:
        checkpoint.save(tmp_path, 2, STATE, keep=1)
    monkeypatch.undo()
    assert caught.value.hint == "free some space; the one before is whole: step-000000001.pt"
    assert [path.name for path in tmp_path.iterdir()] == [before.name]
    assert before.read_bytes() == content
    assert checkpoint.load(before)["step"] == 1


def test_the_first_save_on_a_full_disk_says_that_there_is_none_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *how: Full(opened(self, *how), 10))
    with pytest.raises(VitralError) as caught:
        checkpoint.save(tmp_path, 2, STATE, keep=1)
    assert "none was saved before" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_stop_in_the_middle_of_saving_leaves_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint.save(tmp_path, 1, STATE, keep=1)

    def pressed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", pressed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, STATE, keep=1)
    assert list(tmp_path.iterdir()) == [before]


def test_a_folder_that_is_gone_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match=r"cannot save the checkpoint .*No such file"):
        checkpoint.save(tmp_path / "gone", 1, STATE, keep=1)


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_truncated_checkpoint_says_what_to_do(tmp_path: Path, size: int) -> None:
    path = checkpoint.save(tmp_path, 3, STATE, keep=1)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(VitralError, match=r"the checkpoint .*step-000000003\.pt cannot be read") as caught:
        checkpoint.load(path)
    assert caught.value.hint == "delete it to go on from the one before"


@pytest.mark.parametrize("content", [{"format": 99, "step": 1}, {"step": 1}, [1, 2, 3]])
def test_another_format_is_named(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "step-000000001.pt"
    torch.save(content, path)
    found = content.get("format") if isinstance(content, dict) else None
    with pytest.raises(VitralError, match=f"has format {found}; this vitral reads format {checkpoint.FORMAT}"):
        checkpoint.load(path)


class Harmful:
    """Unpickled, it would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("how", ["torch", "pickle", "old torch"])
def test_a_checkpoint_that_would_run_code_is_refused_unrun(tmp_path: Path, how: str) -> None:
    mark, path = tmp_path / "it ran", tmp_path / "step-000000001.pt"
    harm = {"format": checkpoint.FORMAT, "step": 1, "model": Harmful(mark)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(harm))
    else:
        torch.save(harm, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(VitralError, match="cannot be read"):
        checkpoint.load(path)
    assert not mark.exists()
    torch.load(path, weights_only=False) if how != "pickle" else pickle.loads(path.read_bytes())
    assert mark.exists(), "the test's own harm is harmless"
