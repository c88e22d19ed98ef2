"""Tiny teachers, students and images for the tests of distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from support.models import randomize_weights
from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import SINGLE_PROCESS
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, save_model
from vitral.ssl.distillation import FeatureDistillation, FeatureDistillConfig
from vitral.ssl.teacher import Teacher
from vitral.ssl.views import ViewConfig
from vitral.weights.checkpoint import NO_HEAD

TEACHER = ViTConfig(image_size=(16, 16), patch_size=4, num_classes=2, width=24, depth=2, heads=2)
STUDENT = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=1, width=16, depth=2, heads=2)
VIEWS = ViewConfig(global_views=1, local_views=0)
# Recipe overrides for a run of a second: 16 images of 16 x 16 pixels, four steps per epoch.
TINY_RUN: dict[str, Any] = {
    "model.image_size": (16, 16), "model.patch_size": 8, "model.width": 16, "model.depth": 2, "model.heads": 2,
    "batch_size": 4, "epochs": 3, "checkpoint_epochs": 1, "device": "cpu", "precision": "fp32", "threads": 1,
}  # fmt: skip


def preprocessing_of(config: ViTConfig, mean: float = 0.5, std: float = 0.25, **fields: Any) -> Preprocessing:
    C = config.channels
    return Preprocessing(image_size=config.image_size, channels=C, mean=(mean,) * C, std=(std,) * C, **fields)


def tiny_teacher(config: ViTConfig = TEACHER, variant: str = "plain", **fields: Any) -> Teacher:
    vit = randomize_weights(VARIANTS[variant](config))
    return Teacher(vit, preprocessing_of(config), name="tiny", sha256="0" * 64, **fields)


def tiny_distillation(
    teacher: Teacher | None = None, student: ViTConfig = STUDENT, variant: str = "plain", **options: Any
) -> FeatureDistillation:
    torch.manual_seed(0)
    vit = VARIANTS[variant](student)
    config = FeatureDistillConfig(**options)
    teacher = teacher or tiny_teacher()
    return FeatureDistillation(config, vit, preprocessing_of(student), VIEWS, SINGLE_PROCESS, teacher)


def save_teacher(
    folder: Path, config: ViTConfig = TEACHER, classes: tuple[str, ...] = ("ants", "bees"), seed: int = 0, **fields: Any
) -> Path:
    """A model folder with random weights."""
    names = classes or (NO_HEAD,)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing_of(config), classes=names, trained_on="x", epoch=1, **fields
    )
    save_model(folder, randomize_weights(ViT(config), seed), model_config)
    return folder


def save_photos(folder: Path, count: int = 16, classes: tuple[str, ...] = ("ants", "bees"), mode: str = "RGB") -> Path:
    """Class folders of 16 x 16 pixels whose classes differ in brightness."""
    rng = np.random.default_rng(0)
    for index in range(count):
        name = classes[index % len(classes)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        shape = (16, 16) if mode == "L" else (16, 16, len(mode))
        pixels = rng.integers(0, 120, shape) + 120 * (index % len(classes)) // max(len(classes) - 1, 1)
        Image.fromarray(pixels.astype(np.uint8), mode=None).save(folder / name / f"{index}.png")
    return folder


def random_views(config: ViTConfig = STUDENT, count: int = 6, seed: int = 1) -> Tensor:
    """Normalised views, B 1 C H W."""
    shape = (count, 1, config.channels, *config.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
