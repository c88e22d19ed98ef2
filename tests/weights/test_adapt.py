"""Weights adapted to another image size, patch size or set of classes, fine-tuning, and commands with checkpoints."""

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

import vitral
from support.photos import save_photo
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig, patchify
from vitral.runs.model_io import ModelConfig, save_model
from vitral.weights.adapt import adapt_channels, adapt_weights, resample_patch_kernels
from vitral.weights.checkpoint import Checkpoint

CONFIG = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=32, depth=2, heads=2)
CLASSES = ("ants", "bees", "wasps")


def make_checkpoint(config: ViTConfig = CONFIG) -> Checkpoint:
    torch.manual_seed(0)
    model = ViT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=(0.4,) * 3, std=(0.2,) * 3, crop=0.9)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=CLASSES, trained_on="x", epoch=1
    )
    return Checkpoint.from_model(model, model_config)


def build_model(config: ViTConfig, state: dict[str, torch.Tensor]) -> ViT:
    model = ViT(config).eval()
    model.load_state_dict(state)
    return model


def test_same_config_and_classes_give_the_same_logits():
    source = make_checkpoint()
    images = torch.rand(2, 3, 32, 32)
    adapted = adapt_weights(source, "plain", CONFIG, CLASSES)
    assert torch.equal(build_model(CONFIG, adapted.state)(images), source.build()(images))
    assert adapted.notes[-1] == "head: kept, it has all classes"


def test_head_rows_are_kept_by_class_name_and_new_rows_are_zero():
    source = make_checkpoint()
    config = replace(CONFIG, num_classes=4)
    adapted = adapt_weights(source, "plain", config, ("aphids", "bees", "ants", "moths"))
    logits, before = (
        build_model(config, adapted.state)(torch.ones(1, 3, 32, 32)),
        source.build()(torch.ones(1, 3, 32, 32)),
    )
    assert torch.allclose(logits[0, [1, 2]], before[0, [1, 0]])
    assert torch.equal(logits[0, [0, 3]], torch.zeros(2))
    assert "2 of 4 classes kept" in adapted.notes[-1]


def test_head_for_other_classes_is_zero():
    config = replace(CONFIG, num_classes=2)
    adapted = adapt_weights(make_checkpoint(), "plain", config, ("x", "y"))
    assert not build_model(config, adapted.state)(torch.rand(1, 3, 32, 32)).any()
    assert adapted.notes[-1] == "head: new"


def test_positions_are_resampled_to_another_image_size():
    source = make_checkpoint()
    config = replace(CONFIG, image_size=(48, 32))
    adapted = adapt_weights(source, "plain", config, CLASSES)
    images = torch.rand(1, 3, 48, 32)
    with pytest.warns(UserWarning, match="positions resampled"):
        expected = source.build()(images)
    assert torch.allclose(build_model(config, adapted.state)(images), expected, atol=1e-5)
    assert "positions resampled from 4×4 to 6×4" in adapted.notes


def test_resampled_kernels_preserve_dot_products_with_resized_patches():
    torch.manual_seed(0)
    kernels, patch = torch.randn(5, 3 * 64), torch.randn(1, 3, 8, 8)
    larger = F.interpolate(patch, size=(12, 12), mode="bilinear")
    before = patchify(patch, 8) @ kernels.T
    after = patchify(larger, 12) @ resample_patch_kernels(kernels, 8, 12).T
    assert torch.allclose(before, after, atol=1e-3)


def test_logits_are_similar_with_another_patch_size():
    source = make_checkpoint()
    config = replace(CONFIG, image_size=(64, 64), patch_size=16)
    model = build_model(config, adapt_weights(source, "plain", config, CLASSES).state)
    images = torch.rand(4, 3, 32, 32)
    larger = F.interpolate(images, size=(64, 64), mode="bilinear")
    assert torch.allclose(model(larger), source.build()(images), atol=1e-2)


def test_summed_kernels_treat_gray_images_like_gray_rgb_images():
    kernels, gray = torch.randn(5, 3 * 16), torch.randn(1, 1, 4, 4)
    colour = gray.expand(-1, 3, -1, -1)
    summed = adapt_channels(kernels, 3, 1)
    assert torch.allclose(patchify(gray, 4) @ summed.T, patchify(colour, 4) @ kernels.T, atol=1e-5)


def test_repeated_kernels_treat_six_equal_channels_like_three():
    kernels, channel = torch.randn(5, 3 * 16), torch.randn(1, 1, 4, 4)
    repeated = adapt_channels(kernels, 3, 6)
    expected = patchify(channel.expand(-1, 3, -1, -1), 4) @ kernels.T
    assert torch.allclose(patchify(channel.expand(-1, 6, -1, -1), 4) @ repeated.T, expected, atol=1e-5)


def test_other_depth_is_refused():
    with pytest.raises(VitralError, match="the checkpoint has depth 2, the recipe 3"):
        adapt_weights(make_checkpoint(), "plain", replace(CONFIG, depth=3), CLASSES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoint = make_checkpoint()
    save_model(tmp_path / "source", checkpoint.build(), checkpoint.model_config)
    return tmp_path / "source"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, colour in (("blue", (20, 20, 220)), ("red", (220, 20, 20))):
        for index in range(12):
            save_photo(tmp_path / "photos" / name / f"{index}.png", colour, index)
    return tmp_path / "photos"


def changed_tensors(before: Path, after: Path) -> set[str]:
    old, new = load_file(before / "weights.safetensors"), load_file(after / "model" / "weights.safetensors")
    return {name for name in old if old[name].shape != new[name].shape or not torch.equal(old[name], new[name])}


@pytest.mark.usefixtures("no_figures")
def test_fine_tuning_uses_architecture_and_preprocessing_of_the_checkpoint(source, photos, tmp_path):
    model = vitral.train(str(photos), init_from=str(source), epochs=2, out=tmp_path / "run")
    assert model.model_config.architecture.width == CONFIG.width
    assert model.model_config.preprocessing.mean == (0.4,) * 3
    assert model.model_config.preprocessing.crop == 0.9
    assert model.classes == ("blue", "red")


@pytest.mark.usefixtures("no_figures")
def test_frozen_backbone_does_not_change(source, photos, tmp_path):
    vitral.train(str(photos), init_from=str(source), epochs=2, tune="head", out=tmp_path / "run")
    assert changed_tensors(source, tmp_path / "run") == {"head.out.weight", "head.out.bias"}


@pytest.mark.usefixtures("no_figures")
def test_frozen_blocks_do_not_change(source, photos, tmp_path):
    vitral.train(str(photos), init_from=str(source), epochs=2, tune="last-1", out=tmp_path / "run")
    changed = changed_tensors(source, tmp_path / "run")
    assert not any(name.startswith(("encoder.blocks.0.", "patch_", "position_", "class_")) for name in changed)
    assert any(name.startswith("encoder.blocks.1.") for name in changed)


@pytest.mark.usefixtures("no_figures")
def test_fine_tuning_is_repeated_by_its_recipe(source, photos, tmp_path):
    vitral.train(str(photos), init_from=str(source), epochs=1, out=tmp_path / "a")
    vitral.train(recipe=tmp_path / "a" / "recipe.toml", out=tmp_path / "b")
    first, second = ((tmp_path / name / "model" / "weights.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_invalid_tune_is_refused(source, photos, tmp_path):
    with pytest.raises(VitralError, match=r"tune must be full, head, lora, bias or last-N .* got 'all'"):
        vitral.train(str(photos), init_from=str(source), tune="all", out=tmp_path / "run")


def test_missing_checkpoint_is_refused(photos, tmp_path):
    with pytest.raises(VitralError, match=r"nowhere\.safetensors"):
        vitral.train(str(photos), init_from="nowhere.safetensors", out=tmp_path / "run")


# ── commands with checkpoints ───────────────────────────────────────────────────────────────────────────


def run_command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return int(stop.value.code or 0)


def test_probe_evaluates_features_without_training(source, photos, tmp_path, capsys):
    (photos / "red" / "notes.txt").write_text("a note")
    assert run_command("probe", photos, "--init-from", source, "--out", tmp_path / "probe.png") == 0
    printed, errors = capsys.readouterr()
    assert f"  skipped 1 file: 1 not an image ({photos}/red/notes.txt)\n" in errors
    assert "nearest neighbours" in printed
    assert "linear" in printed
    assert " validation images, " in printed
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_embed_writes_the_input_of_the_head(source, photos, tmp_path, capsys):
    (photos / "red" / "broken.png").write_text("not an image")
    assert run_command("embed", source, photos / "red", "--out", tmp_path / "features.npy") == 1
    printed = capsys.readouterr()
    assert "broken.png: not an image" in printed.err
    assert f"file names in {tmp_path}/features.names.txt" in printed.out
    features = np.load(tmp_path / "features.npy")
    names = (tmp_path / "features.names.txt").read_text().splitlines()
    model = vitral.load(source)
    with torch.inference_mode():
        pixels = model.model_config.preprocessing.resize_and_crop(Image.open(names[3]))
        expected = model.model.features(model.model_config.preprocessing.normalise(pixels[None]))
    assert features.shape == (12, 32)
    assert np.allclose(features[3], expected[0], atol=1e-4)


def test_embed_holds_few_batches_and_keeps_the_order(source, photos, tmp_path, monkeypatch):
    predictor = vitral.load(source)
    decode_image, compute_features = predictor.decode_image, predictor.features
    decoded: list[Path] = []
    batches: list[tuple[int, int]] = []  # files decoded so far, and images in the batch

    def recording_decode_image(file):
        decoded.append(file)
        return decode_image(file)

    def recording_features(images):
        batches.append((len(decoded), len(images)))
        return compute_features(images)

    monkeypatch.setattr(predictor, "decode_image", recording_decode_image)
    monkeypatch.setattr(predictor, "features", recording_features)
    files = sorted((photos / "red").glob("*.png")) * 40
    assert vitral.embed(predictor, files, tmp_path / "features.npy") == (len(files), [], [])
    batch = max(predictor.engine.batch_size, 8)
    assert sum(count for _, count in batches) == len(files) > 5 * batch
    assert all(count <= batch for _, count in batches)
    assert all(ahead <= 4 * batch + index * batch for index, (ahead, _) in enumerate(batches))
    assert (tmp_path / "features.names.txt").read_text().splitlines() == [str(file) for file in files]
    features = np.load(tmp_path / "features.npy").reshape(40, -1, 32)
    assert np.allclose(features, features[:1], atol=1e-5)


@pytest.mark.parametrize("format_name", ["timm", "transformers", "torchvision", "npz", "vit-pytorch"])
def test_convert_round_trip_preserves_logits_or_is_refused(source, tmp_path, capsys, format_name):
    converted = tmp_path / ("converted.npz" if format_name == "npz" else "converted")
    code = run_command("convert", source, converted, "--to", format_name)
    printed = capsys.readouterr()
    if code:
        assert printed.err.startswith("error: ")
        return
    assert f"Wrote {converted} ({format_name} format)" in printed.out
    assert run_command("convert", converted, tmp_path / "back", "--heads", 2) == 0
    images = torch.rand(2, 3, 32, 32)
    atol = 1e-3 if format_name == "npz" else 1e-5  # npz models use the tanh GELU
    with torch.inference_mode():
        before, after = (vitral.load(path).model(images) for path in (source, tmp_path / "back"))
    assert torch.allclose(before, after, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "probe", "predict", "embed"])
def test_commands_print_how_a_checkpoint_is_interpreted(source, photos, tmp_path, capsys, command):
    run_command("convert", source, tmp_path / "bare.safetensors", "--to", "timm")
    capsys.readouterr()
    bare = tmp_path / "bare.safetensors"
    words = {
        "train": [photos, "--init-from", bare, "--epochs", 1, "--out", tmp_path / "run"],
        "probe": [photos, "--init-from", bare, "--json"],
        "predict": [bare, photos / "red", "--json"],
        "embed": [bare, photos / "red", "--out", tmp_path / "features.npy"],
    }[command]
    assert run_command(command, *words, "--heads", 2) == 0
    printed = capsys.readouterr()
    notes = printed.out if command == "train" else printed.err
    for part in ("patch size 8", "2 heads", "assumed: ", "crop 1 (--crop)"):
        assert part in notes
    if "--json" in words:
        assert [json.loads(line) for line in printed.out.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "probe", "predict", "embed", "push"])
def test_commands_need_heads_that_cannot_be_inferred(source, photos, tmp_path, capsys, command):
    bare = tmp_path / "bare.safetensors"
    run_command("convert", source, bare, "--to", "timm")
    capsys.readouterr()
    words = {
        "train": [photos, "--init-from", bare, "--epochs", 1, "--out", tmp_path / "run"],
        "probe": [photos, "--init-from", bare],
        "predict": [bare, photos / "red"],
        "embed": [bare, photos / "red", "--out", tmp_path / "features.npy"],
        "push": [bare, "hf:me/mine", "--dry-run"],
    }[command]
    assert run_command(command, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "the number of heads of a model of width 32 cannot be inferred" in lines[0]
    assert "--heads N" in lines[1]
    assert run_command(command, *words, "--heads", 2) == 0


def test_predict_with_a_checkpoint_of_another_library(source, photos, tmp_path, capsys):
    run_command("convert", source, tmp_path / "timm", "--to", "timm")
    (tmp_path / "names.txt").write_text("x\ny\nz\n")
    file = next((photos / "red").iterdir())
    capsys.readouterr()
    assert run_command("predict", tmp_path / "timm", file, "--labels", tmp_path / "names.txt", "--top", 3) == 0
    timm_output = capsys.readouterr().out
    run_command("predict", source, file, "--top", 3)
    expected = capsys.readouterr().out
    for old, new in zip(CLASSES, "xyz", strict=True):
        expected = expected.replace(f" {old} ", f" {new} ")
    assert timm_output == expected


@pytest.mark.parametrize("channels", [6, 9])
def test_image_that_repeats_the_rgb_channels_has_the_features_of_the_rgb_image(channels: int):
    source, config = make_checkpoint(), replace(CONFIG, channels=channels)
    adapted = adapt_weights(source, "plain", config, CLASSES)
    images = torch.randn(2, 3, 32, 32)
    features = build_model(config, adapted.state).features(images.repeat(1, channels // 3, 1, 1))
    assert torch.allclose(features, source.build().features(images), atol=1e-5)
    assert f"adapted from 3 to {channels} channels: repeated and scaled by 3/{channels}" in adapted.notes[0]


@pytest.mark.parametrize("channels", [2, 4, 5, 13])
def test_inflation_keeps_the_expected_activation(channels: int):
    """For channels with the same mean m, RGB gives m · sum(kernels); inflation keeps it for kernels of equal sum."""
    kernels = torch.randn(7, 1, 16).expand(-1, 3, -1).flatten(1)
    inflated = adapt_channels(kernels, 3, channels)
    assert torch.allclose(inflated.sum(dim=1), kernels.sum(dim=1), atol=1e-5)
