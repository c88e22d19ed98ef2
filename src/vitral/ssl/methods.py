"""Build a pretraining method around a ViT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.models.vit import ViT
from vitral.ssl.config import MethodName, PretrainConfig
from vitral.ssl.dino import DINO
from vitral.ssl.distillation import FeatureDistillation
from vitral.ssl.lejepa import LeJEPA
from vitral.ssl.mae import MAE
from vitral.ssl.method import PretrainMethod
from vitral.ssl.moco import MoCo
from vitral.ssl.teacher import Teacher

METHODS: dict[MethodName, Callable[..., PretrainMethod]] = {"lejepa": LeJEPA, "moco": MoCo, "dino": DINO, "mae": MAE}


def make_method(
    config: PretrainConfig,
    vit: ViT,
    preprocessing: Preprocessing,
    world: World = SINGLE_PROCESS,
    teacher: Teacher | None = None,
) -> PretrainMethod:
    """The method of `config`, which trains `vit`. The ViT loses its classification head.

    `teacher`: a frozen one, for distillation. Other methods make their own from the student.
    """
    if config.method == "distill":
        assert teacher is not None
        return FeatureDistillation(config.distill, vit, preprocessing, config.views, world, teacher)
    options: Any = getattr(config, config.method)
    return METHODS[config.method](options, vit, preprocessing, config.views, world)
