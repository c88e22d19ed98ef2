"""The configuration of pretraining in a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from vitral.ssl.dino import DINOConfig
from vitral.ssl.distillation import FeatureDistillConfig
from vitral.ssl.lejepa import LeJEPAConfig
from vitral.ssl.mae import MAEConfig
from vitral.ssl.moco import MoCoConfig
from vitral.ssl.views import ViewConfig

MethodName = Literal["lejepa", "moco", "dino", "mae", "distill"]
SINGLE_VIEW_METHODS = ("mae", "distill")  # all others compare views of an image, and the images of a batch


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Self-supervised pretraining: the method, its views and its options."""

    method: MethodName = "lejepa"  # what is learned without labels
    labels: str = ""  # labelled images for the k-NN accuracy after each epoch; not used in training
    views: ViewConfig = field(default_factory=ViewConfig)  # augmented crops of each image
    lejepa: LeJEPAConfig = field(default_factory=LeJEPAConfig)  # method lejepa
    moco: MoCoConfig = field(default_factory=MoCoConfig)  # method moco
    dino: DINOConfig = field(default_factory=DINOConfig)  # method dino
    mae: MAEConfig = field(default_factory=MAEConfig)  # method mae
    distill: FeatureDistillConfig = field(default_factory=FeatureDistillConfig)  # method distill, of vitral distill

    @property
    def compares_images(self) -> bool:
        """Whether the loss of an image depends on the others of its micro-batch."""
        return self.method not in SINGLE_VIEW_METHODS

    def __post_init__(self) -> None:
        if self.method not in get_args(MethodName):
            raise ValueError(f"pretrain.method must be one of {', '.join(get_args(MethodName))}, got {self.method!r}")
        if self.method not in SINGLE_VIEW_METHODS and self.views.global_views + self.views.local_views < 2:
            raise ValueError(
                f"method {self.method} compares views of an image, so views.global_views must be at least 2"
            )
