"""DINO (Caron et al., 2021, arXiv 2104.14294) with iBOT's masked patches (Zhou et al., 2022, arXiv 2111.07832).

The student predicts the teacher's distribution over K prototypes, a softmax of cosine similarities z with them:

    P_s = softmax(z_s / τ_s)    P_t = balanced(z_t / τ_t)
    DINO    -Σ P_t(x) log P_s(x')    pooled features: of each global view x from the student's other views x'
    iBOT    -Σ P_t(u) log P_s(û)     patches: of the teacher's patch u where the student's patch û is masked

The teacher is an EMA of the student. A constant output is prevented by balancing the teacher's outputs over the batch,
either by Sinkhorn-Knopp (SwAV, arXiv 2006.09882; used by DINOv2), Diag(u) exp(z_t / τ_t) Diag(v) with equal totals for
the prototypes, or by DINO's running mean c ← 0.9 c + 0.1 mean(z_t), softmax((z_t - c) / τ_t). Published results on
ImageNet-1k, k-NN / linear, ViT-S/16: DINO 74.5 / 77.0%, iBOT 75.2 / 77.9%.

Shapes:  B images   G global views   V views   N patches   M masked patches   K prototypes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Generator, Tensor

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.ssl.heads import MLP, Prototypes, mean_over_ranks
from vitral.ssl.masking import block_masks, num_masked_patches
from vitral.ssl.method import Branch, PretrainMethod, pooled_width
from vitral.ssl.views import ViewConfig

Balance = Literal["sinkhorn", "center"]
CENTER_MOMENTUM = 0.9  # DINO's
SINKHORN_ITERATIONS = 3  # SwAV's
MIN_TOTAL = 1e-30  # of a prototype in Sinkhorn-Knopp, where all probabilities may underflow


@dataclass(frozen=True, kw_only=True)
class DINOConfig:
    """DINO with iBOT's masked patches: the student predicts the teacher's distribution over prototypes."""

    prototypes: int = 4096  # outputs of the head
    student_temperature: float = 0.1  # temperature of the student's softmax
    teacher_temperature: float = 0.05  # temperature of the teacher's softmax
    balance: Balance = "sinkhorn"  # how the teacher's outputs are balanced: Sinkhorn-Knopp or a running mean
    momentum: float | None = None  # initial EMA momentum of the teacher, rising to 1; default: 0.99, less in short runs
    patch_weight: float = 1.0  # weight of the masked patch loss; 0: no masks, DINO without iBOT
    mask_ratio: float = 0.3  # fraction of the patches of a global view that the student does not see
    hidden_width: int = 2048  # hidden width of the head
    bottleneck: int = 256  # width before the prototypes

    def __post_init__(self) -> None:
        for name in ("student_temperature", "teacher_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"dino.{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.balance not in get_args(Balance):
            raise ValueError(f"dino.balance must be one of {', '.join(get_args(Balance))}, got {self.balance!r}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"dino.momentum must be at least 0 and below 1, got {self.momentum}")
        if not 0 <= self.patch_weight < math.inf:
            raise ValueError(f"dino.patch_weight must be at least 0 and finite, got {self.patch_weight}")
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"dino.mask_ratio must be above 0 and below 1, got {self.mask_ratio}")
        for name, minimum in (("prototypes", 2), ("hidden_width", 1), ("bottleneck", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"dino.{name} must be at least {minimum}, got {getattr(self, name)}")


class DINO(PretrainMethod):
    score_name: ClassVar[str] = "teacher_entropy"
    collapse_remedy: ClassVar[str] = "raise --dino.momentum"
    centers_2K: Tensor  # of pooled features and of patches
    batch_centers_2K: Tensor

    def __init__(
        self, config: DINOConfig, vit: ViT, preprocessing: Preprocessing, views: ViewConfig, world: World
    ) -> None:
        D, H, K = pooled_width(vit), config.hidden_width, config.prototypes
        self.needs_patches = config.patch_weight > 0
        if self.needs_patches and vit.config.width != D:
            raise VitralError(
                f"DINO needs pooled features and patches of equal width, got {D} and {vit.config.width} channels",
                "Set the weight of the patch loss, dino.patch_weight, to 0, or use another --method",
            )
        head = MLP([D, H, H, config.bottleneck], world, batch_norm=False)
        student = Branch(vit, masks_patches=self.needs_patches, head=head, prototypes=Prototypes(config.bottleneck, K))
        super().__init__(student, preprocessing, views, world)
        self.add_teacher(config.momentum)
        self.config, self.initial_loss = config, (1 + config.patch_weight) * math.log(K)
        self.register_buffer("centers_2K", torch.zeros(2, K))
        self.register_buffer("batch_centers_2K", torch.zeros(2, K), persistent=False)

    def make_batch(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        """Global views, local views and masks of the global views, B G N."""
        views = self.draw_views(images_BCHW, generator)
        B, G = views.global_views.shape[:2]
        grid = self.student.vit.config.grid_for(*views.global_views.shape[-2:])
        num_masked = self.num_masked(grid[0] * grid[1])
        masks_BGN = block_masks(B * G, grid, num_masked, generator, images_BCHW.device).unflatten(0, (B, G))
        return *views, masks_BGN

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        global_views, local_views, masks_BGN = batch
        images, mask = global_views.flatten(0, 1), masks_BGN.flatten(0, 1)
        B, G = global_views.shape[:2]
        masked_indices = mask.int().topk(self.num_masked(mask.shape[1]), dim=1).indices  # (B·G, M)
        targets, patch_targets = self.teacher_outputs(images, masked_indices)
        tokens = self.student.tokens(images, mask if self.needs_patches else None)
        logits = self.logits(self.student, self.student.vit.pool(tokens)).unflatten(0, (B, G))
        if local_views.shape[1]:
            local_features = self.student.features(local_views.flatten(0, 1))
            local_logits = self.logits(self.student, local_features).unflatten(0, (B, local_views.shape[1]))
            logits = torch.cat([logits, local_logits], dim=1)
        loss = view_cross_entropy(logits / self.config.student_temperature, targets.unflatten(0, (B, G)))
        if patch_targets is not None:
            patch_logits = self.patch_logits(self.student, tokens, masked_indices) / self.config.student_temperature
            patch_losses = -(patch_targets * patch_logits.log_softmax(dim=-1)).sum(dim=-1)  # (B·G, M)
            loss = loss + self.config.patch_weight * patch_losses.mean(dim=1).sum() / G
        return loss, torch.special.entr(targets).sum() / G

    def num_masked(self, num_patches: int) -> int:
        """Masked patches of each global view."""
        return num_masked_patches(num_patches, self.config.mask_ratio) if self.needs_patches else 0

    @torch.no_grad()
    def teacher_outputs(self, images: Tensor, masked_indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Distributions over the prototypes of pooled features, (B·G, K), and of masked patches, (B·G, M, K)."""
        assert self.teacher is not None
        tokens = self.teacher.tokens(images)
        logits = [self.logits(self.teacher, self.teacher.vit.pool(tokens))]
        if self.needs_patches:
            logits.append(self.patch_logits(self.teacher, tokens, masked_indices))
        probs = []
        for index, output in enumerate(logits):
            flat = output.flatten(0, -2)
            probs.append(self.balance(flat, self.centers_2K[index], self.world).view_as(output))
            if self.config.balance == "center":
                self.batch_centers_2K[index].copy_(mean_over_ranks(flat, self.world))
        return probs[0], probs[1] if self.needs_patches else None

    def balance(self, logits_NK: Tensor, center_K: Tensor, world: World) -> Tensor:
        """The teacher's distributions over the prototypes, (N, K)."""
        if self.config.balance == "sinkhorn":
            return sinkhorn(logits_NK / self.config.teacher_temperature, world)
        return ((logits_NK - center_K) / self.config.teacher_temperature).softmax(dim=-1)

    @torch.no_grad()
    def after_step(self, progress: Tensor, is_finite: Tensor) -> None:
        super().after_step(progress, is_finite)
        if self.config.balance == "center":
            difference = torch.where(is_finite > 0, self.batch_centers_2K - self.centers_2K, 0)
            self.centers_2K.add_(difference, alpha=1 - CENTER_MOMENTUM)

    def output_logits(self, images_BCHW: Tensor) -> Tensor | None:
        assert self.teacher is not None
        return self.logits(self.teacher, self.teacher.features(images_BCHW))

    def output_probs(self, logits_NK: Tensor) -> Tensor:
        """Balanced over these images as in training: what logits have in common is no collapse, because balancing
        removes it."""
        return self.balance(logits_NK, self.centers_2K[0].to(logits_NK.device), SINGLE_PROCESS)

    @staticmethod
    def logits(branch: Branch, features: Tensor) -> Tensor:
        """Cosine similarity with each prototype, as fp32. Autocast rounds it to bf16."""
        similarity: Tensor = branch.prototypes(branch.head(features))
        return similarity.float()

    def patch_logits(self, branch: Branch, tokens_BTD: Tensor, indices_BM: Tensor) -> Tensor:
        """Logits of the masked patches, (B, M, K)."""
        patches = tokens_BTD[:, branch.vit.config.num_prefix_tokens :]
        patches = patches.gather(1, indices_BM[:, :, None].expand(-1, -1, tokens_BTD.shape[2]))
        return self.logits(branch, patches)


def view_cross_entropy(logits_BVK: Tensor, targets_BGK: Tensor) -> Tensor:
    """Sum over the images of the cross-entropy of each view with each global target of another view, averaged."""
    log_probs = logits_BVK.log_softmax(dim=-1)
    V, G = logits_BVK.shape[1], targets_BGK.shape[1]
    pairs = [(view, target) for target in range(G) for view in range(V) if view != target]
    losses = [-(targets_BGK[:, target] * log_probs[:, view]).sum() for view, target in pairs]
    return torch.stack(losses).sum() / len(pairs)


def sinkhorn(logits_NK: Tensor, world: World) -> Tensor:
    """Distributions (N, K) with about equal total weight on each prototype: Sinkhorn-Knopp over the batch of all ranks.

    SwAV starts from exp(logits), here from the softmax. This scales rows, which does not change the limit. The sum of a
    row then never underflows, however low the temperature, and ranks need no common maximum.
    """
    probs_NK = logits_NK.softmax(dim=1)
    for _ in range(SINKHORN_ITERATIONS):
        totals_K = world.all_reduce_sum(probs_NK.sum(dim=0))
        probs_NK = probs_NK / totals_K.clamp_min(MIN_TOTAL)
        probs_NK = probs_NK / probs_NK.sum(dim=1, keepdim=True)
    return probs_NK
