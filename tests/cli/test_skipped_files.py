"""All commands list the same files of a folder, and name the files that they skip."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.processes import Process
from vitral.cli import main as cli

TIMEOUT_S = 300.0


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Class folders with six images in unusual files, and six entries that are not images."""
    root = tmp_path / "digits"
    elsewhere = tmp_path / "elsewhere"
    for folder in (root / "0", root / "1", elsewhere):
        folder.mkdir(parents=True)
    noise = np.random.default_rng(0)
    for path, format in [
        (root / "0" / "a.jfif", "JPEG"), (root / "0" / "b.jpe", "JPEG"), (root / "0" / "c", "PNG"),
        (root / "1" / "a.png", "PNG"), (root / "1" / "b.data", "WEBP"), (elsewhere / "d.png", "PNG"),
    ]:  # fmt: skip
        Image.fromarray(noise.integers(0, 256, (28, 28), dtype=np.uint8)).save(path, format)
    (root / "1" / "linked").symlink_to(elsewhere)
    (root / "1" / "loop").symlink_to(root)
    (root / "0" / "gone.jpg").symlink_to("nowhere.jpg")
    (root / "0" / "notes.txt").write_text("a note")
    (root / "0" / ".DS_Store").write_bytes(b"x")
    (root / "1" / "phone.heic").write_bytes(b"x")
    os.mkfifo(root / "1" / "pipe.jpg")
    return root


def expected_summary(root: Path) -> str:
    return (
        f"skipped 6 files: 1 hidden ({root}/0/.DS_Store), 1 dangling link ({root}/0/gone.jpg), "
        f"1 folder already listed ({root}/1/loop), 1 named pipe, socket or device ({root}/1/pipe.jpg), "
        f"1 unsupported image format ({root}/1/phone.heic), 1 not an image ({root}/0/notes.txt)"
    )


def exit_status(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code


COMMANDS = {
    "predict": ["predict", "mnist", "DIGITS", "--json"],
    "predict --out": ["predict", "mnist", "DIGITS", "--out", "OUT/predictions.jsonl"],
    "embed": ["embed", "mnist", "DIGITS", "--out", "OUT/features.npy"],
    "explain": ["explain", "mnist", "DIGITS", "--method", "rollout", "--out", "OUT/explained"],
    "figures": ["figures", "mnist", "--images", "DIGITS", "--out", "OUT/figures"],
    "compare": ["compare", "mnist", "mnist", "--data", "DIGITS", "--json"],
    "evaluate": ["evaluate", "mnist", "--data", "DIGITS", "--json"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "figures" else ()) for name in COMMANDS]
)
@pytest.mark.usefixtures("no_figures")
def test_every_command_lists_the_same_images_and_names_what_it_skips(name, digits, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"DIGITS": str(digits)}
    arguments = [names.get(word, word.replace("OUT", str(tmp_path))) for word in COMMANDS[name]]
    assert exit_status(arguments) == 0
    output = capsys.readouterr()
    assert [line.strip() for line in output.err.splitlines() if "skipped" in line] == [expected_summary(digits)]
    if name == "predict":
        files = [json.loads(line)["file"] for line in output.out.splitlines()]
        found = ["0/a.jfif", "0/b.jpe", "0/c", "1/a.png", "1/b.data", "1/linked/d.png"]
        assert files == [str(digits / file) for file in found]
    elif name == "evaluate":
        assert json.loads(output.out)["images"] == 6
    elif name == "embed":
        assert len(np.load(tmp_path / "features.npy")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], pytest.param(["--out", "predictions.csv"], marks=pytest.mark.slow)])
def test_predict_does_not_wait_for_a_named_pipe(arguments, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe = digits / "1" / "pipe.jpg"
    process = Process("predict", "mnist", pipe, digits / "1" / "a.png", *arguments)
    try:
        _, err = process.communicate(TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Traceback" not in err
    if not arguments:
        assert f"error: {pipe}: a named pipe, not a file" in err


def test_folder_without_images_says_what_it_contains(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("a note")
    for command in (["predict", "mnist", str(tmp_path)], ["embed", "mnist", str(tmp_path), "--out", "x.npy"]):
        assert exit_status(command) == 2
        error = capsys.readouterr().err
        assert f"error: no images in {tmp_path}; skipped 1 file: 1 not an image ({tmp_path}/notes.txt)" in error
