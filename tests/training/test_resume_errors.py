"""Runs that cannot be resumed as requested: each error names the problem and what to do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.common import Fit
from support.training import (
    TRAIN_COMMAND,
    RaiseSigint,
    error_lines,
    rewrite_checkpoint,
    run_vitral,
    weight_bytes,
)
from vitral import api
from vitral.errors import Interrupted, VitralError
from vitral.runs.run import Run
from vitral.training import checkpoint

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture
def stopped_run(train_tiny: Fit, tmp_path: Path) -> Path:
    """A run that was interrupted in its second epoch."""
    with pytest.raises(Interrupted):
        train_tiny("stopped", RaiseSigint(9))
    return tmp_path / "stopped"


def newest_checkpoint(path: Path) -> Path:
    newest = checkpoint.newest(path / "checkpoints")
    assert newest is not None
    return newest


# Models and runs that are missing


def test_predicting_with_an_unfinished_run_names_the_resume_command(
    stopped_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    run_vitral("predict", stopped_run, tmp_path / "x.png", expect=2)
    assert error_lines(capsys) == [
        f"error: {stopped_run} has no trained model; training stopped during epoch 2",
        f"       Resume it with: vitral train --resume {stopped_run}",
    ]


@pytest.mark.parametrize("command", ["predict", "evaluate", "train --resume"])
def test_a_missing_run_suggests_existing_ones(
    command: str, reference_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = reference_run.path.parent / "rnu"
    run_vitral(*command.split(), missing, *(["x.png"] if command == "predict" else []), expect=2)
    first, second = error_lines(capsys)
    assert "no run" in first
    assert str(missing) in first
    assert second.strip() == f"Newest runs: {reference_run}"


def test_resuming_a_finished_run_changes_nothing(reference_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in reference_run.path.rglob("*")}
    run_vitral("train", "--resume", reference_run.path)
    assert capsys.readouterr().out.splitlines() == [
        f"{reference_run} is finished; nothing was changed.",
        f"Evaluate it with: vitral evaluate {reference_run}",
        f"Train for longer in a new run: vitral train --recipe {reference_run.recipe_file} --epochs 6",
    ]
    assert api.train(resume=reference_run.path).path == reference_run.path
    assert {path: path.stat().st_mtime_ns for path in reference_run.path.rglob("*")} == before


def test_a_run_that_only_lacks_its_evaluation_is_completed(unfinished_run: Path, reference_run: Run) -> None:
    run_vitral("train", "--resume", unfinished_run)
    assert weight_bytes(unfinished_run) == weight_bytes(reference_run.path)
    assert (unfinished_run / "test.json").read_bytes() == reference_run.test_file.read_bytes()


# Damaged checkpoints


def flip_bit(path: Path, position: float) -> None:
    """Flip one bit at a fraction of the file."""
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1 << 4
    path.write_bytes(content)


def test_damaged_newest_checkpoint_is_replaced_by_the_one_before(
    unfinished_run: Path, reference_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(newest_checkpoint(unfinished_run), 0.4)
    run_vitral("train", "--resume", unfinished_run)
    out = " ".join(capsys.readouterr().out.split())
    assert "step-000000015.pt is damaged (its SHA-256 does not match); using step-000000014.pt" in out
    assert "Resuming after step 14 of 15" in out
    assert weight_bytes(unfinished_run) == weight_bytes(reference_run.path)


def test_without_an_intact_checkpoint_resuming_is_refused_and_deletes_nothing(
    unfinished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unfinished_run / "checkpoints"
    flip_bit(folder / "step-000000014.pt", 0.5)
    (folder / "step-000000015.pt").write_bytes(b"")
    run_vitral("train", "--resume", unfinished_run, expect=2)
    assert error_lines(capsys) == [
        f"error: no checkpoint in {folder} can be used: step-000000015.pt is damaged (it is not complete); "
        "step-000000014.pt is damaged (its SHA-256 does not match)",
        f"       Restore one from a backup, or start again: vitral train --recipe {unfinished_run / 'recipe.toml'}",
    ]
    assert sorted(path.name for path in folder.glob("*.pt")) == ["step-000000014.pt", "step-000000015.pt"]


def test_a_checkpoint_of_another_format_is_refused(unfinished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = newest_checkpoint(unfinished_run)
    rewrite_checkpoint(newest, checkpoint.load(newest) | {"format": 99})
    run_vitral("train", "--resume", unfinished_run, expect=2)
    first, second = error_lines(capsys)
    assert f"{newest} has format 99; this version of vitral reads format {checkpoint.FORMAT}" in first
    assert "version of vitral that wrote it" in second


class CreateFileWhenUnpickled:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_checkpoint_that_contains_code_is_refused_without_running_it(
    unfinished_run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    malicious = pickle.dumps(CreateFileWhenUnpickled(marker))
    (unfinished_run / "checkpoints" / "step-999999999.pt").write_bytes(malicious)
    run_vitral("train", "--resume", unfinished_run)
    assert "step-999999999.pt is damaged" in capsys.readouterr().out
    assert not marker.exists()


def test_a_checkpoint_without_optimizer_state_is_refused(stopped_run: Path, train_tiny: Fit) -> None:
    newest = newest_checkpoint(stopped_run)
    content = checkpoint.load(newest)
    del content["optimizers"]
    rewrite_checkpoint(newest, content)
    with pytest.raises(VitralError, match="does not match"):
        train_tiny("stopped")


@pytest.mark.parametrize(
    "damage", [pytest.param("missing", marks=pytest.mark.slow), "damaged: its SHA-256 does not match"]
)
def test_damaged_best_weights_are_computed_again_from_a_checkpoint_before_their_epoch(
    damage: str, unfinished_run: Path, reference_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unfinished_run / "checkpoints"
    best = folder / "best.safetensors"
    best.unlink() if damage == "missing" else flip_bit(best, 0.9)
    newest = newest_checkpoint(unfinished_run)
    older = newest.with_name("step-000000014.pt")
    assert checkpoint.load(older)["best"]["epoch"] < checkpoint.load(newest)["best"]["epoch"]
    backup = older.read_bytes()
    older.unlink()
    run_vitral("train", "--resume", unfinished_run, expect=2)
    message = f"step-000000015.pt needs best.safetensors, which is {damage}"
    assert error_lines(capsys)[0] == f"error: no checkpoint in {folder} can be used: {message}"
    older.write_bytes(backup)
    run_vitral("train", "--resume", unfinished_run)
    assert f"{message}; using step-000000014.pt" in " ".join(capsys.readouterr().out.split())
    assert weight_bytes(unfinished_run) == weight_bytes(reference_run.path)


# Changed recipes, data and settings


@pytest.mark.parametrize(
    "overrides",
    [{"model.width": 32}, {"optim.name": "muon"}, {"ema": 0.5}, {"optim.name": "sgd", "model.depth": 1}],
    ids=str,
)
def test_a_changed_recipe_does_not_match_the_checkpoint(
    stopped_run: Path, train_tiny: Fit, overrides: dict[str, Any]
) -> None:
    with pytest.raises(VitralError, match="does not match") as error:
        train_tiny("stopped", **overrides)
    assert str(newest_checkpoint(stopped_run)) in error.value.what
    assert "recipe.toml" in error.value.what


def test_recipe_fields_added_after_the_checkpoint_count_as_defaults(stopped_run: Path, train_tiny: Fit) -> None:
    newest = newest_checkpoint(stopped_run)
    content = checkpoint.load(newest)
    assert content["recipe"]["augment"].pop("jitter") == 0
    assert content["recipe"]["model"].pop("activation") == "gelu"
    rewrite_checkpoint(newest, content)
    assert train_tiny("stopped").has_model


def test_resuming_with_changed_data_is_refused(unfinished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = unfinished_run / "environment.json"
    environment = json.loads(file.read_text())
    environment["data"]["fingerprint"] = "feedfeedfeedfeed"
    file.write_text(json.dumps(environment))
    run_vitral("train", "--resume", unfinished_run, expect=2)
    first, second = error_lines(capsys)
    assert "digits has changed since this run started" in first
    assert "feedfeedfeedfeed" in first
    assert "Restore the data, or start a new run" in second
    assert not (unfinished_run / "model").exists()


def test_fields_that_do_not_affect_the_result_may_change(unfinished_run: Path, reference_run: Run) -> None:
    (unfinished_run / "checkpoints" / "step-000000015.pt").unlink()
    flags = ["--keep-checkpoints", "1", "--checkpoint-minutes", "99", "--grad-accum", "3"]
    run_vitral("train", "--resume", unfinished_run, *flags)
    assert weight_bytes(unfinished_run) == weight_bytes(reference_run.path)
    assert len(list((unfinished_run / "checkpoints").glob("*.pt"))) == 1


@pytest.mark.parametrize("words", [["digits"], ["--epochs", "9"], ["--out", "elsewhere"]], ids=str)
def test_other_settings_are_refused_by_the_command(
    unfinished_run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_vitral("train", "--resume", unfinished_run, *words, expect=2)
    assert "when a run is resumed" in error_lines(capsys)[0]
    assert not (unfinished_run / "model").exists()


@pytest.mark.parametrize("arguments", [{"data": "digits"}, {"recipe": "digits"}, {"out": "elsewhere"}, {"epochs": 9}])
def test_other_settings_are_refused_by_the_api(unfinished_run: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(VitralError, match=r"resumed run|run is resumed"):
        api.train(resume=unfinished_run, **arguments)


def test_an_invalid_recipe_file_is_named(unfinished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (unfinished_run / "recipe.toml").write_text("epochs = [")
    run_vitral("train", "--resume", unfinished_run, expect=2)
    assert f"{unfinished_run / 'recipe.toml'} is not valid TOML" in error_lines(capsys)[0]


def test_a_non_empty_out_folder_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    run_vitral(*TRAIN_COMMAND, "--out", tmp_path / "full", expect=2)
    first, second = error_lines(capsys)
    assert f"{tmp_path / 'full'} already exists and is not empty" in first
    assert "--out" in second
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
