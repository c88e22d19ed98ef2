"""Runs that cannot be resumed as requested: each error names the problem and what to do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from support.common import Fit
from support.training import TRAIN_COMMAND, RaiseSigint, error_lines, run_vitral, weight_bytes
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


def test_a_finished_run_is_refused(reference_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = weight_bytes(reference_run.path)
    run_vitral("train", "--resume", reference_run.path, expect=2)
    assert error_lines(capsys) == [
        f"error: {reference_run} is finished",
        f"       Evaluate it with: vitral evaluate {reference_run}",
    ]
    assert weight_bytes(reference_run.path) == before


def test_a_run_that_only_lacks_its_evaluation_is_completed(unfinished_run: Path, reference_run: Run) -> None:
    run_vitral("train", "--resume", unfinished_run)
    assert weight_bytes(unfinished_run) == weight_bytes(reference_run.path)
    assert (unfinished_run / "test.json").read_bytes() == reference_run.test_file.read_bytes()


# Damaged checkpoints


def test_a_corrupt_checkpoint_can_be_deleted_to_resume_from_the_previous_one(
    unfinished_run: Path, reference_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = newest_checkpoint(unfinished_run)
    newest.write_bytes(newest.read_bytes()[:1000])
    run_vitral("train", "--resume", unfinished_run, expect=2)
    first, second = error_lines(capsys)
    assert f"cannot read the checkpoint {newest}" in first
    assert second.strip() == "Delete it to resume from the previous one"
    newest.unlink()
    run_vitral("train", "--resume", unfinished_run)
    assert weight_bytes(unfinished_run) == weight_bytes(reference_run.path)
    assert "Resuming after step 14 of 15\n" in capsys.readouterr().out


def test_a_checkpoint_of_another_format_is_refused(unfinished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = newest_checkpoint(unfinished_run)
    torch.save(checkpoint.load(newest) | {"format": 99}, newest)
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
    run_vitral("train", "--resume", unfinished_run, expect=2)
    first, _ = error_lines(capsys)
    assert "cannot read the checkpoint" in first
    assert "step-999999999.pt" in first
    assert not marker.exists()


def test_a_checkpoint_without_optimizer_state_is_refused(stopped_run: Path, train_tiny: Fit) -> None:
    newest = newest_checkpoint(stopped_run)
    torch.save({name: value for name, value in checkpoint.load(newest).items() if name != "optimizers"}, newest)
    with pytest.raises(VitralError, match="does not match"):
        train_tiny("stopped")


def test_missing_best_weights_are_reported(unfinished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (unfinished_run / "checkpoints" / "best.safetensors").unlink()
    run_vitral("train", "--resume", unfinished_run, expect=2)
    assert "best.safetensors" in error_lines(capsys)[0]


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
    assert content["recipe"]["model"].pop("gelu") == "exact"
    torch.save(content, newest)
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
