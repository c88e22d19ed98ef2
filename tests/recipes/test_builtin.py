"""Built-in recipes: each one builds its model, and what `vitral recipes show` prints can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import Command, skip_figures
from vitral.cli import main as cli
from vitral.data.datasets import BUILTIN_DATASETS, Dataset, Split
from vitral.data.registry.sources import CLASS_NAMES
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.recipes.builtin import GROUPS, RECIPES, get_recipe
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_a_recipe_can_be_built(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name
    assert recipe.data.name in {*BUILTIN_DATASETS, "photos", "imagenet", "imagenet-21k"}
    with torch.device("meta"):
        model = VARIANTS[recipe.variant](recipe.model)
        logits = model(torch.empty(2, recipe.model.channels, *recipe.model.image_size))
    assert logits.shape == (2, recipe.model.num_classes)


@pytest.mark.parametrize("name", [name for name in RECIPES if get_recipe(name).data.name in BUILTIN_DATASETS])
def test_the_number_of_classes_is_that_of_the_dataset(name: str) -> None:
    recipe = get_recipe(name)
    expected = 1 if recipe.pretrain is not None else len(CLASS_NAMES[recipe.data.name])  # without labels, no classes
    assert recipe.model.num_classes == expected


def test_each_builtin_dataset_has_a_recipe_of_its_name() -> None:
    assert set(BUILTIN_DATASETS) <= set(RECIPES)
    assert all(get_recipe(name).data.name == name for name in BUILTIN_DATASETS)


def test_an_unknown_recipe_is_refused_with_a_suggestion() -> None:
    with pytest.raises(VitralError, match=r"no recipe named 'mnist-quik'\. Did you mean 'mnist-quick'\?"):
        get_recipe("mnist-quik")


def test_recipes_are_listed_in_groups_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in GROUPS] == list(GROUPS)
    assert [line.split()[0] for line in lines if line.startswith("  ")][: len(RECIPES)] == list(RECIPES)
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("name", RECIPES)
def test_the_output_of_recipes_show_is_the_recipe(name: str, tmp_path: Path, command: Command) -> None:
    file = tmp_path / f"{name}.toml"
    file.write_text(command("recipes", "show", name)[1], encoding="utf-8")
    assert read_recipe(file) == get_recipe(name)


SMALL_MODEL: dict[str, Any] = {
    "model.image_size": (64, 64), "model.width": 48, "model.depth": 2, "model.heads": 3, "model.num_classes": 7,
}  # fmt: skip


def noise_dataset(name: str, recipe: Recipe) -> Dataset:
    """Twenty images of noise, fewer than a batch, in the shape that the recipe expects."""
    model = recipe.model
    shape = (20, model.channels, *model.image_size)
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    split = Split(images=images, labels=torch.arange(20) % model.num_classes)
    return Dataset(
        name=name,
        classes=tuple(map(str, range(model.num_classes))),
        train=split,
        validation=split,
        source="",
        fingerprint="",
        load_test=lambda: split,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if get_recipe(name).pretrain is None])
def test_the_output_of_recipes_show_can_be_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["recipes", "show", name])
    assert stop.value.code == 0
    file = tmp_path / f"{name}.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_recipe(file) == get_recipe(name)
    overrides = SMALL_MODEL if max(get_recipe(name).model.image_size) > 100 else {"model.depth": 1}
    expected = get_recipe(name).with_overrides(overrides)
    monkeypatch.setattr("vitral.training.setup.load_builtin_dataset", lambda data, **_: noise_dataset(data, expected))
    skip_figures(monkeypatch)
    words = ["train", "--recipe", str(file), "--epochs", "1", "--device", "cpu", "--out", str(tmp_path / "run")]
    for path, value in overrides.items():
        words += [f"--{path.replace('_', '-')}", "64" if isinstance(value, tuple) else str(value)]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    run = Run.open(tmp_path / "run")
    model, config = load_model(run.path)
    assert (config.epoch, config.trained_on) == (1, get_recipe(name).data.name)
    assert model.config == expected.model
    known = {"data.mean": expected.data.mean, "data.std": expected.data.std, "epochs": 1, "device": "cpu"}
    assert read_recipe(run.recipe_file).with_overrides(known) == expected.with_task("classification").with_overrides(
        known
    )
