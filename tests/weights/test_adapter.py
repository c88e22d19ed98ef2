"""adapter.safetensors: with its base it is the run's model; other bases and damaged files are refused in two lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitral
from support.common import Command, skip_figures
from support.photos import save_photo
from vitral import weights
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.runs.model_io import ModelConfig, load_model, save_model

CONFIG = ViTConfig(image_size=(16, 16), patch_size=4, num_classes=2, width=16, depth=2, heads=2)
TUNES = ("lora", "last-1")


def save_base(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.4,) * 3, std=(0.2,) * 3)
    config = ModelConfig(
        architecture=CONFIG, preprocessing=preprocessing, classes=("cat", "dog"), trained_on="pets", epoch=1
    )
    save_model(folder, ViT(CONFIG), config)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, other base, and one run per `tune`."""
    parent = tmp_path_factory.mktemp("adapters")
    for name, colour in (("blue", (20, 20, 220)), ("red", (220, 20, 20)), ("green", (20, 220, 20))):
        for index in range(8):
            save_photo(parent / "photos" / name / f"{index}.png", colour, index)
    save_base(parent / "base", seed=0)
    save_base(parent / "other", seed=1)
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        for tune in TUNES:
            vitral.train(str(parent / "photos"), init_from=str(parent / "base"), tune=tune, epochs=1, out=parent / tune)
    return parent


def adapter_of(folder: Path, tune: str = "lora") -> Path:
    return folder / tune / "model" / "adapter.safetensors"


@pytest.mark.parametrize("tune", TUNES)
def test_base_and_adapter_are_the_model_of_the_run(folder: Path, tune: str) -> None:
    merged, config = load_model(folder / tune)
    options = CheckpointOptions(adapter=str(adapter_of(folder, tune)))
    checkpoint = weights.read(folder / "base", options)
    assert checkpoint.classes == config.classes == ("blue", "green", "red")
    assert checkpoint.preprocessing == config.preprocessing
    for name, tensor in merged.state_dict().items():
        assert torch.equal(checkpoint.state[name], tensor), name
    assert vitral.load(folder / "base", options=options).classes == config.classes


@pytest.mark.parametrize("tune", TUNES)
def test_adapters_hold_only_what_was_trained(folder: Path, tune: str) -> None:
    names = set(load_file(adapter_of(folder, tune)))
    assert {name for name in names if name.startswith("head.")} == {"head.out.weight", "head.out.bias"}
    others = {name for name in names if not name.startswith("head.")}
    is_trained = re.compile({"lora": r".*\.lora_[AB]\.weight", "last-1": r"encoder\.(blocks\.1|norm)\..*"}[tune])
    assert others
    assert all(map(is_trained.fullmatch, others))
    checkpoint = torch.load(next((folder / tune / "checkpoints").glob("step-*.pt")), weights_only=True)
    assert checkpoint["model"].keys() == checkpoint["ema"].keys() == names
    assert load_file(folder / tune / "checkpoints" / "best.safetensors").keys() == names


def test_metadata_states_rank_alpha_targets_and_the_base(folder: Path) -> None:
    with safe_open(adapter_of(folder), "pt") as file:
        metadata = file.metadata()
    assert metadata["tune"] == "lora"
    assert metadata["lora"] == (
        '{"rank": 8, "alpha": 16.0, "targets": ["qkv", "project", "expand", "contract"], "dropout": 0.0}'
    )
    assert (metadata["base"], metadata["base_sha256"]) == ("base", weights.read(folder / "base").sha256())


def test_convert_writes_the_merged_model(folder: Path, tmp_path: Path, command: Command) -> None:
    code, out, _ = command(
        "convert", folder / "base", tmp_path / "vit.safetensors", "--to", "timm", "--adapter", adapter_of(folder)
    )
    assert code == 0
    assert "merged the adapter adapter.safetensors: LoRA of rank 8, alpha 16, on qkv" in out
    images = torch.randn(2, 3, 16, 16)
    converted = weights.read(tmp_path / "vit.safetensors", CheckpointOptions(heads=2)).build()
    torch.testing.assert_close(converted(images), load_model(folder / "lora")[0](images))


def test_another_base_is_refused_and_the_right_one_named(folder: Path) -> None:
    with pytest.raises(VitralError, match=r"was trained on other weights than those of .*other\n.*: base \(SHA-256"):
        weights.read(folder / "other", CheckpointOptions(adapter=str(adapter_of(folder))))


def test_an_adapter_alone_is_not_a_model(folder: Path) -> None:
    with pytest.raises(VitralError, match=r"is an adapter, which needs the weights .*\n.*--adapter"):
        vitral.load(adapter_of(folder))


def rewrite(path: Path, copy: Path, drop: str = "", keep_digest: bool = True) -> Path:
    tensors = {name: tensor for name, tensor in load_file(path).items() if not drop or drop not in name}
    with safe_open(path, "pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if keep_digest or name != "sha256"}
    if not keep_digest:
        from vitral.runs.model_io import tensors_digest

        metadata["sha256"] = tensors_digest(tensors)
    save_file(tensors, copy, metadata=metadata)
    return copy


def test_damaged_and_incomplete_adapters_are_refused(folder: Path, tmp_path: Path) -> None:
    path, content = adapter_of(folder), adapter_of(folder).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-100])
    (tmp_path / "flipped.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    rewrite(path, tmp_path / "fewer.safetensors", drop="lora_B")
    rewrite(path, tmp_path / "signed.safetensors", drop="blocks.1.mlp.expand.lora_B", keep_digest=False)
    cases = {
        "cut": "cannot read the adapter",
        "flipped": "is damaged: its SHA-256 does not match",
        "fewer": "is damaged: its SHA-256 does not match",
        "signed": r"1 tensors differ\n.*blocks\.1\.mlp\.expand\.lora_B\.weight \(missing\)",
        "nothing": "cannot read the adapter",
    }
    for name, message in cases.items():
        with pytest.raises(VitralError, match=message):
            weights.read(folder / "base", CheckpointOptions(adapter=str(tmp_path / f"{name}.safetensors")))


def test_a_file_that_is_not_an_adapter_is_refused(folder: Path, command: Command) -> None:
    code, _, err = command(
        "predict", folder / "base", folder / "photos", "--adapter", folder / "base" / "weights.safetensors"
    )
    assert code == 2
    assert "is not an adapter of vitral" in err
    code, _, err = command("predict", folder / "base", folder / "photos", "--adapter", "missing.safetensors")
    assert (code, "no adapter file missing.safetensors" in err) == (2, True)
