"""Every command and code block of the README runs, with a smaller dataset and fewer epochs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import httpx
import pytest

from support.served import server
from vitral.cli import main as cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`(vitral [^`]+)`", README)
SLOW_COMMANDS = {  # these have other tests
    "vitral evaluate runs/mine --max-error 0.01 --ood folder/ --robustness",
    "vitral explorer --out site",
    "vitral export runs/mine --to onnx",
    "vitral figures runs/mine",
    "vitral report runs/mine",
    "vitral train digits --epochs 20 --optim.lr 3e-3 --model.depth 6",
    "vitral train photos/ --folds 3",
}
SMALL_MODEL = ["--model.width", "32", "--model.heads", "2"]  # for training from scratch
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def faster(command: str) -> list[str]:
    """The command's arguments, with a smaller dataset and fewer epochs."""
    words = shlex.split(command)[1:]
    if words[0] == "train" and "--resume" not in words:
        words = ["digits" if word == "mnist" else word for word in words] + ["--epochs", "1"]
        words += [] if "--init-from" in words else SMALL_MODEL
    if words[0] == "pretrain":
        words += ["--epochs", "1", "--batch-size", "4", "--views.local-views", "0"]
    if words[0] == "distill":
        words += ["--epochs", "1", "--batch-size", "4", *SMALL_MODEL]
    if words[0] == "bench":
        words += ["--seconds", "0.01", "--batch-sizes", "1", "--threads", "1", "--images", "64"]
    return words


def test_the_readme_mentions_every_command():
    mentioned = {command.split()[1] for command in COMMANDS} | {"demo"}
    assert mentioned == set(cli.COMMANDS)


SKIPPED = [command for command in COMMANDS if "--resume" in command or command.split()[1] == "serve"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] * (command in SLOW_COMMANDS))
        for command in COMMANDS
        if command not in SKIPPED and "photo.png`" not in command
    ],
)
def test_the_command_works(reader_folder, monkeypatch, request, capsys, command):
    monkeypatch.chdir(reader_folder)
    monkeypatch.setattr("vitral.doctor.estimates.BENCHMARK_SECONDS", 0.0)
    monkeypatch.setattr("vitral.doctor.estimates.CPU_BENCHMARK_BATCH", 2)
    if command != "vitral train mnist":  # one of the training commands writes its figures
        request.getfixturevalue("no_figures")
    with pytest.raises(SystemExit) as stop:
        cli.main(faster(command))
    printed = capsys.readouterr()
    assert not stop.value.code, printed.err
    assert printed.out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] == "serve"])
def test_the_serve_command_starts_a_server(reader_folder, monkeypatch, command):
    monkeypatch.chdir(reader_folder)
    with server(*shlex.split(command)[2:]) as running:
        models = httpx.get(f"{running.url}/v1/models").json()["models"]
        assert models[0]["name"] == Path(command.split()[2]).name


@pytest.mark.slow
def test_the_resume_command_continues_a_run(reader_folder, monkeypatch, no_figures):
    (command,) = [c for c in COMMANDS if "--resume" in c]
    run = reader_folder / "runs" / "mine"
    (run / "test.json").unlink(missing_ok=True)
    (run / "model" / "config.json").unlink(missing_ok=True)
    monkeypatch.chdir(reader_folder)
    with pytest.raises(SystemExit) as stop:
        cli.main(faster(command))
    assert not stop.value.code
    assert (run / "model" / "config.json").is_file()


@pytest.mark.parametrize("block", PYTHON)
def test_the_python_code_runs(reader_folder, monkeypatch, no_figures, block):
    monkeypatch.chdir(reader_folder)
    exec(compile(block.replace("epochs=20", "epochs=1"), "README.md", "exec"), {})


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_every_link_exists():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
