"""A checkpoint's weights in a model of another size, and fine-tuning from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from vitral.training.optim.build import make_optimizers, set_learning_rate

import vitral
from support.photos import save_photo
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig, patchify
from vitral.recipes.schema import OptimConfig
from vitral.runs.model_io import ModelConfig, save_model
from vitral.weights.adapt import other_channels, resample_kernels, transfer
from vitral.weights.checkpoint import Asked, Checkpoint
from vitral.weights.reading import choose_heads

CONFIG = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=32, depth=2, heads=2)
NAMES = ("ants", "bees", "wasps")


def checkpoint(config: ViTConfig = CONFIG) -> Checkpoint:
    torch.manual_seed(0)
    model = ViT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    seen = Preprocessing(image_size=config.image_size, channels=3, mean=(0.4,) * 3, std=(0.2,) * 3, crop=0.9)
    card = ModelConfig(architecture=config, preprocessing=seen, classes=NAMES, trained_on="x", epoch=1)
    return Checkpoint.of(model, card)


def built(config: ViTConfig, state: dict[str, torch.Tensor]) -> ViT:
    model = ViT(config).eval()
    model.load_state_dict(state)
    return model


def test_the_same_classes_keep_their_answers():
    source = checkpoint()
    images = torch.rand(2, 3, 32, 32)
    moved = built(CONFIG, transfer(source, "plain", CONFIG, NAMES).state)
    assert torch.equal(moved(images), source.build()(images))


def test_known_classes_keep_their_rows_by_name_and_new_ones_start_at_zero():
    source = checkpoint()
    config = replace(CONFIG, classes=4)
    moved = transfer(source, "plain", config, ("aphids", "bees", "ants", "moths"))
    logits, before = built(config, moved.state)(torch.ones(1, 3, 32, 32)), source.build()(torch.ones(1, 3, 32, 32))
    assert torch.allclose(logits[0, [1, 2]], before[0, [1, 0]])
    assert torch.equal(logits[0, [0, 3]], torch.zeros(2))
    assert "2 of 4 classes kept" in moved.notes[-1]


def test_other_classes_get_a_head_at_zero():
    config = replace(CONFIG, classes=2)
    moved = transfer(checkpoint(), "plain", config, ("x", "y"))
    assert not built(config, moved.state)(torch.rand(1, 3, 32, 32)).any()
    assert moved.notes[-1] == "head: new, at zero"


def test_positions_follow_another_image_size():
    source = checkpoint()
    config = replace(CONFIG, image_size=(48, 32))
    moved = transfer(source, "plain", config, NAMES)
    images = torch.rand(1, 3, 48, 32)
    with pytest.warns(UserWarning, match="positions resampled"):
        expected = source.build()(images)
    assert torch.allclose(built(config, moved.state)(images), expected, atol=1e-5)
    assert "positions resampled from 4×4 to 6×4" in moved.notes


def test_resampled_kernels_give_resized_patches_the_same_product():
    torch.manual_seed(0)
    kernels, patch = torch.randn(5, 3 * 64), torch.randn(1, 3, 8, 8)
    larger = F.interpolate(patch, size=(12, 12), mode="bilinear")
    before = patchify(patch, 8) @ kernels.T
    after = patchify(larger, 12) @ resample_kernels(kernels, 8, 12).T
    assert torch.allclose(before, after, atol=1e-3)


def test_a_model_with_another_patch_size_still_answers_alike():
    source = checkpoint()
    config = replace(CONFIG, image_size=(64, 64), patch_size=16)
    moved = built(config, transfer(source, "plain", config, NAMES).state)
    images = torch.rand(4, 3, 32, 32)
    larger = F.interpolate(images, size=(64, 64), mode="bilinear")
    assert torch.allclose(moved(larger), source.build()(images), atol=1e-2)


def test_gray_images_look_to_summed_kernels_like_gray_colour_images():
    kernels, gray = torch.randn(5, 3 * 16), torch.randn(1, 1, 4, 4)
    colour = gray.expand(-1, 3, -1, -1)
    summed = other_channels(kernels, 3, 1)
    assert torch.allclose(patchify(gray, 4) @ summed.T, patchify(colour, 4) @ kernels.T, atol=1e-5)


def test_many_equal_channels_look_like_three():
    kernels, one = torch.randn(5, 3 * 16), torch.randn(1, 1, 4, 4)
    six = other_channels(kernels, 3, 6)
    three = patchify(one.expand(-1, 3, -1, -1), 4) @ kernels.T
    assert torch.allclose(patchify(one.expand(-1, 6, -1, -1), 4) @ six.T, three, atol=1e-5)


def test_a_model_of_another_shape_is_refused_by_name():
    with pytest.raises(VitralError, match="the checkpoint has depth 2, the recipe 3"):
        transfer(checkpoint(), "plain", replace(CONFIG, depth=3), NAMES)


def test_early_blocks_learn_slower_by_the_layer_decay():
    model = ViT(CONFIG)
    optimizers = make_optimizers(model, OptimConfig(layer_decay=0.5))
    set_learning_rate(optimizers, 1.0)
    rates = {id(p): group["lr"] for o in optimizers for group in o.param_groups for p in group["params"]}
    named = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["head.out.weight"] == named["encoder.norm.weight"] == 1
    assert named["encoder.blocks.1.mlp.expand.weight"] == 0.5
    assert named["encoder.blocks.0.norm1.bias"] == 0.25
    assert named["patch_embedding.project.weight"] == named["class_token.token"] == 0.125


@pytest.fixture
def source(tmp_path: Path) -> Path:
    found = checkpoint()
    save_model(tmp_path / "source", found.build(), found.card)
    return tmp_path / "source"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, colour in (("blue", (20, 20, 220)), ("red", (220, 20, 20))):
        for index in range(12):
            save_photo(tmp_path / "photos" / name / f"{index}.png", colour, index)
    return tmp_path / "photos"


def moved_parts(before: Path, after: Path) -> set[str]:
    old, new = load_file(before / "weights.safetensors"), load_file(after / "model" / "weights.safetensors")
    return {name for name in old if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}


@pytest.mark.usefixtures("no_figures")
def test_training_from_a_checkpoint_takes_its_shape_and_its_preprocessing(source, photos, tmp_path):
    model = vitral.train(str(photos), init=str(source), epochs=2, out=tmp_path / "run")
    assert model.model_config.architecture.width == CONFIG.width
    assert model.model_config.preprocessing.mean == (0.4,) * 3
    assert model.model_config.preprocessing.crop == 0.9
    assert model.classes == ("blue", "red")


@pytest.mark.usefixtures("no_figures")
def test_a_frozen_backbone_stays_as_it_was(source, photos, tmp_path):
    vitral.train(str(photos), init=str(source), epochs=2, freeze="backbone", out=tmp_path / "run")
    assert moved_parts(source, tmp_path / "run") == {"head.out.weight", "head.out.bias"}


@pytest.mark.usefixtures("no_figures")
def test_frozen_blocks_stay_as_they_were(source, photos, tmp_path):
    vitral.train(str(photos), init=str(source), epochs=2, freeze="1", out=tmp_path / "run")
    moved = moved_parts(source, tmp_path / "run")
    assert not any(name.startswith(("encoder.blocks.0.", "patch_", "position_", "class_")) for name in moved)
    assert any(name.startswith("encoder.blocks.1.") for name in moved)


@pytest.mark.usefixtures("no_figures")
def test_a_run_begun_from_a_checkpoint_is_repeated_by_its_recipe(source, photos, tmp_path):
    vitral.train(str(photos), init=str(source), epochs=1, out=tmp_path / "a")
    vitral.train(recipe=tmp_path / "a" / "recipe.toml", out=tmp_path / "b")
    first, second = ((tmp_path / name / "model" / "weights.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_freeze_wants_backbone_or_a_number(source, photos, tmp_path):
    with pytest.raises(VitralError, match="freeze must be 'backbone' or a number of blocks, not 'all'"):
        vitral.train(str(photos), init=str(source), freeze="all", out=tmp_path / "run")


def test_a_checkpoint_that_is_not_there_is_named(photos, tmp_path):
    with pytest.raises(VitralError, match=r"nowhere\.safetensors"):
        vitral.train(str(photos), init="nowhere.safetensors", out=tmp_path / "run")


# ── the commands around a checkpoint ───────────────────────────────────────────────────────────────────────────


def vitral_command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return stop.value.code or 0


def test_probe_judges_features_without_training(source, photos, tmp_path, capsys):
    assert vitral_command("probe", photos, "--init-from", source, "--out", tmp_path / "probe.png") == 0
    printed = capsys.readouterr().out
    assert "nearest neighbours" in printed
    assert "linear" in printed
    assert " validation images, " in printed, "there are no test images"
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_embed_writes_what_the_head_would_see(source, photos, tmp_path, capsys):
    (photos / "red" / "broken.png").write_text("not an image")
    assert vitral_command("embed", source, photos / "red", "--out", tmp_path / "features.npy") == 1
    assert "broken.png: not an image" in capsys.readouterr().err
    features = np.load(tmp_path / "features.npy")
    names = (tmp_path / "features.names.txt").read_text().splitlines()
    model = vitral.load(source)
    with torch.inference_mode():
        pixels = model.model_config.preprocessing.resize_and_crop(Image.open(names[3]))
        expected = model.model.features(model.model_config.preprocessing.normalise(pixels[None]))
    assert features.shape == (12, 32)
    assert np.allclose(features[3], expected[0], atol=1e-4)


def test_embed_holds_a_few_batches_of_pictures_and_keeps_their_order(source, photos, tmp_path, monkeypatch):
    predictor, opened, seen = vitral.load(source), [], []
    real, features = predictor.decode_image, predictor.features
    monkeypatch.setattr(predictor, "open", lambda file: opened.append(file) or real(file))
    monkeypatch.setattr(
        predictor, "features", lambda images: seen.append((len(opened), len(images))) or features(images)
    )
    files = sorted((photos / "red").glob("*.png")) * 40
    made, troubles = vitral.embed(predictor, files, tmp_path / "features.npy")
    assert (made, troubles) == (len(files), [])
    batch = max(predictor.engine.batch_size, 8)
    assert sum(count for _, count in seen) == len(files) > 5 * batch
    assert all(count <= batch for _, count in seen)
    assert all(ahead <= 4 * batch + index * batch for index, (ahead, _) in enumerate(seen))
    assert (tmp_path / "features.names.txt").read_text().splitlines() == [str(file) for file in files]
    kept = np.load(tmp_path / "features.npy").reshape(40, -1, 32)
    assert np.allclose(kept, kept[:1], atol=1e-5), "the same picture, the same vector"


@pytest.mark.parametrize("family", ["timm", "transformers", "torchvision", "npz", "vit-pytorch"])
def test_convert_goes_there_and_back_or_says_why_not(source, tmp_path, capsys, family):
    there = tmp_path / ("there.npz" if family == "npz" else "there")
    code = vitral_command("convert", source, there, "--to", family)
    printed = capsys.readouterr()
    if code:
        assert printed.err.startswith("error: ")
        return
    assert f"written for {family}" in printed.out
    assert vitral_command("convert", there, tmp_path / "back", "--heads", 2) == 0
    images = torch.rand(2, 3, 32, 32)
    near = 1e-3 if family == "npz" else 1e-5  # Google's code computes GELU by its tanh approximation
    with torch.inference_mode():
        before, after = (vitral.load(path).model(images) for path in (source, tmp_path / "back"))
    assert torch.allclose(before, after, atol=near)


@pytest.mark.parametrize("command", ["train", "probe", "predict", "embed"])
def test_how_a_checkpoint_was_understood_is_shown_before_it_is_used(source, photos, tmp_path, capsys, command):
    vitral_command("convert", source, tmp_path / "bare.safetensors", "--to", "timm")
    capsys.readouterr()
    bare = tmp_path / "bare.safetensors"
    words = {
        "train": [photos, "--init-from", bare, "--epochs", 1, "--out", tmp_path / "run"],
        "probe": [photos, "--init-from", bare, "--json"],
        "predict": [bare, photos / "red", "--json"],
        "embed": [bare, photos / "red", "--out", tmp_path / "features.npy"],
    }[command]
    assert vitral_command(command, *words, "--heads", 2) == 0
    printed = capsys.readouterr()
    told = printed.out if command == "train" else printed.err
    for part in ("patches of 8", "heads: 2, as asked", "preprocessing ASSUMED"):
        assert part in told
    if "--json" in words:
        assert [json.loads(line) for line in printed.out.splitlines()]


@pytest.mark.parametrize("command", ["train", "probe", "predict", "embed", "push"])
def test_heads_that_the_tensors_do_not_tell_are_asked_for(source, photos, tmp_path, capsys, command):
    bare = tmp_path / "bare.safetensors"
    vitral_command("convert", source, bare, "--to", "timm")
    capsys.readouterr()
    words = {
        "train": [photos, "--init-from", bare, "--epochs", 1, "--out", tmp_path / "run"],
        "probe": [photos, "--init-from", bare],
        "predict": [bare, photos / "red"],
        "embed": [bare, photos / "red", "--out", tmp_path / "features.npy"],
        "push": [bare, "hf:me/mine", "--dry-run"],
    }[command]
    assert vitral_command(command, *words) == 2
    told = capsys.readouterr().err.splitlines()
    assert "the tensors do not tell how many heads a model of width 32 has" in told[0]
    assert "--heads N" in told[1]
    assert vitral_command(command, *words, "--heads", 2) == 0


def test_predict_asks_a_checkpoint_of_another_library(source, photos, tmp_path, capsys):
    vitral_command("convert", source, tmp_path / "timm", "--to", "timm")
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    file = next((photos / "red").iterdir())
    capsys.readouterr()
    assert vitral_command("predict", tmp_path / "timm", file, "--labels", tmp_path / "names.txt", "--top", 3) == 0
    theirs = capsys.readouterr().out
    vitral_command("predict", source, file, "--top", 3)
    ours = capsys.readouterr().out
    for old, new in zip(NAMES, "xyz", strict=True):
        ours = ours.replace(f" {old} ", f" {new} ")
    assert theirs == ours


def test_heads_that_nobody_asked_for_are_not_called_asked_for():
    """A training reads a checkpoint twice, the second time with the heads of the recipe, which may be assumed ones."""
    notes: list[str] = []
    assert choose_heads(192, Asked(heads=3), None, "", notes, "x") == 3
    assert choose_heads(192, Asked(heads=6), None, "", notes, "x") == 6
    assert notes == ["heads: 3, usual at width 192: tensors do not tell", "heads: 6, as asked"]
