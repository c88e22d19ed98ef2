"""Checkpoints that cannot be used, in every command that reads one: two lines, exit status 2, no files left."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data.files.test_listing import photograph
from vitral import weights
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

CONFIG = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=192, depth=1, heads=3)


class Code:
    """A malicious pickle: loading it would create a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, (str(self.trace), "w"))


def whole(path: Path) -> Path:
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelConfig(architecture=CONFIG, preprocessing=seen, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(CONFIG), card), path, to="timm")
    return path


def truncated(place: Path) -> Path:
    file = whole(place / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    return file


def hostile(place: Path) -> Path:
    (place / "model.pth").write_bytes(pickle.dumps({"state_dict": Code(place / "trace")}))
    return place / "model.pth"


def renamed(place: Path) -> Path:
    (place / "model.safetensors").write_text("this is a text about a model, not a model\n" * 20)
    return place / "model.safetensors"


def resnet(place: Path) -> Path:
    tensors = {"conv1.weight": torch.zeros(64, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(64, 64, 3, 3)}
    save_file(tensors, place / "model.safetensors")
    return place / "model.safetensors"


def swin(place: Path) -> Path:
    tensors = {
        "patch_embed.proj.weight": torch.zeros(96, 3, 4, 4),
        "layers.0.blocks.0.attn.relative_position_bias_table": torch.zeros(169, 3),
    }
    save_file(tensors, place / "model.safetensors")
    return place / "model.safetensors"


def hybrid(place: Path) -> Path:
    torch.save({"patch_embed.backbone.stem.conv.weight": torch.zeros(64, 3, 7, 7)}, place / "model.pth")
    return place / "model.pth"


def halved(place: Path) -> Path:
    from safetensors.torch import load_file

    tensors = load_file(whole(place / "whole.safetensors"))
    save_file({name: tensor for name, tensor in tensors.items() if "norm2" not in name}, place / "model.safetensors")
    return place / "model.safetensors"


def absent(place: Path) -> Path:
    return place / "nowhere.safetensors"


BAD = {
    truncated: "cannot be read",
    hostile: "would run code when opened",
    renamed: "is not a file of weights",
    resnet: "is not a Vision Transformer of a family that vitral reads",
    swin: "relative positions",
    hybrid: "a convolutional network before its patches",
    halved: "does not match a timm ViT: 2 missing",
    absent: "there is no file or folder",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("photos")
    for index in range(8):
        photograph(place / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    return place


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command and return its error: two lines, exit status 2."""

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(word) for word in words])
        said = capsys.readouterr().err
        assert stop.value.code == 2, said
        lines = said.splitlines()
        assert len(lines) == 2, said
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("       ")
        return said

    return run


@pytest.mark.parametrize("command", ["convert", "train", "probe", "predict", "embed", "push"])
@pytest.mark.parametrize(("make", "what"), BAD.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_unusable_checkpoints_are_refused_in_two_lines(command, make, what, photos, tmp_path, refused):
    source = make(tmp_path)
    words = {
        "convert": [source, tmp_path / "there"],
        "train": [photos, "--init-from", source, "--out", tmp_path / "run"],
        "probe": [photos, "--init-from", source],
        "predict": [source, photos / "ants"],
        "embed": [source, photos / "ants", "--out", tmp_path / "features.npy"],
        "push": [source, "hf:me/mine", "--dry-run", "--folder", tmp_path / "pushed"],
    }[command]
    said = refused(command, *words)
    assert what in said or (make is absent and "nowhere.safetensors" in said)
    assert not (tmp_path / "trace").exists(), "the pickle ran"
    for left in ("there", "run", "features.npy", "pushed"):
        assert not (tmp_path / left).exists()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--model.image-size", 36], "image height 36 is not a multiple of patch_size 8; 32 and 40 are"),
        (["--model.depth", 2], "the checkpoint has depth 1, the recipe 2"),
        (["--heads", 5], "cannot be shared by 5 heads"),
        (["--heads", "many"], "--heads"),
    ],
)
def test_mismatch_of_recipe_and_checkpoint_is_refused(flags, what, photos, tmp_path, refused):
    assert what in refused(
        "train", photos, "--init-from", whole(tmp_path / "a.safetensors"), *flags, "--out", tmp_path / "run"
    )


def test_image_size_that_does_not_match_the_positions_is_refused(tmp_path, refused):
    words = ["convert", whole(tmp_path / "a.safetensors"), tmp_path / "there", "--image-size", 64, 32]
    assert "17 positions do not fit images of 64×32" in refused(*words)


@pytest.mark.parametrize("command", ["train", "predict"])
def test_missing_network_is_reported_in_two_lines(command, photos, monkeypatch, refused):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    words = [photos, "--init-from", "hf:me/absent"] if command == "train" else ["hf:me/absent", photos]
    assert "no network?" in refused(command, *words)


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_exported_model_is_recognised(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04 or whatever")
    with pytest.raises(VitralError, match="is an exported model: it gives answers") as refused:
        weights.read(tmp_path / name)
    assert "the run it was exported from" in refused.value.hint
