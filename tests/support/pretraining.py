"""Tiny pretraining methods and images for the tests of vitral.ssl."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.models.vit import ViT, ViTConfig
from vitral.ssl.config import PretrainConfig
from vitral.ssl.dino import DINOConfig
from vitral.ssl.lejepa import LeJEPAConfig
from vitral.ssl.mae import MAEConfig
from vitral.ssl.method import PretrainMethod
from vitral.ssl.methods import make_method
from vitral.ssl.moco import MoCoConfig
from vitral.ssl.views import ViewConfig

METHOD_NAMES = ("lejepa", "moco", "dino", "mae")
WITH_TEACHER = ("moco", "dino")
VIT = ViTConfig(image_size=(16, 16), patch_size=4, channels=3, num_classes=4, width=16, depth=2, heads=2)
TINY = PretrainConfig(
    views=ViewConfig(local_views=2, local_size=0.5),
    lejepa=LeJEPAConfig(directions=8, hidden_width=32, width=8),
    moco=MoCoConfig(hidden_width=32, width=8),
    dino=DINOConfig(prototypes=24, hidden_width=32, bottleneck=8),
    mae=MAEConfig(decoder_width=32, decoder_depth=1),
)


def tiny_method(
    name: str,
    vit: ViTConfig = VIT,
    *,
    options: dict[str, Any] | None = None,
    world: World = SINGLE_PROCESS,
    seed: int = 0,
) -> PretrainMethod:
    """A method with a tiny ViT; `options` are fields of the method's configuration."""
    torch.manual_seed(seed)
    config = replace(TINY, method=name, **{name: replace(getattr(TINY, name), **options or {})})
    return make_method(config, ViT(vit), preprocessing_of(vit), world)


def preprocessing_of(vit: ViTConfig, **fields: Any) -> Preprocessing:
    C = vit.channels
    return Preprocessing(image_size=vit.image_size, channels=C, mean=(0.5,) * C, std=(0.25,) * C, **fields)


def random_images(vit: ViTConfig = VIT, count: int = 6, seed: int = 1) -> Tensor:
    """uint8 images of the model's size with smooth shapes, so that crops of an image resemble each other."""
    rng = Generator().manual_seed(seed)
    coarse = torch.rand(count, vit.channels, 4, 4, generator=rng) * 255
    return torch.nn.functional.interpolate(coarse, vit.image_size, mode="bilinear").to(torch.uint8)


def draw_batch(method: PretrainMethod, images: Tensor, seed: int = 2) -> tuple[Tensor, ...]:
    return method.make_batch(images, Generator().manual_seed(seed))
