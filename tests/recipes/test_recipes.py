"""Recipes: complete, readable, and every mistake in one named."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import leave_out_pictures
from vitral import weights
from vitral.cli import main as cli
from vitral.data.augment import Augment
from vitral.data.datasets import KNOWN, Dataset, Split
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import GROUPS, RECIPES, named
from vitral.recipes.papers import augreg_in1k
from vitral.recipes.schema import Data, Optim, Recipe, read_recipe
from vitral.runs.run import ModelCard, Run, load_model
from vitral.training import setup as plan
from vitral.training.optim.build import learning_rate


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
    assert recipe.data.name in {*KNOWN, "photos", "imagenet", "imagenet-21k"}
    with torch.device("meta"):
        model = VARIANTS[recipe.variant](recipe.model)
        logits = model(torch.empty(2, recipe.model.channels, *recipe.model.image_size))
    assert logits.shape == (2, recipe.model.classes)


def test_each_known_set_has_the_recipe_that_train_looks_for() -> None:
    assert set(KNOWN) <= set(RECIPES)
    assert all(named(name).data.name == name for name in KNOWN)


SMALLER = {"model.image_size": (64, 64), "model.width": 48, "model.depth": 2, "model.heads": 3, "model.classes": 7}


@pytest.mark.parametrize("name", RECIPES)
def test_what_recipes_show_prints_is_a_file_that_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a smaller model, and with fewer images than a batch has parts."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["recipes", "show", name])
    assert stop.value.code == 0
    file = tmp_path / f"{name}.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_recipe(file) == named(name)
    large = max(named(name).model.image_size) > 100
    smaller = SMALLER if large else {"model.depth": 1}
    wanted = named(name).changed(smaller)

    def stand_in(asked: str, **_: Any) -> Dataset:
        """A few images of noise in the shape of the set."""
        model = wanted.model
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
    leave_out_pictures(monkeypatch)
    words = ["train", "--recipe", str(file), "--epochs", "1", "--device", "cpu", "--out", str(tmp_path / "run")]
    for flag, value in smaller.items():
        words += [f"--{flag.replace('_', '-')}", "64" if isinstance(value, tuple) else str(value)]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    run = Run.open(tmp_path / "run")
    model, card = load_model(run.path)
    assert (card.epoch, card.trained_on) == (1, named(name).data.name)
    assert model.config == wanted.model
    known = {"data.mean": wanted.data.mean, "data.std": wanted.data.std, "epochs": 1, "device": "cpu"}
    assert read_recipe(run.recipe_file).changed(known) == wanted.changed(known)


# ── the papers' ────────────────────────────────────────────────────────────────────────────────────────────────

SAID: dict[str, dict[str, Any]] = {  # tables 3, 4 and 9 of the papers, and big_vision's files
    "vit-in1k": {
        "optim.name": "adamw", "optim.betas": (0.9, 0.999), "batch": 4096, "epochs": 300, "optim.lr": 3e-3,
        "optim.schedule": "cosine", "optim.weight_decay": 0.3, "model.dropout": 0.1, "optim.warmup": 10_000,
        "optim.clip": 1.0, "model.image_size": (224, 224),
    },
    "vit-in21k": {
        "epochs": 90, "optim.lr": 1e-3, "optim.schedule": "linear", "optim.weight_decay": 0.03, "model.dropout": 0.1,
        "batch": 4096,
    },
    "vit-finetune": {
        "optim.name": "sgd", "optim.momentum": 0.9, "batch": 512, "optim.schedule": "cosine",
        "optim.weight_decay": 0.0, "optim.clip": 1.0, "model.image_size": (384, 384), "model.head": "linear",
        "own_size": True,
    },
    "deit": {
        "optim.name": "adamw", "batch": 1024, "epochs": 300, "optim.warmup": 5 / 300, "optim.weight_decay": 0.05,
        "label_smoothing": 0.1, "model.drop_path": 0.1, "model.dropout": 0.0, "augment.mixup": 0.8,
        "augment.cutmix": 1.0, "augment.switch": 0.5, "augment.erase": 0.25, "augment.repeat": 3,
        "ema_decay": 0.99996, "augment.policy.name": "randaugment", "augment.policy.layers": 2,
        "augment.policy.magnitude": 9.0, "augment.policy.spread": 0.5, "augment.policy.increasing": True,
    },
    "deit-384": {
        "epochs": 30, "optim.lr": 5e-6, "optim.weight_decay": 1e-8, "model.image_size": (384, 384), "own_size": True,
    },
    "plain-s16": {
        "batch": 1024, "epochs": 90, "optim.lr": 1e-3, "optim.schedule": "cosine", "optim.warmup": 10_000,
        "optim.clip": 1.0, "augment.policy.layers": 2, "augment.policy.magnitude": 10.0, "augment.mixup": 0.2,
        "augment.policy.increasing": False, "model.pooling": "mean", "model.positions": "sincos", "model.head": "mlp",
        "loss": "softmax", "data.validation": 0.01,
    },
    "augreg-in1k": {
        "batch": 4096, "epochs": 300, "optim.lr": 1e-3, "optim.warmup": 10_000, "optim.clip": 1.0, "loss": "sigmoid",
        "augment.policy.layers": 2, "augment.policy.magnitude": 15.0, "augment.mixup": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_the_papers_recipes_say_what_the_papers_say(name: str) -> None:
    recipe = named(name)
    assert recipe.changed(SAID[name]) == recipe
    assert "arXiv" in (RECIPES[name].__doc__ or "")


def test_deits_learning_rate_grows_with_the_batch_and_ends_at_its_least() -> None:
    recipe = named("deit")
    for batch in (256, 512, 1024):
        plan = recipe.changed({"batch": batch})
        assert plan.optim.lr * plan.lr_scale == pytest.approx(5e-4 * batch / 512)
    assert learning_rate(1000, 1000, recipe.optim) * recipe.lr_scale == pytest.approx(1e-5)
    assert named("vit-in1k").lr_scale == 1


def test_big_visions_decay_is_the_same_step_as_adamws() -> None:
    """w ← w - lr/peak · 1e-4 · w there; w ← w - lr · wd · w here, at every lr on the way."""
    for name in ("plain-s16", "augreg-in1k"):
        optim = named(name).optim
        for lr in (1e-5, 3e-4, 1e-3):
            assert lr * optim.weight_decay == pytest.approx(lr / optim.lr * 1e-4)


def test_each_size_of_augreg_has_its_level() -> None:
    def levels(recipe: Recipe) -> tuple[float, ...]:
        return recipe.augment.policy.layers, recipe.augment.policy.magnitude, recipe.augment.mixup

    assert levels(augreg_in1k("Ti/16")) == (2, 0, 0.0)
    assert levels(augreg_in1k("S/32")) == (2, 15, 0.2)
    assert all(levels(augreg_in1k(size)) == (2, 15, 0.5) for size in ("S/16", "B/32", "B/16", "L/16"))
    assert levels(augreg_in1k("B/16", "strong2")) == (2, 20, 0.8)


def test_averages_given_as_a_decay_remember_that_many_steps(recipe: Recipe) -> None:
    assert named("deit").ema_share(375_300) * 375_300 == pytest.approx(25_000)
    assert recipe.changed({"ema": 0.1}).ema_share(500) == 0.1
    assert recipe.ema_share(500) == 0
    assert "both say how long" in said({"ema": 0.1, "ema_decay": 0.999}, recipe)


@pytest.mark.parametrize(("name", "size"), [("vit-finetune", (384, 384)), ("folder-finetune", (32, 32))])
def test_a_checkpoint_is_fine_tuned_at_its_own_size_or_at_the_recipes(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    config = ViTConfig(image_size=(32, 32), patch_size=8, classes=3, width=192, depth=1, heads=3)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelCard(architecture=config, preprocessing=seen, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(config), card), tmp_path / "model.safetensors", to="timm")
    shaped = plan.plan_for("photos/", name, str(tmp_path / "model.safetensors"))
    assert (shaped.model.width, shaped.model.patch_size, shaped.model.image_size) == (192, 8, size)


def test_recipes_are_listed_in_groups_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["recipes"])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line and not line.startswith((" ", "vitral"))] == list(GROUPS)
    assert [line.split()[0] for line in printed if line.startswith("  ")] == list(RECIPES)
    assert all(len(line) <= 120 for line in printed)


@pytest.mark.parametrize(
    ("path", "wrong", "near"),
    [
        ("epohcs", "epohcs", "epochs"),
        ("optim.weight_deacy", "optim.weight_deacy", "weight_decay"),
        ("model.patchsize", "model.patchsize", "patch_size"),
        ("augment.mixupp", "augment.mixupp", "mixup"),
        ("data.valdation", "data.valdation", "validation"),
        ("optm.lr", "optm", "optim"),
        ("lr", "lr", "optim.lr"),
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
        ("data.validation", -0.1),
        ("data.validation", 1.0),
        ("optim.lr", 0.0),
        ("optim.lr_batch", -1),
        ("ema_decay", 1.0),
        ("augment.policy.magnitude", -1.0),
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


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("epochs = 3\n", encoding="utf-8")
    with pytest.raises(VitralError, match="the fields 'name', 'data', 'model' are missing") as caught:
        read_recipe(tmp_path / "mine.toml")
    assert caught.value.hint == "needed: name, data, model; all others have defaults"


def test_a_list_is_one_line_of_the_file(recipe: Recipe) -> None:
    written = recipe.changed({"start": ["identity"], "data.mean": [0.5, 0.25, 0.5]}).to_toml()
    assert 'start = ["identity"]\n' in written
    assert "mean = [0.5, 0.25, 0.5]\n" in written
    assert "betas = [0.9, 0.999]\n" in written


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
