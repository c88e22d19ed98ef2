"""Variants through recipes, files and the command line: named, built, trained, fine-tuned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS, architecture, variant_of
from vitral.models.variants.hybrid import HYBRIDS, ConvStemConfig, HybridConfig, HybridViT
from vitral.models.vit import ViTConfig
from vitral.recipes.builtin import named
from vitral.recipes.schema import Data, Recipe, read_recipe
from vitral.runs.run import ModelCard, load_model, save_model
from vitral.training.setup import plan_for, prepare
from vitral.training.state import begin
from vitral.weights.adapt import transfer
from vitral.weights.checkpoint import Checkpoint

SMALL = ViTConfig(image_size=(8, 8), patch_size=2, channels=1, classes=10, width=16, depth=2, heads=2)
CONFIGS = {
    "plain": SMALL,
    "distilled": SMALL,
    "late-norm": replace(SMALL, pooling="mean"),
    "patch-norm": SMALL,
    "class-and-mean": SMALL,
    "hybrid": HybridConfig(
        image_size=(8, 8),
        patch_size=2,
        channels=1,
        classes=10,
        width=16,
        depth=2,
        heads=2,
        qk_norm=True,
        conv=ConvStemConfig(widths=(8, 8), strides=(1, 2)),
    ),
}
NAMES = tuple("0123456789")


def recipe(variant: str) -> Recipe:
    return replace(
        named("digits"), variant=variant, model=CONFIGS[variant], epochs=1, device="cpu", precision="fp32", compile="no"
    )


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return stop.value.code or 0


def test_every_variant_has_a_configuration_here():
    assert set(CONFIGS) == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_recipe_with_a_variant_goes_to_toml_and_back(variant, tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe(variant).to_toml())
    assert read_recipe(tmp_path / "recipe.toml") == recipe(variant)
    assert recipe(variant).changed({"model.depth": 3}).model == replace(CONFIGS[variant], depth=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_trains_as_itself_and_a_frozen_one_keeps_all_but_its_head(variant, train_tiny, cpu):
    plan = replace(recipe(variant), model=replace(CONFIGS[variant], classes=4), freeze="backbone")
    run = train_tiny(recipe=plan)
    model, card = load_model(run.path)
    assert type(model) is VARIANTS[variant]
    assert card.variant == variant
    before, after = begin(plan, cpu, 1).model.state_dict(), model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("head.") for name in moved)


def test_the_first_blocks_of_a_distilled_model_stay_with_all_tokens(train_tiny, cpu):
    plan = replace(recipe("distilled"), model=replace(SMALL, classes=4), freeze="1")
    after = load_model(train_tiny(recipe=plan).path)[0].state_dict()
    before = begin(plan, cpu, 1).model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.startswith(("head.", "encoder.norm.", "encoder.blocks.1.")) for name in moved)
    assert any(name.startswith("encoder.blocks.1.") for name in moved)


def test_a_training_begun_from_a_variant_keeps_it(tmp_path):
    source = checkpoint("distilled")
    save_model(tmp_path / "deit", source.build(), source.card)
    ready = prepare(plan_for("digits", None, init=str(tmp_path / "deit")))
    assert (ready.recipe.variant, ready.recipe.name) == ("distilled", "folder-finetune")
    assert ready.start is not None
    VARIANTS["distilled"](ready.recipe.model).load_state_dict(ready.start)
    assert any("both learn from the labels" in note for note in ready.notes)


@pytest.mark.parametrize(
    ("variant", "config", "what"),
    [
        ("hybird", SMALL, "variant must be one of plain, distilled, .* not 'hybird'"),
        ("hybrid", SMALL, "must be a HybridConfig, not a ViTConfig: a preset has one, R50"),
        ("plain", CONFIGS["hybrid"], "must be a ViTConfig, not a HybridConfig"),
    ],
)
def test_a_recipe_refuses_a_variant_that_its_model_is_not(variant, config, what):
    with pytest.raises(ValueError, match=what):
        Recipe(name="x", data=Data(name="digits"), variant=variant, model=config)


def test_a_preset_of_either_table_is_found_by_its_name():
    assert architecture("b/16", classes=7) == ("plain", ViTConfig(classes=7))
    assert architecture("r50+b/16", classes=7) == ("hybrid", replace(HYBRIDS["R50+B/16"], classes=7))
    with pytest.raises(VitralError, match=r"no preset named 'R50-B/16'\. Did you mean R50"):
        architecture("R50-B/16")


def test_a_preset_takes_the_images_as_the_recipe_has_them():
    plan = plan_for("cifar10", None, preset="conv-Ti/4")
    assert (plan.variant, plan.model) == ("hybrid", replace(HYBRIDS["conv-Ti/4"], classes=10, drop_path=0.1))
    plan = plan_for("mnist", None, preset="Ti/16")  # 28 pixels are no multiple of 16
    assert (plan.model.image_size, plan.model.channels, plan.model.width) == ((32, 32), 1, 192)
    with pytest.raises(VitralError, match="both say what the model is"):
        plan_for("mnist", None, init="x.safetensors", preset="Ti/16")


def test_the_command_line_trains_a_hybrid_and_changes_its_stem(tmp_path):
    words = "train digits --preset conv-Ti/4 --model.width 16 --model.depth 1 --model.heads 2 --model.qk-norm"
    stem = "--model.conv.widths 8 16 --model.conv.strides 1 2 --model.patch-size 2 --epochs 1"
    assert command(*words.split(), *stem.split(), "--out", tmp_path / "run") == 0
    model, card = load_model(tmp_path / "run")
    assert isinstance(model, HybridViT)
    assert isinstance(card.architecture, HybridConfig)
    assert (card.architecture.stem, card.architecture.qk_norm) == (ConvStemConfig(widths=(8, 16), strides=(1, 2)), True)
    assert read_recipe(tmp_path / "run" / "recipe.toml").model == card.architecture


def test_the_summary_of_a_hybrid_counts_its_stem(capsys):
    assert command("summary", "R26+S/32", "--levels", 1) == 0
    assert "36,431,912" in capsys.readouterr().out
    assert command("summary", "R26-S/32") == 2
    assert "Did you mean R26+S/32?" in capsys.readouterr().err


# ── other sizes ────────────────────────────────────────────────────────────────────────────────────────────────


def checkpoint(variant: str) -> Checkpoint:
    torch.manual_seed(0)
    model = VARIANTS[variant](CONFIGS[variant])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    seen = Preprocessing(image_size=(8, 8), channels=1, mean=(0.4,), std=(0.2,))
    card = ModelCard(
        architecture=model.config, preprocessing=seen, classes=NAMES, trained_on="x", epoch=1, variant=variant_of(model)
    )
    return Checkpoint.of(model.eval(), card)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_follows_another_image_size_and_keeps_the_rows_of_its_classes(variant):
    source = checkpoint(variant)
    config = replace(source.config, image_size=(12, 8), classes=2)
    moved = transfer(source, variant, config, ("7", "new"))
    model = VARIANTS[variant](config).eval()
    model.load_state_dict(moved.state)
    images = torch.rand(2, 1, 12, 8)
    with torch.inference_mode(), pytest.warns(UserWarning, match="positions resampled"):
        before = source.build()(images)
    with torch.inference_mode():
        after = model(images)
    assert torch.allclose(after[:, 0], before[:, 7], atol=1e-5)
    assert not after[:, 1].any()


def test_a_distilled_checkpoint_says_that_both_heads_learn():
    assert "both learn from the labels" in " ".join(transfer(checkpoint("distilled"), "distilled", SMALL, NAMES).notes)


@pytest.mark.parametrize(
    ("variant", "changes", "hint"),
    [
        ("hybrid", {"channels": 3}, "the stem sees channels"),
        ("hybrid", {"conv": ConvStemConfig(widths=(8, 16), strides=(1, 2))}, "the stem sees"),
        ("patch-norm", {"patch_size": 4}, "a norm sees each pixel"),
    ],
)
def test_what_cannot_follow_is_refused_with_its_reason(variant, changes, hint):
    with pytest.raises(VitralError) as refused:
        transfer(checkpoint(variant), variant, replace(CONFIGS[variant], **changes), NAMES)
    assert hint in refused.value.hint


def test_a_checkpoint_of_another_variant_is_refused():
    with pytest.raises(VitralError, match="the checkpoint is a distilled ViT, the recipe's model a plain one"):
        transfer(checkpoint("distilled"), "plain", SMALL, NAMES)


def test_kernels_on_the_map_of_a_stem_are_resampled_there():
    source = checkpoint("hybrid")
    moved = transfer(source, "hybrid", replace(source.config, patch_size=4), NAMES)
    assert moved.state["patch_embedding.project.weight"].shape == (16, 8 * 2 * 2)
