"""Feature distillation: the student's features match those of a frozen teacher through a learned projection.

Teacher and student see the same view ("consistent teaching", Beyer et al., 2022, arXiv 2106.05237). With the student's
projected features x and the teacher's standardised features y, the losses are those of AM-RADIO (Ranzinger et al.,
2024, arXiv 2312.06709) for one teacher:

    pooled features    L_cos(x, y) = 1 - x·y / (|x| |y|)
    patch features     L_match(x, y) = 0.9 L_cos(x, y) + 0.1 smooth-L1(x, y), averaged over the patches

Teacher features are standardised with mean and standard deviation of each dimension over a sample of the images,
because cosines of features with a common offset hardly differ between images. PHI-S (arXiv 2410.01680) compares such
normalisations for several teachers. Where the patch grids differ, the teacher's is resampled to the student's.
Published result: a CLIP ViT-L whose features were distilled in a similar way reaches 89.0% on ImageNet-1k, fine-tuned
(arXiv 2205.14141).

Shapes:  B images   G views   N patches in a grid of h x w   E, F pooled and patch features of the teacher
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import World
from vitral.errors import VitralError
from vitral.models.vit import Grid, ViT
from vitral.ssl.heads import MLP
from vitral.ssl.method import Branch, PretrainMethod, pooled_width
from vitral.ssl.teacher import Teacher, TeacherFeatures
from vitral.ssl.views import ViewConfig

COSINE_WEIGHT, SMOOTH_L1_WEIGHT = 0.9, 0.1  # of L_match, AM-RADIO's
MIN_STD = 0.01  # of a dimension, relative to the mean over the dimensions: noise in dead dimensions stays small


@dataclass(frozen=True, kw_only=True)
class FeatureDistillConfig:
    """Feature distillation: learn the features of a teacher."""

    teacher: str = ""  # checkpoint file, run, hf:owner/name or bundled model
    patch_weight: float = 1.0  # weight of the patch features in the loss; 0: pooled features only
    augment: bool = True  # random views; without them, teacher features are computed once and cached
    cache: float = 4.0  # GiB of disk for cached teacher features; 0: compute them in every step

    def __post_init__(self) -> None:
        for name in ("patch_weight", "cache"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"distill.{name} must be at least 0 and finite, got {getattr(self, name)}")


class FeatureDistillation(PretrainMethod):
    """The student, its projections and the statistics of the teacher's features. The teacher itself is not a part.

    `targets`: teacher features of all images, (N, E) and (N, F, h, w), on the device, if they are computed once.
    """

    score_name: ClassVar[str] = "cosine"
    can_collapse: ClassVar[bool] = False  # features have the rank of the teacher's, which may be low
    targets: TeacherFeatures | None = None
    pooled_stats_2E: Tensor  # mean and standard deviation
    patch_stats_2F: Tensor

    def __init__(
        self,
        config: FeatureDistillConfig,
        vit: ViT,
        preprocessing: Preprocessing,
        views: ViewConfig,
        world: World,
        teacher: Teacher,
    ) -> None:
        super().__init__(Branch(vit), preprocessing, replace(views, local_views=0), world)
        self.config, self.frozen_teacher = config, teacher
        sample = teacher.example(preprocessing)
        E = sample.pooled.shape[1]
        self.needs_patches = config.patch_weight > 0 and sample.patches is not None
        F_ = sample.patches.shape[1] if sample.patches is not None and self.needs_patches else 0
        self.pooled_projection = MLP([pooled_width(vit), E], world)
        self.patch_projection = MLP([vit.config.width, F_], world) if F_ else None
        self.register_buffer("pooled_stats_2E", torch.tensor([[0.0], [1.0]]).repeat(1, E))
        self.register_buffer("patch_stats_2F", torch.tensor([[0.0], [1.0]]).repeat(1, F_))
        self.initial_loss = 1.0 + config.patch_weight

    def make_batch(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        """Normalised views, B G C H W. Without augmentation, the images are model input already."""
        if self.config.augment:
            return (self.draw_views(images_BCHW, generator).global_views,)
        return (self.preprocessing.normalise(images_BCHW)[:, None],)

    def make_batch_of_rows(self, images_BCHW: Tensor, rows_B: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        """The views, and the targets of the images if they are computed once."""
        batch = self.make_batch(images_BCHW, generator)
        if self.targets is None:
            return batch
        return *batch, *(features[rows_B] for features in self.targets if features is not None)

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        views, *targets = batch
        images, G = views.flatten(0, 1), views.shape[1]
        if targets:
            pooled, patches = targets[0], targets[1] if len(targets) > 1 else None
        else:
            pooled, patches = self.teacher_features(images)
        tokens = self.student.tokens(images)
        predicted = self.pooled_projection(self.student.vit.pool(tokens)).float()
        cosine = F.cosine_similarity(predicted, standardise(pooled.float(), self.pooled_stats_2E), dim=1)
        loss = (1 - cosine).sum()
        if self.patch_projection is not None:
            assert patches is not None
            grid = self.student.vit.patch_grid(images)
            targets_BNF = standardise(resample_patches(patches.float(), grid), self.patch_stats_2F)
            predicted_BNF = self.patch_projection(tokens[:, -grid[0] * grid[1] :]).float()
            loss = loss + self.config.patch_weight * match_losses(predicted_BNF, targets_BNF).mean(dim=1).sum()
        return loss / G, cosine.detach().sum() / G

    @torch.no_grad()
    def teacher_features(self, images_BCHW: Tensor) -> TeacherFeatures:
        """Features of views that are normalised for the student. Patch features are left out if they are not used."""
        pooled, patches = self.frozen_teacher.features(images_BCHW, self.preprocessing)
        return TeacherFeatures(pooled, patches if self.needs_patches else None)

    def feature_sums(self, images_BCHW: Tensor) -> Tensor:
        """(B, E + 2 F): pooled features, and mean and mean square of the patch features of each image."""
        pooled, patches = self.teacher_features(images_BCHW)
        return pooled if patches is None else torch.cat([pooled, *patch_moments(patches)], dim=1)

    @torch.no_grad()
    def set_statistics(self, sums_ND: Tensor) -> None:
        """Standardise with the statistics of these images, for which `feature_sums` was computed."""
        E = self.pooled_stats_2E.shape[1]
        pooled, patch_mean, patch_square = sums_ND.double().tensor_split([E, E + self.patch_stats_2F.shape[1]], dim=1)
        check_features(pooled, self.frozen_teacher.name)
        check_features(patch_square, self.frozen_teacher.name)
        self.pooled_stats_2E.copy_(mean_and_std(pooled.mean(dim=0), pooled.square().mean(dim=0)))
        self.patch_stats_2F.copy_(mean_and_std(patch_mean.mean(dim=0), patch_square.mean(dim=0)))
        if not self.pooled_stats_2E[1].any():
            raise VitralError(
                f"the teacher {self.frozen_teacher.name} gives all images the same features",
                "Use another teacher, or check that the images differ",
            )


def patch_moments(patches_BFhw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean square over the patches of each image, (B, F) each."""
    return patches_BFhw.mean(dim=(2, 3)), patches_BFhw.square().mean(dim=(2, 3))


def mean_and_std(mean: Tensor, mean_square: Tensor) -> Tensor:
    """(2, E) from first and second moments. Dimensions that hardly vary are not amplified."""
    std = (mean_square - mean.square()).clamp(min=0).sqrt()
    return torch.stack([mean, std.clamp(min=MIN_STD * float(std.mean() if len(std) else 0))])


def standardise(features: Tensor, stats_2E: Tensor) -> Tensor:
    return (features - stats_2E[0]) / stats_2E[1]


def resample_patches(patches_BFhw: Tensor, grid: Grid) -> Tensor:
    """(B, N, F): patch features on the student's grid, bilinear with antialiasing if the grids differ."""
    if tuple(patches_BFhw.shape[2:]) != tuple(grid):
        patches_BFhw = F.interpolate(patches_BFhw, size=grid, mode="bilinear", antialias=True)
    return patches_BFhw.flatten(2).transpose(1, 2)


def match_losses(predicted: Tensor, targets: Tensor) -> Tensor:
    """AM-RADIO's L_match over the last dimension."""
    cosine_losses = 1 - F.cosine_similarity(predicted, targets, dim=-1)
    return COSINE_WEIGHT * cosine_losses + SMOOTH_L1_WEIGHT * F.smooth_l1_loss(
        predicted, targets, reduction="none"
    ).mean(dim=-1)


def check_features(features_NE: Tensor, teacher: str) -> None:
    """Raise VitralError if features are NaN or infinite."""
    bad = int((~features_NE.isfinite()).any(dim=1).sum())
    if bad:
        raise VitralError(
            f"the teacher {teacher} gives {bad:,} of {len(features_NE):,} images features that are NaN or infinite",
            "Check the teacher and its preprocessing, or use --precision fp32",
        )
