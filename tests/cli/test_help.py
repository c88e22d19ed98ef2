"""Help: complete, fast, and without importing torch."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from vitral.cli import main as cli
from vitral.cli.completion import leaf_commands
from vitral.cli.parsing import CommandGroup

COMMAND_LINES = ["--help", *(f"{name} --help" for name in cli.COMMANDS)]


def test_help_lists_every_command_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    printed = capsys.readouterr().out
    assert "usage: vitral COMMAND" in printed
    for task in cli.COMMAND_GROUPS:
        assert f"\n\n{task}\n" in printed
    for name in cli.COMMANDS:
        assert f"\n  {name}" in printed


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert printed.startswith(f"usage: vitral {name}")
    assert "(default: None)" not in printed
    assert max(map(len, printed.splitlines())) <= 110


@pytest.mark.parametrize("command", list(leaf_commands()), ids=lambda command: command.name)
def test_every_flag_is_described(command) -> None:
    assert command.args.__doc__
    assert [flag.name for flag in command.flags if not flag.help] == []


@pytest.mark.parametrize("command", list(leaf_commands()), ids=lambda command: command.name)
def test_flag_names_are_unique(command) -> None:
    names = [
        name for flag in command.flags for name in {flag.name, flag.negative_name if flag.is_switch else flag.name}
    ]
    assert len(names) == len(set(names))


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [cli.load_command(name) for name in cli.COMMANDS]
    for group in groups:
        if isinstance(group, CommandGroup):
            for name in group.commands:
                with pytest.raises(SystemExit) as stop:
                    group([name, "--help"])
                assert stop.value.code == 0
                assert capsys.readouterr().out.startswith(f"usage: vitral {group.name} {name}")


def test_help_imports_no_torch() -> None:
    """In one process: a module that is None in sys.modules cannot be imported, however often it is tried."""
    code = """
import sys
for name in ("torch", "numpy", "rich", "matplotlib", "PIL"):
    sys.modules[name] = None
from vitral.cli.main import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as stop:
        assert not stop.code, line
"""
    done = subprocess.run([sys.executable, "-c", code, *COMMAND_LINES], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    for name in cli.COMMANDS:
        assert f"usage: vitral {name}" in done.stdout


@pytest.mark.parametrize(
    ("line", "limit"),
    [("--help", 0.3), ("train --help", 0.45), pytest.param("predict --help", 0.3, marks=pytest.mark.slow)],
)
def test_help_takes_a_fraction_of_a_second(line: str, limit: float) -> None:
    """The least CPU time of five runs. On a slow or busy machine, Python with a few of its modules is the measure.

    The 170 flags of `vitral train` are read from the source of 14 modules.
    """
    modules = "import dataclasses, inspect, pathlib, shutil, textwrap, tomllib, typing"
    seconds = [(cpu_seconds("-m", "vitral", *line.split()), cpu_seconds("-c", modules)) for _ in range(5)]
    help_seconds, python_seconds = map(min, zip(*seconds, strict=True))
    assert help_seconds < limit * max(1.0, python_seconds / 0.075)


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
