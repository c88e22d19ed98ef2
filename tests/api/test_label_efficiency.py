"""`vitral probe --against` from the command line to the files, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from support.common import Command
from support.models import save_random_model
from support.photos import COLOURS, save_class_folders, save_photo
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.variants.ensemble import EnsembleConfig, EnsembleViT
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.runs.model_io import load_model, save_model

CLASSES = ("ants", "bees")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos/` of two colours with train and test, `model/`, and `other/` with another image size."""
    folder = tmp_path_factory.mktemp("label-efficiency")
    save_class_folders(folder / "photos" / "train", CLASSES, 12)
    save_class_folders(folder / "photos" / "test", CLASSES, 10, first_seed=100)
    save_random_model(folder / "model", image_size=(16, 16))
    save_random_model(folder / "other", image_size=(8, 8), width=24)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.doctor.estimates.BENCHMARK_SECONDS", 0.0)
    monkeypatch.setattr("vitral.evaluation.feature_classifiers.INVERSE_PENALTIES", (0.01, 1.0))


def compare(workspace: Path, before: str = "random", **arguments: Any) -> Any:
    settings: dict[str, Any] = {"seeds": 2, "fine_tuning": False, "fractions": (0.1, 1.0)} | arguments
    other = before if before == "random" else workspace / before
    return vitral.compare_label_efficiency(str(workspace / "photos"), workspace / "model", other, **settings)


@pytest.mark.slow
def test_probe_against_random_prints_plan_table_and_verdict(workspace: Path, tmp_path: Path, command: Command) -> None:
    words = ["probe", workspace / "photos", "--init-from", workspace / "model", "--against", "random", "--seeds", "2"]
    words += ["--fractions", "0.1,1", "--epochs", "2", "--results", tmp_path / "results"]
    code, out, err = command(*words, "--out", tmp_path / "plot.svg")
    assert code == 0
    assert "Fine-tuning 8 models: 10%, 100% of the 24 labels, 2 seeds, before and after." in err
    assert "This takes" in err
    assert "10% of the labels, seed 0, after" in err
    assert out.count("fine-tuning") == 2
    assert out.splitlines()[-1].startswith("Starting from ")
    assert "instead of random weights" in out.splitlines()[-1]
    assert "20 test images, 24 labelled images, 2 classes, 2 seeds" in out
    assert "no layer-wise decay" in out
    plot = (tmp_path / "plot.svg").read_text()
    assert "</svg>" in plot
    assert (tmp_path / "results" / "label_efficiency.png").stat().st_size > 5000

    code, out, err = command(*words, "--json")  # nothing is repeated
    assert code == 0
    result = json.loads(out)
    assert result == json.loads((tmp_path / "results" / "label_efficiency.json").read_text())
    assert "less 8 finished models" in err
    rows = {(row["method"], row["fraction"]): row for row in result["rows"]}
    assert rows["fine-tuning", 0.1]["images"] == 2
    assert len(rows["fine-tuning", 1.0]["after_accuracies"]) == 2
    assert set(rows["fine-tuning", 0.1]["difference"]) == {"value", "low", "high", "seeds_margin", "images_margin"}
    assert result["recipes"]["after"].startswith("folder-finetune, 16x16/8")

    code, _, err = command(*words, "--epochs", "3")
    assert code == 2
    assert "holds a comparison with other settings" in err
    assert "--results" in err


@pytest.mark.slow
def test_checkpoints_are_compared_without_their_heads(workspace: Path, tmp_path: Path) -> None:
    """The same weights with another head and other classes: no difference, not even after fine-tuning."""
    model, config = load_model(workspace / "model")
    with torch.no_grad():
        model.get_parameter("head.out.weight").add_(1.0)
    save_model(tmp_path / "same", model, replace(config, classes=("ants", "bees", "c", "d", "e", "f")))
    photos = str(workspace / "photos")
    result = vitral.compare_label_efficiency(
        photos, tmp_path / "same", workspace / "model", seeds=2, fractions=(1.0,), epochs=1, results=tmp_path / "out"
    )
    assert [row.difference.value for row in result.rows] == [0.0] * 3
    assert "did not measurably help" in result.summary


def test_frozen_features_alone_write_nothing(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = compare(workspace, subject="Pretraining on your 24 images")
    assert [row.method for row in result.rows] == ["nearest neighbours", "linear", "linear"]  # k = 20 exceeds a class
    assert result.summary.startswith("Pretraining on your 24 images ")
    assert result.before_name == "random weights"
    assert (result.evaluated_on, result.test_images, result.labelled_images) == ("test", 20, 24)
    assert list(tmp_path.iterdir()) == []


def test_without_a_test_split_images_are_held_out(workspace: Path) -> None:
    photos = str(workspace / "photos" / "train")
    result = vitral.compare_label_efficiency(photos, workspace / "model", seeds=1, fine_tuning=False)
    assert result.evaluated_on == "validation"
    assert result.labelled_images + result.test_images == 24
    assert "cannot be judged from one seed" in result.summary


@pytest.mark.slow
def test_fractions_that_repeat_another_are_noted(workspace: Path) -> None:
    result = compare(workspace, fractions=(0.01, 0.1, 1.0))
    assert "1% of the labels: left out, the same 2 images as 10%" in result.notes


def test_models_that_read_images_differently_are_compared_with_a_note(workspace: Path) -> None:
    result = compare(workspace, "other")
    notes = " ".join(result.notes)
    assert "the models preprocess images differently (8x8 pixels" in notes
    assert "the models differ in size" in notes
    assert result.rows[0].seeds == 1  # nothing is random


def test_a_model_that_has_seen_the_labels_is_noted(workspace: Path, tmp_path: Path) -> None:
    model, config = load_model(workspace / "model")
    photos = str(workspace / "photos")
    classes = (*CLASSES, "c", "d", "e", "f")
    save_model(tmp_path / "supervised", model, replace(config, classes=classes, trained_on=photos))
    result = vitral.compare_label_efficiency(photos, workspace / "model", tmp_path / "supervised", fine_tuning=False)
    assert any(note.startswith(f"before was trained with labels of {photos}") for note in result.notes)


def test_test_images_among_the_labelled_ones_are_reported(workspace: Path, tmp_path: Path, command: Command) -> None:
    save_class_folders(tmp_path / "photos" / "train", CLASSES, 12)
    save_class_folders(tmp_path / "photos" / "test", CLASSES, 10)  # the same seeds: copies
    words = ["probe", tmp_path / "photos", "--init-from", workspace / "model", "--against", "random", "--seeds", "1"]
    code, out, _ = command(*words, "--no-fine-tuning", "--fractions", "1")
    assert code == 0
    assert "warning: after: all 20 images were used for training" in out
    assert "warning" not in command(*words, "--no-fine-tuning", "--fractions", "1", "--allow-leak")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seeds", "3"), "--seeds is for the comparison with another model"),
        (("--no-fine-tuning",), "--no-fine-tuning is for the comparison with another model"),
        (("--against", "nosuchmodel"), "no run or model folder nosuchmodel"),
        (("--against", "random", "--seeds", "0"), "seeds must be at least 1, got 0"),
        (("--against", "random", "--fractions", "0.1,2"), "expected fractions of the labels above 0 and at most 1"),
        (("--against", "random", "--recipe", "nosuchrecipe"), "no recipe named 'nosuchrecipe'"),
        (("--against", "random", "--epochs", "0"), "epochs must be at least 1, got 0"),
    ],
)
def test_invalid_flags_are_refused(workspace: Path, command: Command, words: tuple[str, ...], message: str) -> None:
    code, _, err = command("probe", workspace / "photos", "--init-from", workspace / "model", *words)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err


def test_an_ensemble_has_features_but_cannot_be_fine_tuned(workspace: Path, tmp_path: Path) -> None:
    _, config = load_model(workspace / "model")
    architecture = EnsembleConfig.of(config.architecture, "plain", members=2)
    save_model(
        tmp_path / "ensemble",
        EnsembleViT(architecture),
        replace(config, architecture=architecture, variant="ensemble"),
    )
    photos = str(workspace / "photos")
    with pytest.raises(VitralError, match="is an ensemble, and this needs a single model"):
        vitral.compare_label_efficiency(photos, tmp_path / "ensemble", results=tmp_path / "out")
    result = vitral.compare_label_efficiency(
        photos, tmp_path / "ensemble", seeds=1, fractions=(1.0,), fine_tuning=False
    )
    assert len(result.rows) == 2


def test_other_tasks_are_refused(workspace: Path, tmp_path: Path) -> None:
    for index in range(8):
        save_photo(tmp_path / f"{index}.jpg", COLOURS["ants"], index)
    rows = "".join(f"{index}.jpg,{index / 3}\n" for index in range(8))
    (tmp_path / "values.csv").write_text(f"path,weight\n{rows}")
    with pytest.raises(VitralError) as error:
        vitral.compare_label_efficiency(str(tmp_path / "values.csv"), workspace / "model", fine_tuning=False)
    assert error.value.hint


def test_a_dataset_without_test_images_is_refused(workspace: Path, tmp_path: Path) -> None:
    photos = save_class_folders(tmp_path / "photos", CLASSES, 1)
    with pytest.raises(VitralError, match="has no test images"):
        vitral.compare_label_efficiency(str(photos), workspace / "model", fine_tuning=False)


def test_options_describe_checkpoints_of_other_libraries_only(workspace: Path, tmp_path: Path) -> None:
    from vitral.api.label_efficiency import options_of

    foreign = tmp_path / "vit.safetensors"
    foreign.touch()
    options = CheckpointOptions(heads=2, adapter="adapter.safetensors")
    sources: dict[Any, str] = {"before": str(foreign), "after": str(workspace / "model")}
    assert options_of("before", sources, options) == CheckpointOptions(heads=2)
    assert options_of("after", sources, CheckpointOptions(heads=2)) == NO_OPTIONS
    assert options_of("after", sources, options) == options  # the adapter is for these weights
    sources = {"before": "random", "after": str(foreign)}
    assert options_of("after", sources, options) == options


def test_random_features_are_those_of_the_same_architecture(workspace: Path) -> None:
    from vitral.evaluation.labelled_images import random_predictor

    predictor = Predictor.load(workspace / "model")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (random_predictor(predictor, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(first.features(images), again.features(images))
    assert not torch.allclose(first.features(images), other.features(images))
    assert first.model_config == predictor.model_config
