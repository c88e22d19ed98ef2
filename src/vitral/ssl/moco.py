"""MoCo v3 (Chen, Xie & He, 2021, arXiv 2104.02057): a view's query matches the key of another view of the same image.

The loss is InfoNCE, -log (exp(q·k₊ / τ) / Σ exp(q·k / τ)): the cross-entropy of choosing the key k₊ of the same image
among the keys k of all images in the batch, by cosine similarity / τ. Queries come from the student, a projector and a
predictor, keys from an EMA teacher and its projector (algorithm 1). Local views, which the paper does not have, are
queries only, as in SwAV (arXiv 2006.09882). The patch embedding is trained, and hidden layers have GELU instead of
ReLU. Published result: 73.2% on ImageNet-1k, linear probe of a ViT-S/16 after 300 epochs (the authors' code).

Shapes:  B images   G global views   V views   K embedding dimensions
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import World
from vitral.models.vit import ViT
from vitral.ssl.heads import MLP
from vitral.ssl.method import Branch, PretrainMethod, pooled_width, view_features
from vitral.ssl.views import ViewConfig

TYPICAL_BATCH_SIZE = 1024  # the loss of an untrained model grows with the logarithm of the batch size


@dataclass(frozen=True, kw_only=True)
class MoCoConfig:
    """MoCo v3: contrast the views of an image with those of the other images of the batch."""

    temperature: float = 0.2  # temperature of the similarities in the loss
    momentum: float | None = None  # initial EMA momentum of the teacher, rising to 1; default: 0.99, less in short runs
    hidden_width: int = 2048  # hidden width of projector and predictor
    width: int = 256  # width of the embedding

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"moco.temperature must be above 0 and finite, got {self.temperature}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"moco.momentum must be at least 0 and below 1, got {self.momentum}")
        for name in ("hidden_width", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"moco.{name} must be at least 1, got {getattr(self, name)}")


class MoCo(PretrainMethod):
    score_name: ClassVar[str] = "match_accuracy"
    collapse_remedy: ClassVar[str] = "raise --moco.momentum"

    def __init__(
        self, config: MoCoConfig, vit: ViT, preprocessing: Preprocessing, views: ViewConfig, world: World
    ) -> None:
        D, H, K = pooled_width(vit), config.hidden_width, config.width
        projector = MLP([D, H, H, K], world, norm_output=True)
        super().__init__(Branch(vit, projector=projector), preprocessing, views, world)
        self.add_teacher(config.momentum)
        self.predictor = MLP([K, H, K], world, norm_output=True)
        self.temperature = config.temperature
        self.initial_loss = 2 * config.temperature * math.log(TYPICAL_BATCH_SIZE)

    def make_batch(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        return self.draw_views(images_BCHW, generator)

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        global_views, _ = batch
        queries_BVK = torch.cat([self.queries(views) for views in batch if views.shape[1]], dim=1)
        with torch.no_grad():
            keys_NGK, first = self.world.all_gather_rows(self.keys(global_views))
        return contrastive_loss(queries_BVK, keys_NGK, self.temperature, first)

    def queries(self, views_BVCHW: Tensor) -> Tensor:
        features_BVD = view_features(self.student, views_BVCHW)
        embeddings = self.predictor(self.student.projector(features_BVD.flatten(0, 1)))
        return F.normalize(embeddings.float(), dim=1).unflatten(0, features_BVD.shape[:2])

    def keys(self, views_BVCHW: Tensor) -> Tensor:
        assert self.teacher is not None
        features_BVD = view_features(self.teacher, views_BVCHW)
        embeddings = self.teacher.projector(features_BVD.flatten(0, 1))
        return F.normalize(embeddings.float(), dim=1).unflatten(0, features_BVD.shape[:2])


def contrastive_loss(
    queries_BVK: Tensor, keys_NGK: Tensor, temperature: float, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Sums over B images of InfoNCE and of the fraction of queries whose own key is the most similar.

    Each query is compared with the keys of every global view but its own, and the loss is averaged over these pairs.
    Query b belongs to key `first + b`. Both are normalised. As in the authors' code, the loss is multiplied by 2τ,
    which keeps the scale of its gradient independent of τ.
    """
    (B, V, _), G = queries_BVK.shape, keys_NGK.shape[1]
    labels_B = torch.arange(first, first + B, device=queries_BVK.device)
    pairs = [(view, key) for view in range(V) for key in range(G) if view != key]
    loss = score = queries_BVK.new_zeros(())
    for view, key in pairs:
        with torch.autocast(queries_BVK.device.type, enabled=False):
            logits_BN = queries_BVK[:, view] @ keys_NGK[:, key].T / temperature
        loss = loss + F.cross_entropy(logits_BN, labels_B, reduction="sum")
        score = score + (logits_BN.detach().argmax(dim=1) == labels_B).sum()
    return loss * (2 * temperature / len(pairs)), score / len(pairs)
