"""Completion scripts complete commands, subcommands, flags and values in a real shell."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vitral.cli.completion import completion_script, flag_names, leaf_commands

COMPLETIONS = [
    ("vitral trai", "train"),
    ("vitral train --epo", "--epochs"),
    ("vitral train --optim.sche", "--optim.schedule"),
    ("vitral train --optim.schedule cos", "cosine"),
    ("vitral train --augment.no-fl", "--augment.no-flip"),
    ("vitral probe --no-fi", "--no-fine-tuning"),
    ("vitral data pac", "pack"),
    ("vitral data pack --image-s", "--image-size"),
    ("vitral predict photo.", "photo.png"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one image and the scripts of the three shells."""
    path = tmp_path_factory.mktemp("completion")
    (path / "photo.png").touch()
    for shell in ("bash", "zsh", "fish"):
        (path / f"vitral.{shell}").write_text(completion_script(shell))
    return path


def complete_in_bash(line: str, folder: Path) -> list[str]:
    words = line.split()
    script = (
        f"source vitral.bash; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _vitral; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True, timeout=240)
    return done.stdout.split()


def complete_in_fish(line: str, folder: Path) -> list[str]:
    script = f"source vitral.fish; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], cwd=folder, capture_output=True, text=True, check=True, timeout=240
    )
    return [candidate.split("\t")[0] for candidate in done.stdout.splitlines()]


def complete_in_zsh(line: str, folder: Path) -> list[str]:
    """Complete in an interactive shell, which writes the completed line to a file."""
    (folder / "completed").unlink(missing_ok=True)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ["TERM"] = "dumb"
        os.execvp("zsh", ["zsh", "-f", "-i"])
    set_up = (
        "autoload -Uz compinit; compinit -u -D; source vitral.zsh; "
        "finish() { zle complete-word; print -r -- $BUFFER > writing; mv writing completed }; "
        "zle -N finish; bindkey '^T' finish; print REA''DY\n"
    )
    try:
        os.write(terminal, set_up.encode())
        wait_for(lambda: "READY" in read_available(terminal))
        os.write(terminal, f"{line}\x14".encode())
        wait_for(lambda: read_available(terminal) is not None and (folder / "completed").exists())
        return (folder / "completed").read_text().split()
    finally:
        os.close(terminal)  # hangs up, which ends the shell
        os.waitpid(child, 0)


def read_available(terminal: int) -> str:
    readable = select.select([terminal], [], [], 0.1)[0]
    return os.read(terminal, 65536).decode(errors="replace") if readable else ""


def wait_for(condition: Callable[[], bool], timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline


SHELLS = {"bash": complete_in_bash, "zsh": complete_in_zsh, "fish": complete_in_fish}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_no_syntax_errors(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(folder / f"vitral.{shell}")], check=True, timeout=240)


@pytest.mark.parametrize(("line", "expected"), COMPLETIONS)
@pytest.mark.parametrize("shell", list(SHELLS))
def test_completion_in_a_real_shell(shell: str, line: str, expected: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert expected in SHELLS[shell](line, folder)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_contain_every_flag(shell: str, folder: Path) -> None:
    script = (folder / f"vitral.{shell}").read_text()
    for command in leaf_commands():
        for name in flag_names(command):
            if name != "--help":
                assert (f" -l {name.removeprefix('--')} " if shell == "fish" else name) in script, command.name
