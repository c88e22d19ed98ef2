"""Recipes: complete, readable, and every mistake in one named."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from vitral import cli, workshop
from vitral.data.augment import Augment
from vitral.data.datasets import KNOWN, Dataset, Split
from vitral.errors import VitralError
from vitral.run import Run, load_model
from vitral.training import plan
from vitral.training.recipe import Data, Optim, Recipe, read_recipe
from vitral.training.recipes import RECIPES, named
from vitral.vit import ViT, ViTConfig


def said(change: dict[str, Any], recipe: Recipe) -> str:
    with pytest.raises(VitralError) as caught:
        recipe.changed(change)
    return str(caught.value)


@pytest.mark.parametrize("name", RECIPES)
def test_a_named_recipe_comes_back_from_toml_as_it_went(name: str, tmp_path: Path) -> None:
    recipe = named(name)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(file) == recipe
    assert read_recipe(file).to_toml() == recipe.to_toml()


@pytest.mark.parametrize("name", RECIPES)
def test_the_toml_of_a_named_recipe_has_every_field_that_is_not_none(name: str) -> None:
    def complete(value: Any, written: Any) -> None:
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if inner is None:
                assert field.name not in written
            elif dataclasses.is_dataclass(inner):
                complete(inner, written[field.name])
            else:
                assert written[field.name] == (list(inner) if isinstance(inner, tuple) else inner), field.name

    recipe = named(name)
    complete(recipe, tomllib.loads(recipe.to_toml()))


@pytest.mark.parametrize("name", RECIPES)
def test_a_named_recipe_builds_its_model_for_a_known_set(name: str) -> None:
    recipe = named(name)
    assert recipe.name == name
    assert recipe.data.name in {*KNOWN, "photos"}
    with torch.device("meta"):
        model = ViT(recipe.model)
        logits = model(torch.empty(2, recipe.model.channels, *recipe.model.image_size))
    assert logits.shape == (2, recipe.model.classes)


def test_each_known_set_has_the_recipe_that_train_looks_for() -> None:
    assert set(KNOWN) <= set(RECIPES)
    assert all(named(name).data.name == name for name in KNOWN)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "folder-finetune"])  # that one wants a checkpoint
def test_what_recipes_show_prints_is_a_file_that_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["recipes", "show", name])
    assert stop.value.code == 0
    file = tmp_path / f"{name}.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_recipe(file) == named(name)

    def stand_in(asked: str, **_: Any) -> Dataset:
        """A few images of noise in the shape of the set."""
        model = named(name).model
        draws = torch.Generator().manual_seed(0)
        shape = (20, model.channels, *model.image_size)
        images = torch.randint(0, 256, shape, generator=draws, dtype=torch.uint8)
        split = Split(images=images, labels=torch.arange(20) % model.classes)
        classes = tuple(map(str, range(model.classes)))
        return Dataset(
            name=asked,
            classes=classes,
            train=split,
            validation=split,
            source="",
            fingerprint="",
            read_test=lambda: split,
        )

    monkeypatch.setattr(plan, "load", stand_in)
    monkeypatch.setattr(workshop, "draw", lambda run, *_: run.figures / "example.png")
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--recipe", str(file), "--epochs", "1", "--device", "cpu", "--out", str(tmp_path / "run")])
    assert stop.value.code == 0
    run = Run.open(tmp_path / "run")
    model, card = load_model(run.path)
    assert (card.epoch, card.trained_on) == (1, named(name).data.name)
    assert model.config == named(name).model
    assert read_recipe(run.recipe_file).changed({"data.mean": None, "data.std": None}) == named(name).changed(
        {"epochs": 1, "device": "cpu"}
    )


@pytest.mark.parametrize(
    ("path", "wrong", "near"),
    [
        ("epohcs", "epohcs", "epochs"),
        ("optim.weight_deacy", "optim.weight_deacy", "weight_decay"),
        ("model.patchsize", "model.patchsize", "patch_size"),
        ("augment.mixupp", "augment.mixupp", "mixup"),
        ("data.valdation", "data.valdation", "validation"),
        ("optm.lr", "optm", "optim"),
    ],
)
@pytest.mark.parametrize("value", [0.5, None])
def test_an_unknown_field_at_any_depth_is_refused_with_the_nearest(
    path: str, wrong: str, near: str, value: float | None, recipe: Recipe
) -> None:
    message = said({path: value}, recipe)
    assert f"'{wrong}'" in message
    assert f"Did you mean {near}?" in message


def test_a_field_inside_a_plain_value_is_refused(recipe: Recipe) -> None:
    assert "'epochs' has no fields inside" in said({"epochs.more": 1}, recipe)
    assert "model.width" in said({"model.width.wide": 1}, recipe)


def test_an_unknown_field_in_a_file_is_named_with_the_file(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text(recipe.to_toml().replace("weight_decay", "weight_deacy"), encoding="utf-8")
    with pytest.raises(VitralError, match=r"typo\.toml: no field 'optim\.weight_deacy'.*weight_decay"):
        read_recipe(file)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("epochs", "ten", "epochs must be int, not 'ten'"),
        ("epochs", 2.5, "epochs must be int, not 2.5"),
        ("epochs", True, "epochs must be int, not True"),
        ("epochs", None, "epochs must be int, not None"),
        ("optim.lr", "fast", "optim.lr must be float, not 'fast'"),
        ("optim.lr", False, "optim.lr must be float, not False"),
        ("optim.name", "adam", "optim.name must be one of adamw, sgd, muon, not 'adam'"),
        ("optim.betas", [0.9], "optim.betas must be tuple[float, float], not [0.9]"),
        ("model.image_size", 28, "model.image_size must be tuple[int, int], not 28"),
        ("data.mean", "gray", "data.mean must be tuple[float, ...], not 'gray'"),
        ("tensorboard", 1, "tensorboard must be bool, not 1"),
        ("optim", 3, "optim must be Optim, not 3"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(path: str, value: Any, expected: str, recipe: Recipe) -> None:
    assert expected in said({path: value}, recipe)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("epochs", 0),
        ("batch", 0),
        ("keep", 0),
        ("accumulate", 0),
        ("accumulate", 17),
        ("loss", "hinge"),
        ("on_nan", "ignore"),
        ("sampling", "fair"),
        ("augment.repeat", 0),
        ("label_smoothing", 1.0),
        ("ema", -0.1),
        ("seed", -1),
        ("seed", 2**60),
        ("data.validation", 0.0),
        ("data.validation", 1.0),
        ("optim.lr", 0.0),
        ("optim.lr", float("nan")),
        ("optim.warmup", -1.0),
        ("optim.warmup", float("nan")),
        ("optim.final_lr", -0.5),
        ("optim.clip", -1.0),
        ("optim.weight_decay", -0.1),
        ("optim.momentum", 1.0),
        ("optim.betas", (0.9, 1.0)),
        ("model.patch_size", 3),
        ("augment.mixup", -1.0),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_training_and_named(path: str, value: Any, recipe: Recipe) -> None:
    assert path.rpartition(".")[2] in said({path: value}, recipe)


def test_rare_classes_are_not_favoured_twice(recipe: Recipe) -> None:
    message = said({"sampling": "balanced", "class_weights": "balanced"}, recipe)
    assert "must not both be balanced" in message


def test_a_change_reaches_its_field_and_leaves_the_rest_alone(recipe: Recipe) -> None:
    changed = recipe.changed({"epochs": 7, "optim.lr": 1, "model.layer_scale": 0.1, "augment.flip": True})
    assert (changed.epochs, changed.optim.lr, changed.model.layer_scale, changed.augment.flip) == (7, 1.0, 0.1, True)
    assert isinstance(changed.optim.lr, float)
    back = {"epochs": 4, "optim.lr": 1e-2, "model.layer_scale": None, "augment.flip": False}
    assert changed.changed(back) == recipe
    assert recipe.changed({}) == recipe


def test_none_takes_back_what_may_be_none(recipe: Recipe) -> None:
    fixed = recipe.changed({"data.mean": (0.5,), "data.std": [0.25], "model.mlp_width": 24})
    assert (fixed.data.mean, fixed.data.std, fixed.model.mlp_width) == ((0.5,), (0.25,), 24)
    assert fixed.changed({"data.mean": None, "data.std": None, "model.mlp_width": None}) == recipe


def test_a_whole_group_can_be_changed_at_once(recipe: Recipe) -> None:
    optim = Optim(name="sgd", lr=0.1)
    assert recipe.changed({"optim": optim}).optim == optim
    assert recipe.changed({"optim": {"name": "sgd", "lr": 0.1}}).optim == optim
    model = ViTConfig(image_size=(8, 8), patch_size=2, channels=1, classes=4, width=8, depth=1, heads=2)
    assert recipe.changed({"model": model, "augment": Augment(flip=True)}).model == model


def test_changes_are_seen_together_not_one_by_one(recipe: Recipe) -> None:
    """28 is no multiple of the old patch size 16, nor 7 a divisor of the old 8 pixels: only both together fit."""
    changed = recipe.changed({"model.image_size": (28, 28), "model.patch_size": 7})
    assert changed.model.grid == (4, 4)


def test_a_missing_field_is_named(tmp_path: Path, recipe: Recipe) -> None:
    file = tmp_path / "short.toml"
    file.write_text(recipe.to_toml().replace('name = "textures"\n', ""), encoding="utf-8")
    with pytest.raises(VitralError, match=r"short\.toml: the field 'data\.name' is missing"):
        read_recipe(file)


def test_broken_toml_names_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("name = 'x'\nepochs = = 3\n", encoding="utf-8")
    with pytest.raises(VitralError, match=r"broken\.toml is not a valid recipe: .*line 2") as caught:
        read_recipe(file)
    assert "vitral recipes show" in caught.value.hint


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00name"])
def test_a_recipe_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "recipe.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(VitralError, match=r"cannot read the recipe .*recipe\.toml"):
        read_recipe(file)


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(VitralError, match=r"no recipe named 'mnist-quik'\. Did you mean mnist-quick\?"):
        named("mnist-quik")


def test_a_file_that_says_little_has_the_defaults_for_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text('name = "a"\ndata.name = "digits"\nmodel.depth = 3\n', encoding="utf-8")
    assert read_recipe(file) == Recipe(name="a", data=Data(name="digits"), model=ViTConfig(depth=3))
