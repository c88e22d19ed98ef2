"""The run folder: created, opened, locked, and complete enough to repeat a training."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import Fit, skip_figures
from vitral import __version__, api
from vitral.errors import VitralError
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training.provenance import format_command
from vitral.utils.atomic import atomic_write

TINY: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 256,
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "device": "cpu",
}


def test_new_run_is_named_after_its_recipe_and_the_date(tmp_path: Path) -> None:
    names = {Run.create(tmp_path, "mnist").path.name for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch(r"mnist-\d{4}-[0-9a-f]{4}", name) for name in names)


def test_run_is_created_in_an_explicit_folder(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "mnist", tmp_path / "parent" / "run")
    assert run.path == tmp_path / "parent" / "run"
    assert run.checkpoint_dir.is_dir()
    assert run.figure_dir.is_dir()
    assert (str(run), os.fspath(run)) == (str(run.path), str(run.path))
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path, "mnist", tmp_path / "empty").path == tmp_path / "empty"


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("content")
    with pytest.raises(VitralError, match="already exists and is not empty") as error:
        Run.create(tmp_path, "mnist", tmp_path)
    assert "--out" in error.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(VitralError, match="is a file, but a run is a folder"):
        Run.create(tmp_path, "mnist", tmp_path / "notes.txt")
    with pytest.raises(VitralError, match="cannot create the run folder"):
        Run.create(tmp_path, "mnist", tmp_path / "notes.txt" / "run")
    assert (tmp_path / "notes.txt").read_text() == "content"


def test_run_opens_by_its_path(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path, "tiny")
    atomic_write(run.recipe_file, recipe.to_toml())
    assert Run.open(str(run.path)).path == run.path
    assert not Run.open(run.path).has_model
    assert Run.open(run.path).load_metrics() == []


def test_missing_run_suggests_the_newest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitralError, match="no run folder runs/mnist-1") as error:
        Run.open("runs/mnist-1")
    assert "vitral train" in error.value.hint
    for age, name in enumerate(["d", "c", "b", "a"]):
        run = Run.create(Path("runs"), name, Path("runs") / name)
        atomic_write(run.recipe_file, recipe.to_toml())
        os.utime(run.recipe_file.parent, (10**9 + age, 10**9 + age))
    for missing in ("runs/e", "an/other/folder"):
        for open_folder in (Run.open, load_model):
            with pytest.raises(VitralError) as error:
                open_folder(missing)
            assert error.value.hint == "Newest runs: runs/a, runs/b, runs/c"
    with pytest.raises(VitralError, match="is not a run folder") as error:
        Run.open("runs")
    assert "runs/a" in error.value.hint
    with pytest.raises(VitralError, match="runs contains neither a run nor a model") as error:
        api.load("runs")
    assert error.value.hint == "Newest runs: runs/a, runs/b, runs/c"
    older = Run.create(Path("other"), "old", Path("other/old"))  # does not hide the newer ones
    atomic_write(older.recipe_file, recipe.to_toml())
    os.utime(older.path, (10**9, 10**9))
    with pytest.raises(VitralError, match="no run folder") as error:
        Run.open("other/absent")
    assert error.value.hint == "Newest runs: runs/a, runs/b, runs/c"


def test_run_folder_of_format_1_is_refused_in_two_lines(tmp_path: Path) -> None:
    """Its recipe.toml and environment.json as vitral 0.1.0 wrote them, without a format."""
    (tmp_path / "recipe.toml").write_text('name = "mnist"\nbatch = 128\naccumulate = 1\n')
    (tmp_path / "environment.json").write_text(json.dumps({"vitral": "0.1.0", "processes": 1, "parallel": "alone"}))
    for open_run in (Run.open, lambda path: api.train(resume=path)):
        with pytest.raises(VitralError) as error:
            open_run(tmp_path)
        assert str(error.value) == (
            f"{tmp_path} has format 1 (written by vitral 0.1.0); this version of vitral reads format 2\n"
            "Train again, or use the version of vitral that wrote it"
        )


def test_metrics_skip_a_truncated_line(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "tiny")
    run.write_metrics([{"epoch": 1}, {"epoch": 2}])
    run.metrics_file.write_bytes(run.metrics_file.read_bytes() + b'{"epoch": 3, "name": "\xc3')
    assert run.load_metrics() == [{"epoch": 1}, {"epoch": 2}]


@pytest.fixture
def unreadable_run(train_tiny: Fit) -> Iterator[Path]:
    """A finished run without read permission, also if the tests run as root."""
    path = train_tiny(epochs=1).path
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield path
    finally:
        if user == 0:
            os.seteuid(0)
        path.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="requires POSIX permissions")
def test_folder_without_permission_is_named(unreadable_run: Path) -> None:
    for open_folder in (Run.open, load_model):
        with pytest.raises(VitralError, match=r"cannot read .*: Permission denied") as error:
            open_folder(unreadable_run)
        assert str(unreadable_run) in error.value.what
    for out in (unreadable_run / "new", unreadable_run):
        with pytest.raises(VitralError, match=r"cannot .*: Permission denied"):
            Run.create(unreadable_run, "x", out)


def test_training_writes_the_documented_files(tmp_path: Path) -> None:
    api.train("digits", out=tmp_path / "run", **TINY)
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files >= {
        "recipe.toml", "environment.json", "metrics.jsonl", "test.json", "report.html", "model/config.json",
        "model/weights.safetensors", "checkpoints/best.safetensors", "checkpoints/step-000000005.pt",
        "checkpoints/step-000000010.pt", "figures/curves.png", "figures/confusion.png",
        "figures/attention.png",
    }  # fmt: skip
    assert not any(Path(name).name.startswith(".") for name in files), "locks and temporary files are deleted"
    assert (tmp_path / "run" / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "run" / "test.json").read_text())["images"] == 359


def test_environment_records_versions_hardware_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    api.train("digits", out=tmp_path / "run", **TINY | {"epochs": 1})
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["format"], environment["vitral"]) == (2, __version__)
    assert environment["torch"] == torch.__version__
    assert environment["python"].startswith("3.")
    assert environment["threads"] == torch.get_num_threads()
    assert (environment["seed"], environment["precision"], environment["compile"]) == (0, "fp32", False)
    assert environment["reasons"]["device"] == "--device cpu"
    assert environment.keys() >= {"platform", "hardware", "git", "command"}
    assert environment["data"]["name"] == "digits"
    assert re.fullmatch(r"[0-9a-f]{16}", environment["data"]["fingerprint"])


def test_recorded_command_can_be_typed_by_others() -> None:
    for program in ("/home/me/.venv/bin/vitral", "/opt/src/vitral/__main__.py"):
        assert format_command([program, "train", "my photos"]) == "vitral train 'my photos'"
    assert format_command(["script.py", "train"]) == "script.py train"


def test_recipe_of_a_run_repeats_it_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch)
    overrides = TINY | {"seed": 5, "model.dropout": 0.1, "augment.cutmix": 1.0}
    api.train("digits", out=tmp_path / "one", **overrides)
    first = Run.open(tmp_path / "one")
    predictor = api.train(recipe=first.recipe_file, out=tmp_path / "two")
    second = Run.open(tmp_path / "two")
    assert first.recipe_file.read_bytes() == second.recipe_file.read_bytes()
    names = ("model/weights.safetensors", "model/config.json", "test.json")
    assert all((first.path / name).read_bytes() == (second.path / name).read_bytes() for name in names)
    assert read_recipe(second.recipe_file).data.mean is not None
    assert predictor.model_config.trained_on == "digits"


def test_lock_prevents_a_second_training_in_the_same_folder(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "x", tmp_path / "run")
    with run.lock(), pytest.raises(VitralError, match="another process is training in"), Run(run.path).lock():
        pass
    with run.lock():
        assert (run.checkpoint_dir / ".lock").exists()
    assert list(run.checkpoint_dir.iterdir()) == []
