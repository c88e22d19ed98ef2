"""The training backend with fused Triton kernels.

Every override is compared with the reference on this device before its first use. An override that fails or differs by
more than its tolerance is replaced by the reference, and the reason is logged once. If that happens on one rank, all
ranks use the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from vitral.data.augment import AugmentConfig, AugmentFn, Batch, augment_batch
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware, fallback_from_fp8
from vitral.distributed.gradients import GradientReducer, ReduceDtype
from vitral.kernels.augment import checks as augment_checks
from vitral.kernels.augment.op import fused_apply_ops, fused_augment, normalization_table
from vitral.kernels.cross_entropy import op as cross_entropy_op
from vitral.kernels.cross_entropy.op import BatchLossFn, fused_cross_entropy
from vitral.kernels.encoder_checks import unsupported_reason
from vitral.kernels.optimizers import OptimizerKernels
from vitral.kernels.self_check import self_check_failure
from vitral.kernels.sharded_model import ShardedModel, sharding_unsupported_reason
from vitral.kernels.training import make_training_forward
from vitral.models.vit import ViT
from vitral.utils.progress import LogFn, no_log

LOSS_TOLERANCE = 1e-2


class WrappedBackend(Protocol):
    """The reference backend, as far as TritonBackend uses it."""

    hardware: Hardware
    initial_loss: float
    gradients_final_after_backward: bool  # no clipping or accumulation: gradients can be used before backward ends
    reducer: GradientReducer | None  # exchanges gradients with other ranks during the backward pass

    def augment(self, images: Tensor, labels: Tensor, rng: Generator, mix_enabled: Tensor | None = None) -> Batch: ...

    def forward(self, images: Tensor) -> Tensor: ...

    def loss(self, logits: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]: ...

    def optimizer_step(self, optimizers: Sequence[Optimizer]) -> None: ...

    def eager(self) -> Any: ...


class TritonBackend:
    """Fused kernels for NVIDIA GPUs around a reference backend.

    Optimizer kernels are used on every GPU. The fused augmentation, forward pass and loss need `hardware.use_triton`;
    the forward pass is also left to the reference where `forward_unsupported` gives a reason. `label_smoothing` is None
    if the loss is not softmax cross-entropy with equal class weights; `logit_offsets_K` are those of the loss.
    `sharded_reduce_dtype`: FSDP shards the model, and its gradients are reduced in this dtype.
    """

    def __init__(
        self,
        reference: WrappedBackend,
        *,
        model: ViT,
        augment: AugmentConfig,
        preprocessing: Preprocessing,
        num_classes: int,
        micro_batch_size: int,
        label_smoothing: float | None,
        hardware: Hardware,
        logit_offsets_K: Tensor | None = None,
        forward_unsupported: str | None = None,
        sharded_reduce_dtype: ReduceDtype | None = None,
        log: LogFn = no_log,
    ) -> None:
        self.reference = reference
        self.reducer, self.sharded_reduce_dtype = reference.reducer, sharded_reduce_dtype
        self.initial_loss = reference.initial_loss
        self.log = log
        self.overrides: set[str] = set()  # in use: forward, augment, color_ops, loss, muon, adamw
        self._fused_forward, self.hardware = self._select_forward(
            model, hardware, micro_batch_size, forward_unsupported
        )
        reference.hardware = self.hardware
        self._augment: AugmentFn = reference.augment
        self._loss: BatchLossFn = reference.loss
        if hardware.use_triton:
            self._augment = self._select_augment(augment, preprocessing, num_classes)
            self._loss = self._select_loss(label_smoothing, logit_offsets_K, micro_batch_size, num_classes)
        self._optimizer_kernels = OptimizerKernels(
            hardware,
            overlap_muon=forward_unsupported is None and reference.gradients_final_after_backward,
            overrides=self.overrides,
            log=log,
        )

    def augment(self, images: Tensor, labels: Tensor, rng: Generator, mix_enabled: Tensor | None = None) -> Batch:
        return self._augment(images, labels, rng, mix_enabled)

    def loss_and_score(self, batch: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, Tensor]:
        images, targets = batch
        return self.loss(self.forward(images), targets, labels)

    def forward(self, images: Tensor) -> Tensor:
        if self._fused_forward is None:
            return self.reference.forward(images)
        with self.hardware.autocast():
            return self._fused_forward(images)

    def loss(self, logits: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self._loss(logits, targets, labels)

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if self.reducer is self.reference.reducer:
            return self.reference.gradient_sync(is_last)
        assert self.reducer is not None
        return self.reducer.sync(is_last)

    def optimizer_step(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizer_kernels.prepare(optimizers)
        self.reference.optimizer_step(optimizers)

    def eager(self) -> Any:
        return self.reference.eager()

    def _select_forward(
        self, model: ViT, hardware: Hardware, batch_size: int, unsupported: str | None
    ) -> tuple[Callable[[Tensor], Tensor] | None, Hardware]:
        """The fused forward pass, or None; and the hardware in use, without FP8 if it is unavailable."""
        if unsupported is None and not hardware.use_triton:
            unsupported = "fused kernels are disabled"
        reason, sharded = unsupported, None
        if self.sharded_reduce_dtype is not None and reason is None:
            reason = sharding_unsupported_reason(model)
            sharded = ShardedModel(model, hardware, self.sharded_reduce_dtype) if reason is None else None
        checked_model = model if sharded is None else sharded.check_model
        reason = reason or unsupported_reason(checked_model, hardware, batch_size=batch_size)
        if (reason := hardware.world.first_reason(reason)) is None:
            self.overrides.add("forward")
            if sharded is not None:
                model, self.reducer = sharded.vit, sharded.reducer
            return make_training_forward(model, hardware, self.log, batch_size, self.reducer, sharded), hardware
        if hardware.fp8:
            bf16_hardware = fallback_from_fp8(hardware, reason, self.log)
            return self._select_forward(model, bf16_hardware, batch_size, unsupported)
        if unsupported is None:
            self.log(f"forward pass in PyTorch instead of fused kernels: {reason}")
        return None, hardware

    def _select_augment(self, config: AugmentConfig, preprocessing: Preprocessing, num_classes: int) -> AugmentFn:
        """One kernel for everything if possible; otherwise the reference, with fused colour operations if possible."""
        reference, device = self.reference.augment, self.hardware.device
        if preprocessing.dtype != "uint8":
            self.log(f"augmentation in PyTorch: kernels support 8-bit images, not {preprocessing.dtype}")
            return reference
        if config.has_color_ops:
            if preprocessing.channels not in (1, 3):
                reason: str | None = f"kernels support 1 or 3 channels, not {preprocessing.channels}"
            else:
                reason = self_check_failure(
                    partial(augment_checks.color_ops_error, preprocessing, device), augment_checks.COLOR_OPS_TOLERANCE
                )
            if (reason := self.hardware.world.first_reason(reason)) is not None:
                self.log(f"colour augmentation in PyTorch: {reason}")
                return reference
            # The next comparison needs the same colour operations on both sides: a later operation can amplify a
            # rounding difference of an earlier one.
            reference = partial(augment_batch, config, preprocessing, num_classes, apply_fn=fused_apply_ops)
            self.overrides.add("color_ops")
        if not augment_checks.supports(config):
            return reference
        dtype = torch.bfloat16 if self.hardware.precision == "bf16" else torch.float32
        fused = partial(fused_augment, config, normalization_table(preprocessing, device, dtype), num_classes)
        reason = self_check_failure(
            partial(augment_checks.augment_error, fused, reference, num_classes, preprocessing, device),
            augment_checks.AUGMENT_TOLERANCE,
        )
        if (reason := self.hardware.world.first_reason(reason)) is not None:
            self.log(f"augmentation in PyTorch: {reason}")
            return reference
        self.overrides.add("augment")
        return fused

    def _select_loss(
        self, label_smoothing: float | None, logit_offsets_K: Tensor | None, batch_size: int, num_classes: int
    ) -> BatchLossFn:
        reference = self.reference.loss
        if label_smoothing is None or not cross_entropy_op.is_supported(batch_size, num_classes):
            return reference
        fused = partial(fused_cross_entropy, label_smoothing=label_smoothing, logit_offsets_K=logit_offsets_K)
        compare = partial(cross_entropy_op.loss_error, fused, reference, batch_size, num_classes, self.hardware.device)
        if (reason := self.hardware.world.first_reason(self_check_failure(compare, LOSS_TOLERANCE))) is not None:
            self.log(f"loss in PyTorch: {reason}")
            return reference
        self.overrides.add("loss")
        return fused
