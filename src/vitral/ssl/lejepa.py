"""LeJEPA (Balestriero & LeCun, 2025, arXiv 2511.08544): views agree, and embeddings are isotropic Gaussian.

Without a teacher, stop-gradient or prototypes. The loss (section 5) is

    (1 - λ)·invariance + λ·SIGReg

The invariance term is the squared distance of the embeddings of all views from the mean of the global ones. SIGReg
(sketched isotropic Gaussian regularisation, section 4) projects the embeddings on random directions and compares the
distribution along each with a standard normal distribution by the Epps-Pulley statistic: the weighted squared distance
of the characteristic functions. An isotropic Gaussian minimises the downstream risk over all tasks (section 3), and
embeddings that collapse are far from it. Published result: 79% on ImageNet-1k, linear probe of a frozen ViT-H/14.

Shapes:  B images   V views, the global ones first   K embedding dimensions   M directions   Q points
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import World
from vitral.models.vit import ViT
from vitral.ssl.heads import MLP, mean_over_ranks
from vitral.ssl.method import Branch, PretrainMethod, pooled_width, view_features
from vitral.ssl.views import ViewConfig

MAX_FREQUENCY, NUM_POINTS = 4.0, 17  # of the characteristic function; it is even, so that half of the axis suffices


@dataclass(frozen=True, kw_only=True)
class LeJEPAConfig:
    """LeJEPA: agreement of views and an isotropic Gaussian distribution of the embeddings."""

    weight: float = 0.025  # weight of the Gaussian term (lambda); the agreement has weight 1 - lambda
    directions: int = 256  # random projections per step
    hidden_width: int = 2048  # hidden width of the projector
    width: int = 64  # width of the embedding

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise ValueError(f"lejepa.weight must be above 0 and below 1, got {self.weight}")
        for name in ("directions", "hidden_width", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"lejepa.{name} must be at least 1, got {getattr(self, name)}")


class LeJEPA(PretrainMethod):
    score_name: ClassVar[str] = "invariance"
    collapse_remedy: ClassVar[str] = "raise --lejepa.weight"
    directions_KM: Tensor
    points_Q: Tensor
    normal_Q: Tensor

    def __init__(
        self, config: LeJEPAConfig, vit: ViT, preprocessing: Preprocessing, views: ViewConfig, world: World
    ) -> None:
        D, H = pooled_width(vit), config.hidden_width
        super().__init__(Branch(vit, projector=MLP([D, H, H, config.width], world)), preprocessing, views, world)
        self.weight, self.initial_loss = config.weight, 1.0
        directions = torch.empty(config.width, config.directions)
        self.register_buffer("directions_KM", directions, persistent=False)
        points = torch.linspace(0, MAX_FREQUENCY, NUM_POINTS)
        self.register_buffer("points_Q", points, persistent=False)
        self.register_buffer("normal_Q", torch.exp(-points.square() / 2), persistent=False)

    def make_batch(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        self.directions_KM.normal_(generator=generator)
        return self.draw_views(images_BCHW, generator)

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        embeddings_BVK = torch.cat([self.embed(views) for views in batch if views.shape[1]], dim=1)
        centre = embeddings_BVK[:, : self.views.global_views].mean(dim=1, keepdim=True)
        invariance_B = (embeddings_BVK - centre).square().mean(dim=(1, 2))
        gaussianity = sigreg(
            embeddings_BVK, F.normalize(self.directions_KM, dim=0), self.points_Q, self.normal_Q, self.world
        )
        loss_B = (1 - self.weight) * invariance_B + self.weight * gaussianity
        return loss_B.sum(), invariance_B.detach().sum()

    def embed(self, views_BVCHW: Tensor) -> Tensor:
        features_BVD = view_features(self.student, views_BVCHW)
        return self.student.projector(features_BVD.flatten(0, 1)).float().unflatten(0, features_BVD.shape[:2])


def sigreg(embeddings_BVK: Tensor, directions_KM: Tensor, points_Q: Tensor, normal_Q: Tensor, world: World) -> Tensor:
    """The Epps-Pulley statistic of each view and direction, averaged: a scalar, near 1 for a normal distribution.

    B·∫ |φ(t) - exp(-t²/2)|² exp(-t²/2) dt, where φ is the empirical characteristic function of the projections, by the
    trapezoid rule. The images of all ranks form one sample.
    """
    with torch.autocast(embeddings_BVK.device.type, enabled=False):
        angles = (embeddings_BVK @ directions_KM)[..., None] * points_Q  # (B, V, M, Q)
        count = world.all_reduce_sum(angles.new_full((), len(angles)))
        error = (mean_over_ranks(angles.cos(), world) - normal_Q).square()
        error = error + mean_over_ranks(angles.sin(), world).square()
        return count * 2 * torch.trapezoid(error * normal_Q, points_Q).mean()
