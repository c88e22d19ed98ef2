"""A working folder as a reader of the documentation has it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vitral
from support.common import skip_figures
from support.photos import save_photo
from vitral import weights
from vitral.data.preprocess import Preprocessing
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

SMALL_MODEL: dict[str, Any] = {"model.width": 32, "model.depth": 2, "model.heads": 2}


@pytest.fixture(scope="module")
def reader_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos/` with two classes, images, the runs `runs/mine` and `runs/other`, and a timm checkpoint."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "folder").mkdir()
    (folder / "names.txt").write_text("ants\nbees\nwasps\n")
    for name in ("photo.png", "folder/a.png"):
        Image.new("L", (64, 48), 128).save(folder / name)
    for index in range(24):
        save_photo(folder / "photos" / ("ants", "bees")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    run = folder / "runs" / "mine"
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_figures(monkeypatch)
        vitral.train("digits", epochs=1, out=run, **SMALL_MODEL)
    shutil.copytree(run, folder / "runs" / "other")
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=192, depth=1, heads=3)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), folder / "model.safetensors", to="timm")
    return folder
