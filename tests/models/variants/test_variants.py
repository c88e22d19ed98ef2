"""Variants in recipes, model folders, fine-tuning and the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS, resolve_preset, variant_name
from vitral.models.variants.hybrid import HYBRIDS, ConvStemConfig, HybridConfig, HybridViT
from vitral.models.vit import ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import DataConfig, Recipe, read_recipe
from vitral.runs.model_io import ModelConfig, load_model, save_model
from vitral.training.setup import resolve_recipe, setup_training
from vitral.training.state import init_state
from vitral.weights.adapt import adapt_weights
from vitral.weights.checkpoint import Checkpoint

SMALL = ViTConfig(image_size=(8, 8), patch_size=2, channels=1, num_classes=10, width=16, depth=2, heads=2)
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
        num_classes=10,
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
        get_recipe("digits"),
        variant=variant,
        model=CONFIGS[variant],
        epochs=1,
        device="cpu",
        precision="fp32",
        compile="no",
    )


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return int(stop.value.code or 0)


def test_configs_cover_every_variant():
    assert set(CONFIGS) == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recipe_with_a_variant_round_trips_through_toml(variant, tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe(variant).to_toml())
    assert read_recipe(tmp_path / "recipe.toml") == recipe(variant)
    assert recipe(variant).with_overrides({"model.depth": 3}).model == replace(CONFIGS[variant], depth=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_frozen_backbone_trains_only_the_head(variant, train_tiny, cpu):
    plan = replace(recipe(variant), model=replace(CONFIGS[variant], num_classes=4), tune="head")
    run = train_tiny(recipe=plan)
    model, card = load_model(run.path)
    assert type(model) is VARIANTS[variant]
    assert card.variant == variant
    before, after = init_state(plan, cpu, 1).model.state_dict(), model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("head.") for name in moved)


def test_freezing_blocks_of_a_distilled_model_freezes_its_tokens(train_tiny, cpu):
    plan = replace(recipe("distilled"), model=replace(SMALL, num_classes=4), tune="last-1")
    after = load_model(train_tiny(recipe=plan).path)[0].state_dict()
    before = init_state(plan, cpu, 1).model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.startswith(("head.", "encoder.norm.", "encoder.blocks.1.")) for name in moved)
    assert any(name.startswith("encoder.blocks.1.") for name in moved)


def test_fine_tuning_keeps_the_variant(tmp_path):
    source = checkpoint("distilled")
    save_model(tmp_path / "deit", source.build(), source.model_config)
    ready = setup_training(resolve_recipe("digits", None, init_from=str(tmp_path / "deit")))
    assert (ready.recipe.variant, ready.recipe.name) == ("distilled", "folder-finetune")
    assert ready.initial_weights is not None
    VARIANTS["distilled"](ready.recipe.model).load_state_dict(ready.initial_weights)
    assert any("both heads are kept and trained on the labels" in note for note in ready.notes)


@pytest.mark.parametrize(
    ("variant", "config", "what"),
    [
        ("hybird", SMALL, "variant must be one of plain, distilled, .* got 'hybird'"),
        ("hybrid", SMALL, "must be a HybridConfig, got a ViTConfig; use a hybrid preset: R50"),
        ("plain", CONFIGS["hybrid"], "must be a ViTConfig, got a HybridConfig"),
    ],
)
def test_recipe_refuses_a_variant_that_does_not_match_its_model(variant, config, what):
    with pytest.raises(ValueError, match=what):
        Recipe(name="x", data=DataConfig(name="digits"), variant=variant, model=config)


def test_resolve_preset_finds_plain_and_hybrid_presets():
    assert resolve_preset("b/16", num_classes=7) == ("plain", ViTConfig(num_classes=7))
    assert resolve_preset("r50+b/16", num_classes=7) == ("hybrid", replace(HYBRIDS["R50+B/16"], num_classes=7))
    with pytest.raises(VitralError, match=r"no preset named 'R50-B/16'\. Did you mean 'R50"):
        resolve_preset("R50-B/16")


def test_preset_adapts_to_the_images_of_the_recipe():
    plan = resolve_recipe("cifar10", None, preset="conv-Ti/4")
    assert (plan.variant, plan.model) == ("hybrid", replace(HYBRIDS["conv-Ti/4"], num_classes=10, drop_path=0.1))
    plan = resolve_recipe("mnist", None, preset="Ti/16")  # 28 is not a multiple of 16
    assert (plan.model.image_size, plan.model.channels, plan.model.width) == ((32, 32), 1, 192)
    with pytest.raises(VitralError, match="--preset and --init-from exclude each other"):
        resolve_recipe("mnist", None, init_from="x.safetensors", preset="Ti/16")


@pytest.mark.slow
def test_command_line_trains_a_hybrid_with_another_stem(tmp_path):
    words = "train digits --preset conv-Ti/4 --model.width 16 --model.depth 1 --model.heads 2 --model.qk-norm"
    stem = "--model.conv.widths 8 16 --model.conv.strides 1 2 --model.patch-size 2 --epochs 1"
    assert command(*words.split(), *stem.split(), "--out", tmp_path / "run") == 0
    model, card = load_model(tmp_path / "run")
    assert isinstance(model, HybridViT)
    assert isinstance(card.architecture, HybridConfig)
    assert (card.architecture.stem, card.architecture.qk_norm) == (ConvStemConfig(widths=(8, 16), strides=(1, 2)), True)
    assert read_recipe(tmp_path / "run" / "recipe.toml").model == card.architecture


@pytest.mark.slow
def test_summary_of_a_hybrid_counts_its_stem(capsys):
    assert command("summary", "R26+S/32", "--levels", 1) == 0
    assert "36,431,912" in capsys.readouterr().out
    assert command("summary", "R26-S/32") == 2
    assert "Did you mean 'R26+S/32'?" in capsys.readouterr().err


# Transfer to other sizes


def checkpoint(variant: str) -> Checkpoint:
    torch.manual_seed(0)
    model = VARIANTS[variant](CONFIGS[variant])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    preprocessing = Preprocessing(image_size=(8, 8), channels=1, mean=(0.4,), std=(0.2,))
    model_config = ModelConfig(
        architecture=model.config,
        preprocessing=preprocessing,
        classes=NAMES,
        trained_on="x",
        epoch=1,
        variant=variant_name(model),
    )
    return Checkpoint.from_model(model.eval(), model_config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_transfer_to_another_image_size_keeps_common_classes(variant):
    source = checkpoint(variant)
    config = replace(source.config, image_size=(12, 8), num_classes=2)
    moved = adapt_weights(source, variant, config, ("7", "new"))
    model = VARIANTS[variant](config).eval()
    model.load_state_dict(moved.state)
    images = torch.rand(2, 1, 12, 8)
    with torch.inference_mode(), pytest.warns(UserWarning, match="positions resampled"):
        before = source.build()(images)
    with torch.inference_mode():
        after = model(images)
    assert torch.allclose(after[:, 0], before[:, 7], atol=1e-5)
    assert not after[:, 1].any()


def test_transfer_of_a_distilled_checkpoint_notes_that_both_heads_learn():
    assert "both heads are kept and trained on the labels" in " ".join(
        adapt_weights(checkpoint("distilled"), "distilled", SMALL, NAMES).notes
    )


@pytest.mark.parametrize(
    ("variant", "changes", "hint"),
    [
        ("hybrid", {"channels": 3}, "stem depends on the channels"),
        ("hybrid", {"conv": ConvStemConfig(widths=(8, 16), strides=(1, 2))}, "stem depends on"),
        ("patch-norm", {"patch_size": 4}, "the norm over pixels depends on"),
    ],
)
def test_transfer_that_is_impossible_is_refused_with_a_reason(variant, changes, hint):
    with pytest.raises(VitralError) as refused:
        adapt_weights(checkpoint(variant), variant, replace(CONFIGS[variant], **changes), NAMES)
    assert hint in refused.value.hint


def test_transfer_from_another_variant_is_refused():
    with pytest.raises(VitralError, match="the checkpoint is a distilled ViT, the recipe's model a plain ViT"):
        adapt_weights(checkpoint("distilled"), "plain", SMALL, NAMES)


def test_transfer_resamples_kernels_on_the_feature_map():
    source = checkpoint("hybrid")
    moved = adapt_weights(source, "hybrid", replace(source.config, patch_size=4), NAMES)
    assert moved.state["patch_embedding.project.weight"].shape == (16, 8 * 2 * 2)
