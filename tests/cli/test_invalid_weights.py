"""Checkpoints that cannot be used, in every command that reads one: two lines, exit status 2, no files left."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.photos import save_photo
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


def timm_checkpoint(path: Path) -> Path:
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=CONFIG, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(CONFIG), model_config), path, to="timm")
    return path


def truncated(folder: Path) -> Path:
    file = timm_checkpoint(folder / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    return file


def malicious(folder: Path) -> Path:
    (folder / "model.pth").write_bytes(pickle.dumps({"state_dict": Code(folder / "trace")}))
    return folder / "model.pth"


def text_file(folder: Path) -> Path:
    (folder / "model.safetensors").write_text("this is a text about a model, not a model\n" * 20)
    return folder / "model.safetensors"


def resnet(folder: Path) -> Path:
    tensors = {"conv1.weight": torch.zeros(64, 3, 7, 7), "layer1.0.conv1.weight": torch.zeros(64, 64, 3, 3)}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def swin(folder: Path) -> Path:
    tensors = {
        "patch_embed.proj.weight": torch.zeros(96, 3, 4, 4),
        "layers.0.blocks.0.attn.relative_position_bias_table": torch.zeros(169, 3),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def hybrid(folder: Path) -> Path:
    torch.save({"patch_embed.backbone.stem.conv.weight": torch.zeros(64, 3, 7, 7)}, folder / "model.pth")
    return folder / "model.pth"


def incomplete(folder: Path) -> Path:
    from safetensors.torch import load_file

    tensors = load_file(timm_checkpoint(folder / "timm_checkpoint.safetensors"))
    save_file({name: tensor for name, tensor in tensors.items() if "norm2" not in name}, folder / "model.safetensors")
    return folder / "model.safetensors"


def missing(folder: Path) -> Path:
    return folder / "nowhere.safetensors"


UNUSABLE = {
    truncated: "cannot read",
    malicious: "it could execute code",
    text_file: "is not a weight file",
    resnet: "is not a Vision Transformer but a convolutional network",
    swin: "relative positions",
    hybrid: "convolutional stem before the patches",
    incomplete: "do not match a timm ViT: 2 missing",
    missing: "no file or folder",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for index in range(8):
        save_photo(folder / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command and return its error: two lines, exit status 2."""

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(word) for word in words])
        err = capsys.readouterr().err
        assert stop.value.code == 2, err
        lines = err.splitlines()
        assert len(lines) == 2, err
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("       ")
        return err

    return run


@pytest.mark.parametrize("command", ["convert", "train", "probe", "predict", "embed", "push"])
@pytest.mark.parametrize(("make", "what"), UNUSABLE.items(), ids=lambda value: getattr(value, "__name__", ""))
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
    err = refused(command, *words)
    assert what in err or (make is missing and "nowhere.safetensors" in err)
    assert not (tmp_path / "trace").exists(), "the pickle ran"
    for left in ("there", "run", "features.npy", "pushed"):
        assert not (tmp_path / left).exists()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--model.image-size", 36], "image height 36 is not divisible by the patch size 8"),
        (["--model.depth", 2], "the checkpoint has depth 1, the recipe 2"),
        (["--heads", 5], "is not divisible by 5 heads"),
        (["--heads", "many"], "--heads"),
    ],
)
def test_mismatch_of_recipe_and_checkpoint_is_refused(flags, what, photos, tmp_path, refused):
    assert what in refused(
        "train", photos, "--init-from", timm_checkpoint(tmp_path / "a.safetensors"), *flags, "--out", tmp_path / "run"
    )


def test_image_size_that_does_not_match_the_positions_is_refused(tmp_path, refused):
    words = ["convert", timm_checkpoint(tmp_path / "a.safetensors"), tmp_path / "there", "--image-size", 64, 32]
    assert "17 positions do not fit images of 64×32" in refused(*words)


@pytest.mark.parametrize("command", ["train", "predict"])
def test_missing_network_is_reported_in_two_lines(command, photos, monkeypatch, refused):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    words = [photos, "--init-from", "hf:me/missing"] if command == "train" else ["hf:me/missing", photos]
    assert "Check the network connection" in refused(command, *words)


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_exported_model_is_recognised(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04 or whatever")
    with pytest.raises(VitralError, match="is an exported model") as refused:
        weights.read(tmp_path / name)
    assert "the run that it was exported from" in refused.value.hint
