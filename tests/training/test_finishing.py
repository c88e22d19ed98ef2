"""A run that is killed while its results are written, or at any other moment, is completed by --resume."""

from __future__ import annotations

import re
import resource
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support.common import identical
from support.processes import Process
from support.training import TRAIN_COMMAND, error_lines, metrics_without_timing, run_vitral
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.utils.atomic import is_temporary

# Runs a vitral command and kills it before or after the Nth time that it replaces the file with this name.
KILLED_COMMAND = """
import os, signal, sys
from pathlib import Path
from vitral.cli import main

moment, name, occurrence, *words = sys.argv[1:]
real_replace, remaining = Path.replace, int(occurrence)

def replace(self, target):
    global remaining
    remaining -= Path(target).name == name
    is_due = remaining == 0 and Path(target).name == name
    if is_due and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = real_replace(self, target)
    if is_due:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

Path.replace = replace
main.main(words)
"""
EXACT_FILES = (
    "recipe.toml", "test.json", "model/config.json", "model/weights.safetensors", "checkpoints/best.safetensors",
    "figures/curves.png", "figures/confusion.png", "figures/attention.png", "figures/attention_overview.png",
    "figures/example.png", "figures/augmented.png",
)  # fmt: skip


class KillPoint(NamedTuple):
    """Kill when a file is replaced for the Nth time by the process."""

    name: str
    occurrence: int = 1


FIRST_WRITES = [
    KillPoint("recipe.toml"), KillPoint("environment.json"), KillPoint("augmented.png"), KillPoint("metrics.jsonl", 2),
]  # fmt: skip
STEPS = [KillPoint(f"step-{step:09d}.pt") for step in range(1, 16)]
RESULTS = [
    KillPoint("weights.safetensors"), KillPoint("config.json"), KillPoint("config.json", 2), KillPoint("test.json"),
    *(KillPoint(f"{name}.png") for name in ("curves", "confusion", "attention", "attention_overview", "example")),
    KillPoint("report.html"), KillPoint("environment.json"),
]  # fmt: skip


def kill_command(folder: Path, point: KillPoint, moment: str, *words: str | Path) -> None:
    """Run a vitral command that kills itself with SIGKILL."""
    script = folder / "killed.py"
    script.write_text(KILLED_COMMAND)
    process = Process(moment, point.name, point.occurrence, *words, script=script)
    output = process.communicate()
    assert process.returncode == -signal.SIGKILL, (point, moment, *output)


def continue_command(path: Path) -> list[str | Path]:
    """The command after a kill: the first one again if there is nothing to resume yet."""
    return ["train", "--resume", path] if (path / "recipe.toml").exists() else [*TRAIN_COMMAND, "--out", path]


def file_names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def report_without_timing(path: Path) -> str:
    """The report without the durations and the time at which it was written."""
    text = (path / "report.html").read_text().replace(str(path), "RUN")
    return re.sub(r"\d+ s\b|\d{4}-\d\d-\d\d \d\d:\d\d|[\d,]+ images/s", "", text)


def assert_same_run(path: Path, reference: Path) -> None:
    assert file_names(path) == file_names(reference), "no file is missing, and no temporary or lock file is left"
    for name in EXACT_FILES:
        assert (path / name).read_bytes() == (reference / name).read_bytes(), name
    assert metrics_without_timing(Run(path)) == metrics_without_timing(Run(reference))
    assert Run(path).is_finished
    for file in (reference / "checkpoints").glob("step-*.pt"):
        expected, actual = checkpoint.load(file), checkpoint.load(path / "checkpoints" / file.name)
        assert identical(expected["model"], actual["model"])
        assert torch.equal(expected["augment_rng"], actual["augment_rng"])
        assert (expected["step"], expected["best"]) == (actual["step"], actual["best"])


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of TRAIN_COMMAND with figures and report, never interrupted."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run_vitral(*TRAIN_COMMAND, "--out", path)
    return path


@pytest.fixture
def trained_run(tmp_path: Path, finished_run: Path) -> Path:
    """A copy of the finished run as it was after its last step: without model and results."""
    path = tmp_path / "run"
    shutil.copytree(finished_run, path)
    Run(path).write_environment({k: v for k, v in Run(path).load_environment().items() if k != "finished"})
    for name in ("model", "figures"):
        shutil.rmtree(path / name)
    (path / "figures").mkdir()
    (path / "test.json").unlink()
    (path / "report.html").unlink()
    return path


@pytest.mark.slow
def test_run_killed_while_its_results_are_written_is_completed_by_resume(trained_run: Path, finished_run: Path) -> None:
    kill_command(trained_run.parent, KillPoint("report.html"), "before", "train", "--resume", trained_run)
    assert not Run(trained_run).is_finished
    assert [path for path in trained_run.rglob("*") if is_temporary(path)], "the killed process was writing"
    run_vitral("train", "--resume", trained_run)
    assert_same_run(trained_run, finished_run)
    assert report_without_timing(trained_run) == report_without_timing(finished_run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test.json", "figures/curves.png", "report.html"])
def test_full_disk_while_results_are_written_keeps_what_is_there(
    trained_run: Path, finished_run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    size = (finished_run / name).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))  # the system refuses to write larger files
    try:
        run_vitral("train", "--resume", trained_run, expect=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    first, second = error_lines(capsys)
    assert "cannot write" in first
    assert "File too large" in first
    assert "Free some disk space" in second
    assert not Run(trained_run).is_finished
    assert not list(trained_run.rglob(".*")), "no temporary files, no lock"
    assert not (trained_run / name).exists()
    run_vitral("train", "--resume", trained_run)
    assert_same_run(trained_run, finished_run)


@pytest.mark.slow
def test_ctrl_c_while_results_are_written_names_the_resume_command(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitral.reporting.run_report.write_figures", interrupt)
    run_vitral("train", "--resume", trained_run, expect=130)
    assert capsys.readouterr().err.splitlines() == [
        "stopped after the training, before its results were complete",
        f"Complete them with: vitral train --resume {trained_run}",
    ]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("chain", range(5))
def test_resume_is_bit_exact_after_thirty_kills_over_the_whole_run(
    tmp_path: Path, finished_run: Path, chain: int
) -> None:
    """Thirty kills, from the first file to the last; each of five runs survives six of them."""
    points = FIRST_WRITES + STEPS + RESULTS
    assert len(points) == 30
    path = tmp_path / "run"
    for number in range(chain, len(points), 5):
        moment = "before" if (number + chain) % 2 else "after"
        if points[number].name == "environment.json" and number > 3:
            moment = "before"  # afterwards the run is finished
        kill_command(tmp_path, points[number], moment, *continue_command(path))
    run_vitral(*continue_command(path))
    assert_same_run(path, finished_run)
