"""`compare`: training from scratch, a linear probe and fine-tuning, evaluated on the same images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.training import error_lines, run_vitral
from vitral import api
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import ModelConfig, load_model, save_model
from vitral.training.comparison.strategies import (
    StrategyComparison,
    default_scratch_recipe,
    split_for_evaluation,
)
from vitral.training.setup import resolve_recipe, setup_training


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 40 photographs of two classes and a checkpoint to fine-tune."""
    folder = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    for index in range(40):
        path = folder / "photos" / ("ants", "bees")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((40, 40, 3), (index % 2 * 200, 90, 90)) + rng.integers(0, 40, (40, 40, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    torch.manual_seed(0)
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=16, depth=1, heads=2)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("x", "y", "z"), trained_on="x", epoch=1
    )
    save_model(folder / "source", ViT(config), model_config)
    return folder


def compare(workspace: Path, out: str, **arguments: Any) -> StrategyComparison:
    photos = str(workspace / "photos")
    model = ViTConfig(image_size=(32, 32), patch_size=16, num_classes=2, width=24, depth=1, heads=2)
    scratch = resolve_recipe(photos, "folder-scratch")
    scratch = replace(scratch, model=model, epochs=1)
    arguments = {"seeds": 1, "epochs": 1} | arguments
    return api.compare(photos, init_from=workspace / "source", scratch_recipe=scratch, out=workspace / out, **arguments)


@pytest.mark.slow
def test_compare_trains_all_strategies_and_does_not_repeat_finished_parts(workspace: Path) -> None:
    result = compare(workspace, "all")
    assert result.verdict.recommended in ("scratch", "probe", "fine-tune")
    assert result.evaluated_on.startswith("6 validation images")
    for name in ("probe", "scratch-0", "fine-tune-0"):
        assert load_model(workspace / "all" / name)[1].classes == ("ants", "bees")
    assert (workspace / "all" / "comparison.png").stat().st_size > 5000
    written = json.loads((workspace / "all" / "comparison.json").read_text())
    assert written == result.as_dict()
    assert [row["name"] for row in written["verdict"]["rows"]] == ["scratch", "probe", "fine-tune"]

    finished = {file: file.stat().st_mtime_ns for file in (workspace / "all").glob("*/evaluation.json")}
    assert len(finished) == 3
    again = compare(workspace, "all", seeds=2)
    assert [row.seeds for row in again.verdict.rows] == [2, 1, 2]
    assert all(file.stat().st_mtime_ns == time for file, time in finished.items())
    assert (workspace / "all" / "scratch-1" / "evaluation.json").is_file()

    with pytest.raises(VitralError, match="holds a comparison with other settings"):
        compare(workspace, "all", **{"optim.lr": 1e-4})


@pytest.mark.slow
def test_the_probe_is_a_model_with_the_evaluated_accuracy(workspace: Path) -> None:
    result = compare(workspace, "probe-accuracy")
    folder = workspace / "probe-accuracy" / "probe"
    correct = json.loads((folder / "evaluation.json").read_text())["correct"]
    evaluation = api.evaluate(folder, data=str(workspace / "photos"), split="validation", engine="reference")
    assert evaluation.top1 == pytest.approx(np.mean(correct))
    assert result.verdict.images == len(correct) == 6
    before, after = load_model(workspace / "source")[0].state_dict(), load_model(folder)[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))


def test_the_evaluation_images_select_nothing(workspace: Path) -> None:
    """Without test images, the validation split is evaluated and part of the training split selects the epoch."""
    setup = setup_training(resolve_recipe(str(workspace / "photos"), None, str(workspace / "source")))
    split = split_for_evaluation(setup)
    assert torch.equal(split.evaluation.labels, setup.dataset.validation.labels)
    assert len(split.dataset.train) + len(split.dataset.validation) == len(setup.dataset.train) == 34


def test_the_scratch_recipe_uses_the_same_validation_split_and_hardware(workspace: Path) -> None:
    finetune = resolve_recipe(str(workspace / "photos"), None, str(workspace / "source"))
    finetune = finetune.with_overrides({"data.validation": 0.3, "device": "cpu", "epochs": 7})
    scratch: Recipe = default_scratch_recipe(finetune)
    assert scratch.model == get_recipe("folder-scratch").model
    assert (scratch.data.validation, scratch.device, scratch.epochs) == (0.3, "cpu", 7)
    assert scratch.init_from == ""


def test_compare_needs_a_checkpoint_and_a_seed(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_vitral("train", workspace / "photos", "--compare", "--out", workspace / "none", expect=2)
    assert "--compare needs a checkpoint" in error_lines(capsys)[0]
    with pytest.raises(VitralError, match="--seeds must be at least 1"):
        compare(workspace, "none", seeds=0)
