"""The model folder: weights.safetensors and config.json, saved, loaded, and refused if damaged or of another format."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.common import identical
from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.runs import model_io
from vitral.runs.model_io import ModelConfig, load_model, load_weights, save_model, save_weights
from vitral.runs.run import Run
from vitral.utils.atomic import atomic_write


@pytest.fixture
def config(recipe: Recipe) -> ModelConfig:
    return ModelConfig(
        architecture=recipe.model,
        preprocessing=Preprocessing(image_size=(8, 8), channels=1, mean=(0.25,), std=(0.5,), crop=0.9),
        classes=("a", "b", "ç", "d\n"),
        trained_on="textures",
        epoch=3,
    )


@pytest.fixture
def folder(tmp_path: Path, config: ModelConfig) -> Path:
    torch.manual_seed(0)
    save_model(tmp_path / "model", ViT(config.architecture), config)
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    content.pop("sha256", None)  # of the content before
    file.write_text(json.dumps(content))


def load_error(folder: Path) -> VitralError:
    with pytest.raises(VitralError) as caught:
        load_model(folder)
    return caught.value


def test_failed_write_keeps_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(path, {"w": torch.ones(3)})

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(VitralError, match=r"cannot write .*weights\.safetensors: No space left"):
        save_weights(path, {"w": torch.zeros(3)})
    assert torch.equal(load_weights(path)["w"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]


def test_config_and_weights_have_the_same_permissions(tmp_path: Path) -> None:
    """A server under another user must be able to read both."""
    atomic_write(tmp_path / "config.json", "{}")
    save_weights(tmp_path / "weights.safetensors", {"w": torch.ones(3)})
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_weights_of_any_layout_and_dtype_round_trip(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "": torch.ones(()),
    }
    save_weights(tmp_path / "w.safetensors", tensors)
    assert identical(load_weights(tmp_path / "w.safetensors"), tensors)


def test_model_round_trip_from_the_model_or_the_run_folder(folder: Path, config: ModelConfig) -> None:
    torch.manual_seed(0)
    expected = ViT(config.architecture).state_dict()
    for path in (folder, str(folder), folder.parent):
        model, loaded_config = load_model(path)
        assert loaded_config == config
        assert identical(model.state_dict(), expected)
        assert not model.training
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights.safetensors"]
    content = json.loads((folder / "config.json").read_text())
    assert (content["format"], content["vitral_version"]) == (2, __version__)


def test_interrupted_save_leaves_no_model(tmp_path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(tmp_path, "tiny")

    def fail_on_config(path: Path, content: bytes | str) -> None:
        if path.name == "config.json":
            raise VitralError("disk full", "free some space")
        atomic_write(path, content)

    monkeypatch.setattr(model_io, "atomic_write", fail_on_config)
    with pytest.raises(VitralError, match="disk full"):
        save_model(run.model_dir, ViT(config.architecture), config)
    assert not run.has_model
    monkeypatch.undo()
    save_model(run.model_dir, ViT(config.architecture), config)
    assert run.has_model


@pytest.mark.parametrize(("version", "written_by"), [(1, None), (9, "9.0")])
def test_model_of_another_format_is_refused_in_two_lines(folder: Path, version: int, written_by: str | None) -> None:
    edit_config(folder, format=version, vitral_version=written_by)
    error = load_error(folder)
    assert f"has format {version}" in error.what
    assert error.what.endswith("this version of vitral reads format 2")
    assert error.hint == "Train again, or use the version of vitral that wrote it"
    if written_by:
        assert f"(written by vitral {written_by})" in error.what
    assert str(error).count("\n") == 1


def test_model_folder_in_the_layout_of_format_1_is_refused(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    architecture = content.pop("architecture")
    architecture["classes"] = architecture.pop("num_classes")
    calibration = {"temperature": 1.0, "score": "energy", "fitted_on": "the validation images"}
    del content["vitral_version"]
    content |= {"format": 1, "made_by": "vitral 0.1.0", "architecture": architecture, "calibration": calibration}
    (folder / "config.json").write_text(json.dumps(content))
    assert "has format 1; this version of vitral reads format 2" in load_error(folder).what


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '{"vitral_version": "x"}', "\udcff"])
def test_damaged_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    error = load_error(folder)
    assert error.what.startswith(f"cannot read {folder / 'config.json'}")
    assert "\n" not in error.what
    assert error.hint


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"epoch": "three"}, "epoch must be int"),
        ({"colour": "red"}, "no field named 'colour'"),
        ({"classes": ["a", "b"]}, "classes has 2 names, but architecture.num_classes is 4"),
        ({"architecture": {"width": 15, "heads": 4}}, "width must be a multiple"),
    ],
)
def test_invalid_config_names_the_field(folder: Path, changes: dict[str, Any], expected: str) -> None:
    edit_config(folder, **changes)
    error = load_error(folder)
    assert str(folder / "config.json") in error.what
    assert expected in error.what


def test_folder_without_config_is_not_a_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "contains neither a run nor a model" in load_error(folder).what


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    assert load_error(folder).what == f"{folder / 'weights.safetensors'} is missing"


@pytest.mark.parametrize("damage", ["empty", "header", "half", "last byte", "git-lfs pointer", "folder"])
def test_damaged_weights_are_named(folder: Path, damage: str) -> None:
    path = folder / "weights.safetensors"
    content = path.read_bytes()
    lengths = {"empty": 0, "header": 4, "half": len(content) // 2, "last byte": -1}
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "git-lfs pointer":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    else:
        path.write_bytes(content[: lengths[damage]])
    error = load_error(folder)
    assert error.what.startswith(f"{path} is not a complete safetensors file")
    assert "\n" not in error.what


def test_missing_extra_and_misshaped_tensors_are_listed(folder: Path) -> None:
    path = folder / "weights.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != "head.out.bias"}, path)
    error = load_error(folder)
    assert error.what.endswith("(1 tensors differ)")
    assert error.hint == "First differences: head.out.bias (missing)"
    save_file(tensors | {"surplus": torch.zeros(1)}, path)
    assert load_error(folder).hint == "First differences: surplus (not in the model)"
    save_file(tensors | {"head.out.weight": torch.zeros(3, 16)}, path)
    assert load_error(folder).hint == "First differences: head.out.weight (3×16, expected 4×16)"
    save_file({f"x{index}": torch.zeros(1) for index in range(9)}, path)
    error = load_error(folder)
    assert f"({len(tensors) + 9} tensors differ)" in error.what
    assert len(error.hint) < 200


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "weights.safetensors")
    tensors["encoder.norm.bias"][:2] = torch.tensor([float("nan"), float("-inf")])
    save_file(tensors, folder / "weights.safetensors")
    count = tensors["encoder.norm.bias"].numel()
    assert f"2 of {count} values of encoder.norm.bias are NaN or infinite" in load_error(folder).what


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 2**20}, "does not match config.json"),
        ({"width": 2**40}, "width must be an integer from 1 to 1,048,576"),
        ({"depth": 2**19}, "too few for depth 524,288 of config.json"),
        ({"mlp_width": 2**62}, "mlp_width must be"),
        ({"image_size": [2**40, 2**40]}, "image_size must give at most 1,048,576 patches"),
        ({"channels": 3}, "preprocessing.channels is 1, but architecture.channels is 3"),
    ],
)
def test_sizes_of_a_damaged_config_are_checked_before_the_model_is_built(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    architecture = json.loads((folder / "config.json").read_text())["architecture"]
    edit_config(folder, architecture=architecture | changes)
    assert reason in str(load_error(folder))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_size": [2**30, 8]}, "preprocessing.image_size must be from 1 to 16,384 pixels"),
        ({"image_size": [9, 9]}, "is not divisible by the patch size"),
        ({"mean": [float("nan")]}, "preprocessing.mean must be finite"),
    ],
)
def test_preprocessing_of_a_damaged_config_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    preprocessing = json.loads((folder / "config.json").read_text())["preprocessing"]
    edit_config(folder, preprocessing=preprocessing | changes)
    assert reason in str(load_error(folder))


def test_extra_block_in_the_weights_does_not_set_the_depth(folder: Path) -> None:
    tensors = load_file(folder / "weights.safetensors")
    save_file(tensors | {"encoder.blocks.99999999.norm1.bias": torch.zeros(1)}, folder / "weights.safetensors")
    assert load_error(folder).hint == "First differences: encoder.blocks.99999999.norm1.bias (not in the model)"


def test_gelu_of_older_configs_is_read_as_the_activation(folder: Path) -> None:
    architecture = json.loads((folder / "config.json").read_text())["architecture"]
    del architecture["activation"]
    for gelu, activation in (("exact", "gelu"), ("tanh", "gelu_tanh")):
        edit_config(folder, architecture=architecture | {"gelu": gelu})
        assert load_model(folder)[1].architecture.activation == activation
