"""The flags that state what another library's checkpoint does not contain, on every command that reads one."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from support.references import VisionTransformer, randomize_weights
from vitral import weights
from vitral.cli import main as cli
from vitral.recipes.checkpoint_options import CheckpointOptions, flag_name
from vitral.recipes.schema import read_recipe
from vitral.runs.model_io import load_model_config

COMMANDS = (
    "bench", "convert", "embed", "evaluate", "explain", "export", "predict", "probe", "push", "report", "serve",
    "train", "walk",
)  # fmt: skip
SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 2}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A timm file with ReLU and mean pooling, neither of which its tensors show."""
    torch.manual_seed(0)
    model = randomize_weights(VisionTransformer(**SIZES, act_layer="relu", global_pool="avg", fc_norm=False))
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    return tmp_path / "bare.safetensors"


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return int(stop.value.code or 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_the_flags_of_every_option(name: str) -> None:
    flags = {flag.name for flag in import_module(f"vitral.cli.commands.{name}").COMMAND.flags}
    assert {flag_name(field.name) for field in dataclasses.fields(CheckpointOptions)} <= flags


def test_convert_stores_the_given_settings(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--heads", 2, "--activation", "relu", "--pooling", "mean", "--norm-eps", 1e-5, "--image-size", 16]
    flags += ["--mean", 0.1, 0.2, 0.3, "--std", 0.4, "--crop", 0.8, "--interpolation", "bilinear"]
    assert run("convert", bare, tmp_path / "model", *flags) == 0
    config = load_model_config(tmp_path / "model" / "config.json")
    assert (config.architecture.activation, config.architecture.pooling) == ("relu", "mean")
    assert config.architecture.norm_eps == 1e-5
    assert (config.preprocessing.mean, config.preprocessing.std) == ((0.1, 0.2, 0.3), (0.4, 0.4, 0.4))
    assert (config.preprocessing.crop, config.preprocessing.interpolation) == (0.8, "bilinear")
    assert "assumed: no rotary positions\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--crop", 2], "error: --crop must be above 0 and at most 1, got 2.0"),
        (["--heads", 0], "error: --heads must be at least 1, got 0"),
        (["--pooling", "max"], "error: --pooling: expected one of class, mean, attention, got 'max'"),
        (["--image-size", 12, 12], "positions do not fit images of 12×12"),
    ],
)
def test_invalid_value_is_an_error_of_two_lines(
    words: list[object], message: str, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [] if "--heads" in words else ["--heads", 2]
    assert run("convert", bare, tmp_path / "model", *heads, *words) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 2


@pytest.mark.usefixtures("no_figures")
def test_training_records_the_options_and_repeats_with_them(
    bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    for label, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (photos / label).mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (16, 16), (colour[0], 10 * index, colour[2])).save(photos / label / f"{index}.png")
    flags = ["--heads", 2, "--activation", "relu", "--pooling", "mean", "--mean", 0.3, "--crop", 0.9]
    assert run("train", photos, "--init-from", bare, *flags, "--epochs", 1, "--out", tmp_path / "first") == 0
    assert "assumed: square images of 16×16 (--image-size), no rotary positions" in capsys.readouterr().out
    recipe = read_recipe(tmp_path / "first" / "recipe.toml")
    assert recipe.init_options == CheckpointOptions(heads=2, activation="relu", pooling="mean", mean=(0.3,), crop=0.9)
    assert (recipe.model.activation, recipe.data.mean, recipe.data.crop) == ("relu", (0.3, 0.3, 0.3), 0.9)
    assert run("train", "--recipe", tmp_path / "first" / "recipe.toml", "--out", tmp_path / "second") == 0
    states = [weights.read(tmp_path / name).state for name in ("first", "second")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_flags_of_a_checkpoint_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "digits", "--crop", 0.9) == 2
    printed = capsys.readouterr().err
    assert (
        printed == "error: --crop describes a checkpoint (--init-from)\n       Set the model's own with --data.crop\n"
    )
