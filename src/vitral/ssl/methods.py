"""Build a pretraining method around a ViT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.models.vit import ViT
from vitral.ssl.config import MethodName, PretrainConfig
from vitral.ssl.dino import DINO
from vitral.ssl.lejepa import LeJEPA
from vitral.ssl.mae import MAE
from vitral.ssl.method import PretrainMethod
from vitral.ssl.moco import MoCo

METHODS: dict[MethodName, Callable[..., PretrainMethod]] = {"lejepa": LeJEPA, "moco": MoCo, "dino": DINO, "mae": MAE}


def make_method(
    config: PretrainConfig, vit: ViT, preprocessing: Preprocessing, world: World = SINGLE_PROCESS
) -> PretrainMethod:
    """The method of `config`, which trains `vit`. The ViT loses its classification head."""
    options: Any = getattr(config, config.method)
    return METHODS[config.method](options, vit, preprocessing, config.views, world)
