"""A pretraining run that takes a fraction of a second, and helpers for tests of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from support.common import textures
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.ssl.config import PretrainConfig
from vitral.ssl.dino import DINOConfig
from vitral.ssl.lejepa import LeJEPAConfig
from vitral.ssl.mae import MAEConfig
from vitral.ssl.moco import MoCoConfig
from vitral.ssl.views import ViewConfig

METHODS = ("lejepa", "moco", "dino", "mae")
CENTER = {"pretrain.method": "dino", "pretrain.dino.balance": "center"}

PRETRAIN_RECIPE = Recipe(
    name="tiny-pretrain",
    data=DataConfig(name="textures", validation=0.0),
    model=ViTConfig(
        image_size=(16, 16), patch_size=8, channels=1, num_classes=1, width=32, depth=1, heads=2,
        pooling="mean", positions="learned+rotary", dropout=0.1, drop_path=0.1,
    ),
    pretrain=PretrainConfig(
        views=ViewConfig(local_views=1),
        lejepa=LeJEPAConfig(directions=16, hidden_width=16, width=8),
        moco=MoCoConfig(hidden_width=16, width=8, momentum=0.5),
        dino=DINOConfig(prototypes=16, hidden_width=16, bottleneck=8, momentum=0.5),
        mae=MAEConfig(decoder_width=32, decoder_depth=1),
    ),
    optim=OptimConfig(lr=1e-3),
    epochs=3,
    batch_size=12,
    device="cpu",
    threads=1,
    precision="fp32",
    compile="no",
)  # fmt: skip

# The command line of a run of nine steps, without the images and the folder. A checkpoint follows each step.
TINY_FLAGS = (
    "--model.image-size", 16, 16, "--model.patch-size", 8, "--model.width", 32, "--model.depth", 1, "--model.heads", 2,
    "--batch-size", 8, "--epochs", 3, "--views.local-views", 1, "--device", "cpu", "--threads", 1,
    "--lejepa.hidden-width", 16, "--lejepa.directions", 16, "--moco.hidden-width", 16, "--dino.hidden-width", 16,
    "--dino.prototypes", 16, "--mae.decoder-width", 32, "--checkpoint-minutes", 0,
)  # fmt: skip


def unlabelled_textures(count: int = 36, size: int = 16, channels: int = 1) -> Dataset:
    """A dataset as `vitral.data.unlabelled` loads it: no classes, all images in the training split."""
    train = textures(count, seed=1, size=size, channels=channels)
    empty = Split(images=train.images[:0], labels=train.labels[:0])
    return Dataset(
        name="textures",
        classes=(),
        train=Split(images=train.images, labels=torch.zeros(count, dtype=torch.int64)),
        validation=empty,
        source="synthetic",
        fingerprint="0123456789abcdef",
        load_test=lambda: empty,
    )


def preprocessing_for(dataset: Dataset, recipe: Recipe) -> Preprocessing:
    mean, std = channel_stats(dataset.train.images)
    return Preprocessing(image_size=recipe.model.image_size, channels=recipe.model.channels, mean=mean, std=std)


def save_textures(folder: Path, count: int = 24, size: int = 20) -> Path:
    """Save RGB images of four kinds in subfolders, one per kind; returns `folder`."""
    split = textures(count, seed=5, size=size, channels=3)
    for index, (image, label) in enumerate(zip(split.images, split.labels.tolist(), strict=True)):
        path = folder / "abcd"[label] / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return folder


def save_arrays(folder: Path, channels: int, count: int = 12, size: int = 20) -> Path:
    """Save uint8 arrays with any number of channels as .npy files; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(textures(count, seed=6, size=size, channels=channels).images):
        np.save(folder / f"{index:02}.npy", image.numpy())
    return folder


def flatten_state(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a nested state dict, by their path."""
    if isinstance(state, Tensor):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {path: tensor for key, value in items for path, tensor in flatten_state(value, f"{prefix}/{key}").items()}
