"""What every pretraining method is made of: a student, perhaps a teacher, a batch of views and a loss.

Shapes:  B images   V views   C channels   H, W pixels   N patches   T tokens   D width
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import World
from vitral.models.vit import Grid, ViT
from vitral.ssl.views import ViewConfig, Views, make_views, render_views

MAX_MOMENTUM, MIN_MOMENTUM = 0.99, 0.5  # of a teacher whose momentum is not given
NUM_TIME_CONSTANTS = 25  # of the teacher's average that a run has at least

EncodeFn = Callable[[Tensor, Tensor | None], Tensor]  # images (B, C, H, W) and masks (B, N) -> tokens (B, T, D)


class Branch(nn.Module):
    """A ViT without its classification head, and the heads of a method: the student, or the teacher.

    `encode_fn` computes the tokens; a training backend replaces it by fused kernels.
    """

    head: nn.Module  # these exist if the method has passed them
    projector: nn.Module
    prototypes: nn.Module

    def __init__(self, vit: ViT, *, masks_patches: bool = False, **heads: nn.Module) -> None:
        super().__init__()
        self.vit = vit
        vit.head = nn.Identity()
        vit.accepts_any_grid = True  # local views have fewer patches
        for name, head in heads.items():
            self.add_module(name, head)
        self.mask_token = nn.Parameter(torch.zeros(vit.config.width)) if masks_patches else None
        self.encode_fn: EncodeFn | None = None

    def tokens(self, images_BCHW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Tokens after the encoder, B T D. Where the mask is true, the mask token replaces the patch."""
        return (self.encode_fn or self.encode)(images_BCHW, mask_BN)

    def encode(self, images_BCHW: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        grid = self.vit.patch_grid(images_BCHW)
        return self.vit.encoder(self.mask_patches(self.vit.embed(images_BCHW, grid), grid, mask_BN), grid)

    def mask_patches(self, tokens_BTD: Tensor, grid: Grid, mask_BN: Tensor | None) -> Tensor:
        """Replace masked patches by the mask token plus their position."""
        if mask_BN is None or self.mask_token is None:
            return tokens_BTD
        num_prefix = tokens_BTD.shape[1] - mask_BN.shape[1]
        masked = self.mask_token.expand(1, mask_BN.shape[1], -1)
        if self.vit.position_embedding is not None:
            masked = masked + self.vit.position_embedding.table_for(grid)[:, -mask_BN.shape[1] :]
        patches = torch.where(mask_BN[:, :, None], self.vit.pre_norm(masked).to(tokens_BTD), tokens_BTD[:, num_prefix:])
        return torch.cat([tokens_BTD[:, :num_prefix], patches], dim=1)

    def features(self, images_BCHW: Tensor) -> Tensor:
        """Pooled features, B D."""
        return self.vit.pool(self.tokens(images_BCHW))

    def __deepcopy__(self, memo: dict[int, Any]) -> Branch:
        """A copy without `encode_fn`, which refers to the weights of the original."""
        duplicate: Branch = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        duplicate.__dict__ = copy.deepcopy({**self.__dict__, "encode_fn": None}, memo)
        return duplicate


class PretrainMethod(nn.Module, ABC):
    """A self-supervised method: `method(*method.make_batch(images, generator))` returns the loss.

    All state is in the module, so a checkpoint of it continues training exactly: student, heads, teacher and centre.
    """

    score_name: ClassVar[str]  # of the running score in metrics.jsonl, after "train_"
    needs_patches: bool = False  # whether the loss uses patch tokens, and not only pooled features
    can_collapse: ClassVar[bool] = True  # whether equal features for all images would be a solution
    collapse_remedy: ClassVar[str | None] = None  # what helps against collapse, in addition to a lower learning rate
    initial_loss: float  # about that of an untrained model; the scale on which a loss counts as diverged

    def __init__(self, student: Branch, preprocessing: Preprocessing, views: ViewConfig, world: World) -> None:
        super().__init__()
        self.student = student
        self.teacher: Branch | None = None
        self.preprocessing, self.views, self.world = preprocessing, views, world
        self.teacher_momentum, self.has_default_momentum = 0.0, False
        self.render_fn = render_views  # replaced by a compiled version on a GPU

    @abstractmethod
    def make_batch(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        """Everything random of a step, for images that are not normalised. Every tensor has one row per image."""

    def make_batch_of_rows(self, images_BCHW: Tensor, rows_B: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        """`make_batch` of the images at these rows of the training set, for methods that store something for each."""
        return self.make_batch(images_BCHW, generator)

    @abstractmethod
    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the images of the loss and of the running score."""

    def reference_forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` without the `encode_fn` of student and teacher."""
        branches = [branch for branch in (self.student, self.teacher) if branch is not None]
        encode_fns = [branch.encode_fn for branch in branches]
        try:
            for branch in branches:
                branch.encode_fn = None
            output: tuple[Tensor, Tensor] = self(*batch)
        finally:
            for branch, encode_fn in zip(branches, encode_fns, strict=True):
                branch.encode_fn = encode_fn
        return output

    @property
    def backbone(self) -> ViT:
        """The ViT that results from pretraining."""
        return (self.teacher or self.student).vit

    def features(self, images_BCHW: Tensor) -> Tensor:
        """Pooled features of normalised images, B D, by the branch that becomes the model."""
        return (self.teacher or self.student).features(images_BCHW)

    def output_logits(self, images_BCHW: Tensor) -> Tensor | None:
        """The teacher's logits over its outputs, B K; None if it has none."""
        return None

    def output_probs(self, logits_NK: Tensor) -> Tensor:
        """The teacher's distribution over its outputs for each of a sample of images, for the detection of collapse."""
        return logits_NK.softmax(dim=-1)

    def add_teacher(self, momentum: float | None) -> None:
        """A copy of the student whose weights are an exponential moving average of the student's.

        `momentum`: at the start of the run; None: that of `default_momentum`, after `set_total_steps`.
        """
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.has_default_momentum = momentum is None
        self.teacher_momentum = MAX_MOMENTUM if momentum is None else momentum
        self.teacher.eval()

    def set_total_steps(self, total_steps: int) -> None:
        """Adapt what depends on the length of the run. Called before its first step."""
        if self.has_default_momentum:
            self.teacher_momentum = default_momentum(total_steps)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the student. The teacher stays in evaluation mode: only the student has dropout."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    @torch.no_grad()
    def after_step(self, progress: Tensor, is_finite: Tensor) -> None:
        """Update everything that no gradient reaches.

        The teacher's momentum rises to 1 along a cosine (BYOL, arXiv 2006.07733, implementation details). `progress`
        is the fraction of the run; nothing changes if `is_finite` is 0. Both are scalars on the device.
        """
        if self.teacher is None:
            return
        rate = (1 - self.teacher_momentum) * (torch.cos(math.pi * progress) + 1) / 2 * is_finite
        averages: list[Tensor] = list(self.teacher.parameters())
        weights: list[Tensor] = list(self.student.parameters())
        difference = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(difference, rate)
        torch._foreach_add_(averages, difference)

    def draw_views(self, images_BCHW: Tensor, generator: Generator, views: ViewConfig | None = None) -> Views:
        return make_views(
            views or self.views,
            self.preprocessing,
            images_BCHW,
            generator,
            patch_size=self.student.vit.config.patch_size,
            render_fn=self.render_fn,
        )


def default_momentum(total_steps: int) -> float:
    """Momentum of the teacher at the start of a run: 0.99, or lower in runs of fewer than 2,500 steps.

    The published values, 0.99 to 0.996, belong to about 100,000 steps and more. After 300 steps with 0.99, a fifth of
    the teacher would still be its initial weights: the integral of 1 - momentum along the cosine is 1.5.
    """
    return min(MAX_MOMENTUM, max(MIN_MOMENTUM, 1 - NUM_TIME_CONSTANTS / total_steps))


def pooled_width(vit: ViT) -> int:
    """Width of the pooled features: D, or 2D for variants that concatenate two tokens."""
    return vit.pooled_vectors * vit.config.width


def view_features(branch: Branch, views_BVCHW: Tensor) -> Tensor:
    """Pooled features of each view: B V D."""
    return branch.features(views_BVCHW.flatten(0, 1)).unflatten(0, views_BVCHW.shape[:2])
