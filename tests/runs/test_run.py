"""The run folder and the portable model in it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.common import Fit, identical
from vitral import __version__
from vitral import api as workshop
from vitral import api_train as making
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs import run
from vitral.runs.run import ModelCard, Run, load_model, load_weights, save_model, save_weights, write_atomically
from vitral.training.provenance import typed

TINY: dict[str, Any] = {
    "epochs": 2,
    "batch": 256,
    "model.width": 16,
    "model.depth": 1,
    "model.heads": 2,
    "device": "cpu",
}


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_written_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    write_atomically(path, "grün")
    write_atomically(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_old_content_survives_a_failing_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "note.txt"
    write_atomically(path, "old")

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(VitralError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write_atomically(path, "new")
    if isinstance(caught.value, VitralError):
        assert caught.value.what == f"cannot write {path}: No space left on device"
        assert caught.value.hint == "free some space; what was saved before is whole"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_weights_survive_a_failing_write_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(path, {"w": torch.ones(3)})

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(VitralError, match=r"cannot write .*weights\.safetensors: No space left"):
        save_weights(path, {"w": torch.zeros(3)})
    assert torch.equal(load_weights(path)["w"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    """A model is made to be passed on: a server under another user must be able to open it."""
    write_atomically(tmp_path / "config.json", "{}")
    save_weights(tmp_path / "weights.safetensors", {"w": torch.ones(3)})
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_weights_of_any_layout_come_back(tmp_path: Path) -> None:
    tensors = {
        "turned": torch.arange(6.0).view(2, 3).T,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "": torch.ones(()),
    }
    save_weights(tmp_path / "w.safetensors", tensors)
    assert identical(load_weights(tmp_path / "w.safetensors"), tensors)


# ── the folder ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_run_is_named_after_its_recipe_and_the_day(tmp_path: Path) -> None:
    names = {Run.create(tmp_path, "mnist").path.name for _ in range(5)}
    assert len(names) == 5
    assert all(re.fullmatch(r"mnist-\d{4}-[0-9a-f]{4}", name) for name in names)


def test_a_run_can_be_put_where_it_is_wanted(tmp_path: Path) -> None:
    made = Run.create(tmp_path, "mnist", tmp_path / "deep" / "here")
    assert made.path == tmp_path / "deep" / "here"
    assert made.checkpoints.is_dir()
    assert made.figures.is_dir()
    assert (str(made), os.fspath(made)) == (str(made.path), str(made.path))
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path, "mnist", tmp_path / "empty").path == tmp_path / "empty"


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(VitralError, match="already exists and is not empty") as caught:
        Run.create(tmp_path, "mnist", tmp_path)
    assert "--out" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(VitralError, match="is a file; a run is a folder"):
        Run.create(tmp_path, "mnist", tmp_path / "precious.txt")
    with pytest.raises(VitralError, match="cannot make the run folder"):
        Run.create(tmp_path, "mnist", tmp_path / "precious.txt" / "run")
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_run_opens_by_its_path(tmp_path: Path, recipe: Recipe) -> None:
    made = Run.create(tmp_path, "tiny")
    write_atomically(made.recipe_file, recipe.to_toml())
    assert Run.open(str(made.path)).path == made.path
    assert not Run.open(made.path).finished
    assert Run.open(made.path).metrics() == []


def test_a_run_that_is_not_there_suggests_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitralError, match="there is no run folder runs/mnist-1") as caught:
        Run.open("runs/mnist-1")
    assert "vitral train" in caught.value.hint
    for age, name in enumerate(["d", "c", "b", "a"]):
        made = Run.create(Path("runs"), name, Path("runs") / name)
        write_atomically(made.recipe_file, recipe.to_toml())
        os.utime(made.recipe_file.parent, (10**9 + age, 10**9 + age))
    for missing in ("runs/e", "somewhere/else"):
        for opening in (Run.open, load_model):
            with pytest.raises(VitralError) as caught:
                opening(missing)
            assert caught.value.hint == "Newest runs: runs/a, runs/b, runs/c"
    with pytest.raises(VitralError, match="is not a run folder") as caught:
        Run.open("runs")
    assert "runs/a" in caught.value.hint


def test_metrics_pass_over_a_line_that_was_cut_short(tmp_path: Path) -> None:
    made = Run.create(tmp_path, "tiny")
    made.write_metrics([{"epoch": 1}, {"epoch": 2}])
    made.metrics_file.write_bytes(made.metrics_file.read_bytes() + b'{"epoch": 3, "name": "\xc3')
    assert made.metrics() == [{"epoch": 1}, {"epoch": 2}]


@pytest.fixture
def locked(train_tiny: Fit) -> Iterator[Path]:
    """A finished run that this process may not look into, even where the tests run as root."""
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


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_may_not_be_read_is_a_clear_error(locked: Path) -> None:
    for opening in (Run.open, load_model):
        with pytest.raises(VitralError, match=r"cannot read .*: Permission denied") as caught:
            opening(locked)
        assert str(locked) in caught.value.what
    with pytest.raises(VitralError, match=r"cannot .*: Permission denied"):
        Run.create(locked, "x", locked / "new")
    with pytest.raises(VitralError, match=r"cannot .*: Permission denied"):
        Run.create(locked, "x", locked)


# ── the model ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def card(recipe: Recipe) -> ModelCard:
    return ModelCard(
        architecture=recipe.model,
        preprocessing=Preprocessing(image_size=(8, 8), channels=1, mean=(0.25,), std=(0.5,), crop=0.9),
        classes=("a", "b", "ç", "d\n"),
        trained_on="somewhere",
        epoch=3,
    )


@pytest.fixture
def folder(tmp_path: Path, card: ModelCard) -> Path:
    torch.manual_seed(0)
    save_model(tmp_path / "model", ViT(card.architecture), card)
    return tmp_path / "model"


def test_a_model_comes_back_with_all_that_travels_with_it(folder: Path, card: ModelCard) -> None:
    torch.manual_seed(0)
    wanted = ViT(card.architecture).state_dict()
    for path in (folder, str(folder), folder.parent):  # the model folder, or the run folder around it
        model, found = load_model(path)
        assert found == card
        assert identical(model.state_dict(), wanted)
        assert not model.training
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights.safetensors"]
    assert json.loads((folder / "config.json").read_text())["made_by"] == f"vitral {__version__}"


def test_a_run_is_finished_only_when_its_model_is_complete(
    tmp_path: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Run.create(tmp_path, "tiny")

    def fail(path: Path, content: bytes | str) -> None:
        if path.name == "config.json":
            raise VitralError("no space", "make some")
        write_atomically(path, content)

    monkeypatch.setattr(run, "write_atomically", fail)
    with pytest.raises(VitralError, match="no space"):
        save_model(made.model, ViT(card.architecture), card)
    assert not made.finished
    monkeypatch.undo()
    save_model(made.model, ViT(card.architecture), card)
    assert made.finished


def edited(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(folder: Path) -> VitralError:
    with pytest.raises(VitralError) as caught:
        load_model(folder)
    return caught.value


def test_a_config_of_another_format_names_who_made_it(folder: Path) -> None:
    edited(folder, format=2, made_by="vitral 9.0")
    error = refused(folder)
    assert "has format 2 (vitral 9.0); this vitral reads format 1" in error.what
    assert "upgrade" in error.hint


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '{"made_by": "x"}', "\udcff"])
def test_a_broken_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    error = refused(folder)
    assert f"{folder / 'config.json'} cannot be read" in error.what
    assert "\n" not in error.what
    assert error.hint


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epoch": "three"}, "epoch must be int"),
        ({"colour": "red"}, "no field 'colour'"),
        ({"classes": ["a", "b"]}, "2 class names for a model of 4 classes"),
        ({"architecture": {"width": 15, "heads": 4}}, "width must be a multiple"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(folder: Path, changes: dict[str, Any], expected: str) -> None:
    edited(folder, **changes)
    error = refused(folder)
    assert str(folder / "config.json") in error.what
    assert expected in error.what


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "holds neither a run nor a model" in refused(folder).what


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    assert refused(folder).what == f"{folder / 'weights.safetensors'} is missing"


@pytest.mark.parametrize("damage", ["empty", "head", "half", "one byte less", "text", "folder"])
def test_damaged_weights_are_named(folder: Path, damage: str) -> None:
    path = folder / "weights.safetensors"
    content = path.read_bytes()
    kept = {"empty": 0, "head": 4, "half": len(content) // 2, "one byte less": -1}
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(
            b"version https://git-lfs.github.com/spec/v1\n" if damage == "text" else content[: kept[damage]]
        )
    error = refused(folder)
    assert error.what.startswith(f"{path} is not a whole safetensors file")
    assert "\n" not in error.what


def test_tensors_that_are_missing_extra_or_misshaped_are_listed(folder: Path) -> None:
    path = folder / "weights.safetensors"
    whole = load_file(path)
    missing = {name: tensor for name, tensor in whole.items() if name != "head.out.bias"}
    save_file(missing, path)
    assert (refused(folder).what.partition("(")[2], refused(folder).hint) == (
        "1 tensors differ)",
        "the first: head.out.bias (missing)",
    )
    save_file(whole | {"surplus": torch.zeros(1)}, path)
    assert refused(folder).hint == "the first: surplus (not in the model)"
    save_file(whole | {"head.out.weight": torch.zeros(3, 16)}, path)
    assert refused(folder).hint == "the first: head.out.weight (3×16, not 4×16)"
    save_file({f"x{index}": torch.zeros(1) for index in range(9)}, path)
    error = refused(folder)
    assert f"({len(whole) + 9} tensors differ)" in error.what
    assert len(error.hint) < 200


# ── what a training leaves behind ──────────────────────────────────────────────────────────────────────────────


def test_a_training_leaves_the_documented_files_and_figures(tmp_path: Path) -> None:
    workshop.train("digits", out=tmp_path / "run", **TINY)
    left = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left == {
        "recipe.toml", "environment.json", "metrics.jsonl", "test.json", "report.html", "model/config.json",
        "model/weights.safetensors", "checkpoints/best.safetensors", "checkpoints/step-000000005.pt",
        "checkpoints/step-000000010.pt", "figures/curves.png", "figures/confusion.png", "figures/attention.png",
        "figures/example.png", "figures/glass.png", "checkpoints/.lock",
    }  # fmt: skip
    assert (tmp_path / "run" / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    test = json.loads((tmp_path / "run" / "test.json").read_text())
    assert test["images"] == 359

    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["vitral"] == __version__
    assert environment["torch"] == torch.__version__
    assert environment["python"].startswith("3.")
    assert environment["threads"] == torch.get_num_threads()
    assert (environment["seed"], environment["precision"], environment["compile"]) == (0, "fp32", False)
    assert environment["reasons"]["device"] == "on the CPU, as asked"
    assert environment.keys() >= {"platform", "hardware", "git", "command"}
    for program in ("/home/me/.venv/bin/vitral", "/somewhere/src/vitral/__main__.py"):
        assert typed([program, "train", "my photos"]) == "vitral train 'my photos'", "as others can type it"
    assert typed(["mine.py", "train"]) == "mine.py train"
    assert environment["data"]["name"] == "digits"
    assert re.fullmatch(r"[0-9a-f]{16}", environment["data"]["fingerprint"])


def test_the_recipe_in_a_run_repeats_it_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "draw", lambda run, *_: run.figures / "example.png")
    changes = TINY | {"seed": 5, "model.dropout": 0.1, "augment.cutmix": 1.0}
    workshop.train("digits", out=tmp_path / "one", **changes)
    first = Run.open(tmp_path / "one")
    again = workshop.train(recipe=first.recipe_file, out=tmp_path / "two")
    second = Run.open(tmp_path / "two")
    assert first.recipe_file.read_bytes() == second.recipe_file.read_bytes()
    names = ("model/weights.safetensors", "model/config.json", "test.json")
    assert all((first.path / name).read_bytes() == (second.path / name).read_bytes() for name in names)
    assert read_recipe(second.recipe_file).data.mean is not None
    assert again.card.trained_on == "digits"


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    run = Run.create(tmp_path, "x", tmp_path / "run")
    with run.alone(), pytest.raises(VitralError, match="another process is training in"), Run(run.path).alone():
        pass
    with run.alone():
        assert (run.checkpoints / ".lock").exists()
