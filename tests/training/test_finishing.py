"""A run that is killed while its results are written, or at any other moment, is completed by --resume."""

from __future__ import annotations

import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

from support.common import identical
from support.interruption import Moment, run_interrupted
from support.training import TRAIN_COMMAND, error_lines, metrics_without_timing, run_vitral
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.utils.atomic import is_temporary

EXACT_FILES = (
    "recipe.toml", "test.json", "model/config.json", "model/weights.safetensors", "checkpoints/best.safetensors",
    "figures/curves.png", "figures/confusion.png", "figures/attention.png", "figures/attention_overview.png",
    "figures/example.png", "figures/augmented.png",
)  # fmt: skip


# Files, and how many times the process replaces them until it is killed.
FIRST_WRITES = [("recipe.toml", 1), ("environment.json", 1), ("augmented.png", 1), ("metrics.jsonl", 2)]
STEPS = [(f"step-{step:09d}.pt", 1) for step in range(1, 16)]
RESULTS = [
    ("weights.safetensors", 1), ("config.json", 1), ("config.json", 2), ("test.json", 1),
    *((f"{name}.png", 1) for name in ("curves", "confusion", "attention", "attention_overview", "example")),
    ("report.html", 1), ("environment.json", 1),
]  # fmt: skip


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
    run_interrupted(Moment("before", "report.html"), "train", "--resume", trained_run)
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
        when = "before" if (number + chain) % 2 else "after"
        if points[number] == RESULTS[-1]:
            when = "before"  # afterwards the run is finished
        run_interrupted(Moment(when, *points[number]), *continue_command(path))
    run_vitral(*continue_command(path))
    assert_same_run(path, finished_run)
