"""A training step with labels and a teacher.

Shapes: B images, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from vitral.data.preprocess import Preprocessing
from vitral.models.variants.distilled import DistilledHead
from vitral.models.vit import ViT
from vitral.recipes.distillation import DistillConfig
from vitral.ssl.teacher import Teacher
from vitral.tasks.distillation import hard_distillation_losses, soft_distillation_losses

if TYPE_CHECKING:
    from vitral.training.backend import LabelBackend


class DistillBackend:
    """Adds a teacher's predictions to the loss of another backend. The teacher sees the same augmented images.

    In training, a model with a distillation token returns the logits of both heads: the first learns the labels, the
    second the teacher.
    """

    def __init__(
        self, backend: LabelBackend, model: ViT, config: DistillConfig, teacher: Teacher, preprocessing: Preprocessing
    ) -> None:
        self.backend, self.config, self.teacher, self.preprocessing = backend, config, teacher, preprocessing
        self.hardware, self.initial_loss = backend.hardware, backend.initial_loss
        self.num_classes = model.config.num_classes
        if isinstance(model.head, DistilledHead):
            model.head.separate_in_training = True

    def augment(
        self, images: Tensor, labels: Tensor, rng: Generator, mix_enabled: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self.backend.augment(images, labels, rng, mix_enabled)

    def loss_and_score(self, batch: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, Tensor]:
        images, targets = batch
        logits = self.backend.forward(images)
        label_logits, student_logits = logits[:, : self.num_classes], logits[:, -self.num_classes :]
        label_loss, score = self.backend.loss(label_logits, targets, labels)
        teacher_loss = self.teacher_losses(student_logits.float(), self.teacher_logits(images)).sum()
        return (1 - self.config.alpha) * label_loss + self.config.alpha * teacher_loss, score

    @torch.no_grad()
    def teacher_logits(self, images: Tensor) -> Tensor:
        """Logits (B, K) of normalised images, in the order of the student's classes."""
        with self.hardware.autocast():
            return self.teacher.logits(images, self.preprocessing)

    def teacher_losses(self, logits_BK: Tensor, teacher_logits_BK: Tensor) -> Tensor:
        if self.config.kind == "hard":
            return hard_distillation_losses(logits_BK, teacher_logits_BK)
        return soft_distillation_losses(logits_BK, teacher_logits_BK, self.config.temperature)

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        return self.backend.gradient_sync(is_last)

    def optimizer_step(self, optimizers: Sequence[Optimizer]) -> None:
        self.backend.optimizer_step(optimizers)

    def eager(self) -> DistillBackend:
        duplicate = copy.copy(self)
        duplicate.backend = self.backend.eager()
        return duplicate
