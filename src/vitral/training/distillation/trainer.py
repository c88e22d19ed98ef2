"""Train a student on the features of a frozen teacher, without labels.

    uint8 batch -> views -> teacher and student -> loss -> gradients -> optimizer

Without augmentation, the teacher's features are the same in every epoch. They are computed once, before the first step,
and cached on disk.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vitral.data.variable_images import VariableSizeImages, select_rows
from vitral.device.memory import dataset_budget_bytes
from vitral.ssl.distillation import FeatureDistillation, check_features, patch_moments
from vitral.ssl.teacher import Teacher, TeacherFeatures
from vitral.training.distillation.feature_cache import cached_features, features_fingerprint
from vitral.training.pretraining.trainer import PretrainTrainer

NUM_STATISTICS_IMAGES = 512  # for the mean and standard deviation of the teacher's features
GIB = 2**30


class DistillTrainer(PretrainTrainer):
    """Train the student inside `FeatureDistillation`. The labels of the dataset are the rows of its images."""

    command = "distill"
    min_batch_size = 1

    @property
    def distillation(self) -> FeatureDistillation:
        assert isinstance(self.method, FeatureDistillation)
        return self.method

    def setup(self) -> None:
        super().setup()
        if not self.distillation.config.augment:
            self.distillation.targets = self.compute_targets()

    def start(self) -> None:
        if not self.resumed:  # a checkpoint contains them
            self.distillation.set_statistics(self.feature_sums())
        super().start()

    def feature_sums(self) -> Tensor:
        """Moments of the teacher's features: of all images if they are cached, otherwise of a fixed sample."""
        method = self.distillation
        if method.targets is None:
            rows = torch.arange(min(NUM_STATISTICS_IMAGES, len(self.sample_images)))
            return self._forward(method.feature_sums, select_rows(self.sample_images, rows)).clone()
        pooled, patches = (None if features is None else features.float() for features in method.targets)
        assert pooled is not None
        return pooled if patches is None else torch.cat([pooled, *patch_moments(patches)], dim=1)

    def compute_targets(self) -> TeacherFeatures | None:
        """Teacher features of all images, on the device; None if they are too large or the images differ in size."""
        teacher, method, images = self.distillation.frozen_teacher, self.distillation, self.dataset.train.images
        if isinstance(images, VariableSizeImages):
            return None
        dtype = torch.bfloat16 if self.hardware.precision == "bf16" else torch.float32
        example = teacher.example(self.preprocessing)
        used = [example.pooled, example.patches] if method.needs_patches else [example.pooled]
        num_bytes = len(images) * dtype.itemsize * sum(tensor.numel() for tensor in used if tensor is not None)
        limit = min(method.config.cache * GIB, dataset_budget_bytes(self.hardware.device))
        if num_bytes > limit:
            if method.config.cache:
                self.callbacks.on_message(
                    f"Teacher features are computed in every step: all of them need {num_bytes / GIB:.1f} GiB, and "
                    f"{limit / GIB:.1f} GiB are allowed (--distill.cache)"
                )
            return None
        features = cached_features(
            self._fingerprint(teacher, dtype),
            method.config.cache * GIB,
            partial(self._compute_features, dtype),
            is_writer=self.world.is_rank0,
            agree=lambda is_cached: all(self.world.all_gather_objects([is_cached])),
            log=self.callbacks.on_message,
        )
        check_features(features.pooled, teacher.name)
        device, patches = self.hardware.device, features.patches
        return TeacherFeatures(features.pooled.to(device), None if patches is None else patches.to(device))

    def _fingerprint(self, teacher: Teacher, dtype: torch.dtype) -> str | None:
        """None for a teacher whose weights are unknown: its features are kept in memory only."""
        if teacher.sha256 is None:
            return None
        has_patches = self.distillation.needs_patches
        return features_fingerprint(
            teacher.sha256, self.dataset.fingerprint, teacher.preprocessing, self.preprocessing, dtype, has_patches
        )

    def _compute_features(self, dtype: torch.dtype) -> TeacherFeatures:
        method, shapes = self.distillation, []

        def flat_features(images_BCHW: Tensor) -> Tensor:
            pooled, patches = method.teacher_features(images_BCHW)
            if patches is None:
                return pooled
            shapes.append(patches.shape[1:])
            return torch.cat([pooled, patches.flatten(1)], dim=1)

        self.callbacks.on_message(f"Computing the teacher's features of {len(self.dataset.train):,} images")
        flat = self._forward(flat_features, self.dataset.train.images).to(dtype, copy=True)
        E = method.pooled_stats_2E.shape[1]
        pooled = flat[:, :E].clone()
        return TeacherFeatures(pooled, flat[:, E:].reshape(len(flat), *shapes[0]).clone() if shapes else None)
