"""Encoders without a classifier: embed, probe and fine-tuning use them; predict says that there are no classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.references import randomize_weights, transformers
from vitral import weights
from vitral.cli import main as cli
from vitral.kernels.encoder import unsupported_architecture
from vitral.models.vit import ViTConfig

SIZES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return int(stop.value.code or 0)


def save_tower(family: str, folder: Path) -> Any:
    config = getattr(transformers, f"{family}VisionConfig")(**SIZES)
    tower = randomize_weights(getattr(transformers, f"{family}VisionModel")(config))
    tower.save_pretrained(folder)
    return tower


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_embed_writes_the_features_of_the_reference(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tower = save_tower(family, tmp_path / "tower")
    noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(tmp_path / "image.png")
    assert run("embed", tmp_path / "tower", tmp_path / "image.png", "--out", tmp_path / "features.npy") == 0
    preprocessing = weights.read(tmp_path / "tower").preprocessing
    with torch.inference_mode():
        expected = tower(preprocessing.normalise(noise.permute(2, 0, 1)[None])).pooler_output
    np.testing.assert_allclose(np.load(tmp_path / "features.npy"), expected.numpy(), atol=1e-4)
    capsys.readouterr()
    assert run("predict", tmp_path / "tower", tmp_path / "image.png") == 2
    *_, what, hint = capsys.readouterr().err.splitlines()
    assert "has no classification head" in what
    assert "vitral train DATA --init-from" in hint
    model = weights.read(tmp_path / "tower").build()
    assert unsupported_architecture(model) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_probe_and_fine_tuning_start_from_a_tower(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tower(family, tmp_path / "tower")
    assert run("probe", "digits", "--init-from", tmp_path / "tower") == 0
    assert "nearest" in capsys.readouterr().out.lower()
    assert run("train", "digits", "--init-from", tmp_path / "tower", "--epochs", 1, "--out", tmp_path / "run") == 0
    checkpoint = weights.read(tmp_path / "run")
    assert len(checkpoint.classes or ()) == 10
    assert checkpoint.config.pre_norm == (family == "CLIP")
    weights.write(checkpoint, tmp_path / "timm", to="timm")
    assert isinstance(weights.read(tmp_path / "timm").config, ViTConfig)
