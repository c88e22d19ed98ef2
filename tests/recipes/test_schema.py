"""Recipe: TOML round trip, overrides and validation."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vitral.data.augment import AugmentConfig
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.recipes.builtin import RECIPES, get_recipe
from vitral.recipes.schema import RESUMABLE_FIELDS, DataConfig, OptimConfig, Recipe, read_recipe


def override_error(overrides: dict[str, Any], recipe: Recipe) -> str:
    with pytest.raises(VitralError) as error:
        recipe.with_overrides(overrides)
    return str(error.value)


# TOML


@pytest.mark.parametrize("name", RECIPES)
def test_toml_round_trip_preserves_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = get_recipe(name)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(file) == recipe
    assert read_recipe(file).to_toml() == recipe.to_toml()


@pytest.mark.parametrize("name", RECIPES)
def test_toml_has_every_field_that_is_not_none(name: str) -> None:
    def check(value: Any, written: Any) -> None:
        for field in dataclasses.fields(value):
            inner = getattr(value, field.name)
            if inner is None:
                assert field.name not in written
            elif dataclasses.is_dataclass(inner):
                check(inner, written[field.name])
            else:
                assert written[field.name] == (list(inner) if isinstance(inner, tuple) else inner), field.name

    recipe = get_recipe(name)
    check(recipe, tomllib.loads(recipe.to_toml()))


def test_toml_lists_are_on_one_line(recipe: Recipe) -> None:
    toml = recipe.with_overrides({"init_schemes": ["identity"], "data.mean": [0.5, 0.25, 0.5]}).to_toml()
    assert 'init_schemes = ["identity"]\n' in toml
    assert "mean = [0.5, 0.25, 0.5]\n" in toml
    assert "betas = [0.9, 0.999]\n" in toml


def test_several_sources_are_written_and_read(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    pretraining = recipe.with_overrides({"data.name": "photos", "data.more": ["more photos.csv", "cifar10"]})
    file.write_text(pretraining.to_toml(), encoding="utf-8")
    assert read_recipe(file).data.sources == ("photos", "more photos.csv", "cifar10")
    assert 'more = ["more photos.csv", "cifar10"]\n' in pretraining.to_toml()
    assert recipe.data.sources == ("textures",)


def test_a_short_file_has_defaults_for_the_other_fields(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text('name = "a"\ndata.name = "digits"\nmodel.depth = 3\n', encoding="utf-8")
    assert read_recipe(file) == Recipe(name="a", data=DataConfig(name="digits"), model=ViTConfig(depth=3))


def test_an_unknown_field_in_a_file_is_named_with_the_file(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text(recipe.to_toml().replace("\nweight_decay", "\nweight_deacy"), encoding="utf-8")
    with pytest.raises(VitralError, match=r"typo\.toml: no field named 'optim\.weight_deacy'.*weight_decay"):
        read_recipe(file)


def test_a_missing_field_is_named(tmp_path: Path, recipe: Recipe) -> None:
    file = tmp_path / "short.toml"
    file.write_text(recipe.to_toml().replace('name = "textures"\n', ""), encoding="utf-8")
    with pytest.raises(VitralError, match=r"short\.toml: the field 'data\.name' is missing"):
        read_recipe(file)


def test_all_missing_fields_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("epochs = 3\n", encoding="utf-8")
    with pytest.raises(VitralError, match="the fields 'name', 'data', 'model' are missing") as error:
        read_recipe(tmp_path / "mine.toml")
    assert error.value.hint == "Required: name, data, model; all other fields have defaults"


def test_invalid_toml_names_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("name = 'x'\nepochs = = 3\n", encoding="utf-8")
    with pytest.raises(VitralError, match=r"broken\.toml is not valid TOML: .*line 2") as error:
        read_recipe(file)
    assert "vitral recipes show" in error.value.hint


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00name"])
def test_an_unreadable_recipe_file_is_a_clear_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "recipe.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(VitralError, match=r"cannot read the recipe .*recipe\.toml"):
        read_recipe(file)


# Overrides


def test_overrides_change_only_their_fields(recipe: Recipe) -> None:
    changed = recipe.with_overrides({"epochs": 7, "optim.lr": 1, "model.layer_scale": 0.1, "augment.flip": True})
    assert (changed.epochs, changed.optim.lr, changed.model.layer_scale, changed.augment.flip) == (7, 1.0, 0.1, True)
    assert isinstance(changed.optim.lr, float)
    back = {"epochs": 4, "optim.lr": 1e-2, "model.layer_scale": None, "augment.flip": False}
    assert changed.with_overrides(back) == recipe
    assert recipe.with_overrides({}) == recipe


def test_another_variant_drops_the_fields_it_does_not_have() -> None:
    """A plain model has no convolutional stem; everything else stays."""
    recipe = get_recipe("pretrain-small")
    plain = recipe.with_overrides({"variant": "plain"})
    assert (plain.variant, type(plain.model)) == ("plain", ViTConfig)
    assert (plain.model.width, plain.model.patch_size) == (recipe.model.width, recipe.model.patch_size)


def test_none_resets_optional_fields(recipe: Recipe) -> None:
    changed = recipe.with_overrides({"data.mean": (0.5,), "data.std": [0.25], "model.mlp_width": 24})
    assert (changed.data.mean, changed.data.std, changed.model.mlp_width) == ((0.5,), (0.25,), 24)
    assert changed.with_overrides({"data.mean": None, "data.std": None, "model.mlp_width": None}) == recipe


def test_a_whole_group_can_be_overridden(recipe: Recipe) -> None:
    optim = OptimConfig(name="sgd", lr=0.1)
    assert recipe.with_overrides({"optim": optim}).optim == optim
    assert recipe.with_overrides({"optim": {"name": "sgd", "lr": 0.1}}).optim == optim
    model = ViTConfig(image_size=(8, 8), patch_size=2, channels=1, num_classes=4, width=8, depth=1, heads=2)
    assert recipe.with_overrides({"model": model, "augment": AugmentConfig(flip=True)}).model == model


def test_overrides_are_validated_together(recipe: Recipe) -> None:
    """Neither 28 pixels with the old patch size nor patch size 7 with the old image size would be valid."""
    changed = recipe.with_overrides({"model.image_size": (28, 28), "model.patch_size": 7})
    assert changed.model.grid == (4, 4)


@pytest.mark.parametrize(
    ("path", "unknown", "suggestion"),
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
def test_an_unknown_field_is_refused_with_a_suggestion(
    path: str, unknown: str, suggestion: str, value: float | None, recipe: Recipe
) -> None:
    message = override_error({path: value}, recipe)
    assert f"'{unknown}'" in message
    assert f"Did you mean '{suggestion}'?" in message


def test_a_field_of_a_scalar_is_refused(recipe: Recipe) -> None:
    assert "'epochs' has no fields of its own" in override_error({"epochs.more": 1}, recipe)
    assert "model.width" in override_error({"model.width.wide": 1}, recipe)


# Validation


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("epochs", "ten", "epochs must be int, got 'ten'"),
        ("epochs", 2.5, "epochs must be int, got 2.5"),
        ("epochs", True, "epochs must be int, got True"),
        ("epochs", None, "epochs must be int, got None"),
        ("optim.lr", "fast", "optim.lr must be float, got 'fast'"),
        ("optim.lr", False, "optim.lr must be float, got False"),
        ("optim.name", "adam", "optim.name must be one of adamw, sgd, muon, got 'adam'"),
        ("optim.betas", [0.9], "optim.betas must be tuple[float, float], got [0.9]"),
        ("model.image_size", 28, "model.image_size must be tuple[int, int], got 28"),
        ("data.mean", "gray", "data.mean must be tuple[float, ...], got 'gray'"),
        ("tensorboard", 1, "tensorboard must be bool, got 1"),
        ("optim", 3, "optim must be OptimConfig, got 3"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(path: str, value: Any, expected: str, recipe: Recipe) -> None:
    assert expected in override_error({path: value}, recipe)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("keep_checkpoints", 0),
        ("grad_accum", 0),
        ("grad_accum", 17),
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
        ("optim.lr_base_batch_size", -1),
        ("ema_decay", 1.0),
        ("augment.policy.magnitude", -1.0),
        ("optim.lr", float("nan")),
        ("optim.warmup", -1.0),
        ("optim.warmup", float("nan")),
        ("optim.final_lr", -0.5),
        ("optim.grad_clip", -1.0),
        ("optim.weight_decay", -0.1),
        ("optim.muon_weight_decay", -0.1),
        ("optim.momentum", 1.0),
        ("optim.betas", (0.9, 1.0)),
        ("logit_adjustment", -1.0),
        ("tune", "backbone"),
        ("tune", "last-3"),
        ("tune", "last-"),
        ("tune", "last--1"),
        ("model.patch_size", 3),
        ("augment.mixup", -1.0),
    ],
)
def test_an_invalid_value_is_refused_and_named(path: str, value: Any, recipe: Recipe) -> None:
    assert path.rpartition(".")[2].replace("_", " ") in override_error({path: value}, recipe).replace("_", " ")


def test_an_invalid_value_has_a_hint_with_valid_ones(tmp_path: Path) -> None:
    recipe = get_recipe("mnist")
    hints = {
        "batch_size": (0, "The recipe mnist has batch_size 128"),
        "optim.lr": (-1.0, "The recipe mnist has optim.lr 0.005"),
        "grad_accum": (1000, "The recipe mnist has grad_accum 1"),
        "model.image_size": ((225, 225), "Change this value, or omit it"),  # the message suggests two
    }
    for path, (value, hint) in hints.items():
        with pytest.raises(VitralError) as error:
            recipe.with_overrides({path: value, "epochs": 3})
        assert error.value.hint == hint
    file = tmp_path / "recipe.toml"
    file.write_text(
        recipe.to_toml().replace("batch_size = 128", "batch_size = 5\ngrad_accum = 6").replace("grad_accum = 1\n", "")
    )
    with pytest.raises(VitralError, match="grad_accum must be at most batch_size, 5, got 6") as error:
        read_recipe(file)
    assert error.value.hint == "Default: batch_size 128, grad_accum 1"


def test_class_balance_is_not_applied_twice(recipe: Recipe) -> None:
    assert "must not both be balanced" in override_error({"sampling": "balanced", "class_weights": "balanced"}, recipe)
    for name in ("sampling", "class_weights"):
        message = override_error({"logit_adjustment": 1.0, name: "balanced"}, recipe)
        assert f"logit_adjustment excludes {name} = balanced" in message


def test_logit_adjustment_needs_the_softmax_loss(recipe: Recipe) -> None:
    assert "needs the loss softmax, got sigmoid" in override_error({"logit_adjustment": 1.0, "loss": "sigmoid"}, recipe)


def test_ema_is_given_as_a_fraction_or_as_a_decay(recipe: Recipe) -> None:
    assert get_recipe("deit").ema_fraction(375_300) * 375_300 == pytest.approx(25_000)
    assert recipe.with_overrides({"ema": 0.1}).ema_fraction(500) == 0.1
    assert recipe.ema_fraction(500) == 0
    assert "exclude each other" in override_error({"ema": 0.1, "ema_decay": 0.999}, recipe)


# Fields that determine the result


def test_resumable_fields_and_read_options_are_not_result_fields(recipe: Recipe) -> None:
    fields = recipe.result_fields()
    assert not set(RESUMABLE_FIELDS) & set(fields)
    assert set(RESUMABLE_FIELDS) <= {field.name for field in dataclasses.fields(Recipe)}
    assert not {"pack", "unreadable", "workers"} & set(fields["data"])


@pytest.mark.parametrize(("method", "is_fixed"), [("lejepa", True), ("dino", True), ("mae", False)])
def test_micro_batches_are_part_of_the_result_if_their_images_are_compared(method: str, is_fixed: bool) -> None:
    recipe = get_recipe("pretrain").with_overrides({"pretrain.method": method})
    changed = recipe.with_overrides({"grad_accum": 2})
    assert (recipe.result_fields() != changed.result_fields()) == is_fixed


def test_has_result_fields_compares_what_determines_the_result(recipe: Recipe) -> None:
    fields = recipe.result_fields()
    assert recipe.with_overrides({"grad_accum": 2, "data.workers": 3}).has_result_fields(fields)
    assert not recipe.with_overrides({"optim.lr": 0.5}).has_result_fields(fields)
    del fields["augment"]["jitter"]  # a field that was added after the checkpoint was written
    assert recipe.has_result_fields(fields)
