"""The computations of a training step: augmentation, forward pass, loss and optimizer update.

`ReferenceBackend` is plain PyTorch and defines the correct result. On an NVIDIA GPU `make_backend` wraps it in
`vitral.kernels.backend.TritonBackend`, which overrides the computations it has faster kernels for, after checking them
against the reference. No other code checks whether a kernel is available.

Shapes: B images, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from vitral.data.augment import Batch, augment_batch
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware, can_run_triton, fallback_from_fp8
from vitral.distributed.parallel import ParallelPlan, gradient_sync, make_reducer
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.ssl.teacher import Teacher
from vitral.tasks import TASKS
from vitral.tasks.losses import loss_and_score
from vitral.training.activation_checkpointing import checkpoint_activations
from vitral.training.distillation.backend import DistillBackend
from vitral.training.hardware import check_cuda_graphs
from vitral.utils.progress import LogFn, no_log


class Backend(Protocol):
    """The computations of a training step. `ReferenceBackend` defines the correct results."""

    hardware: Hardware  # in use: without FP8 if FP8 was selected automatically but is unavailable
    initial_loss: float  # of an untrained model

    def augment(
        self, images: Tensor, labels: Tensor, rng: Generator, mix_enabled: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """uint8 images (B, C, H, W) and labels (B,) or (B, K) to the batch of a step, with one row per image.

        With labels, normalised images and targets (B, K); in pretraining, views and masks. `mix_enabled`: a boolean
        scalar on the device. Where it is false, mixup and CutMix are skipped.
        """
        ...

    def loss_and_score(self, batch: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the images of the losses and of the running score, such as the number of correct predictions."""
        ...

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward pass: ranks exchange gradients in the last one only."""
        ...

    def optimizer_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Update the parameters from their gradients and clear the gradients."""
        ...

    def eager(self) -> Backend:
        """The reference without compilation and wrappers, for module hooks that look for non-finite values."""
        ...


class LabelBackend(Backend, Protocol):
    """A backend for labels, whose forward pass and loss can be called separately."""

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) to logits (B, K)."""
        ...

    def loss(self, logits: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of `loss_and_score`, from logits."""
        ...

    def eager(self) -> LabelBackend: ...


class ReferenceBackend:
    """Learning from labels in plain PyTorch, including DDP, torch.compile, autocast and activation checkpointing."""

    def __init__(
        self,
        model: ViT,
        recipe: Recipe,
        preprocessing: Preprocessing,
        hardware: Hardware,
        parallel: ParallelPlan,
        class_weights_K: Tensor | None = None,
        logit_offsets_K: Tensor | None = None,
    ) -> None:
        self.hardware = hardware
        self.gradients_final_after_backward = gradients_final_after_backward(recipe, parallel)
        task = TASKS[recipe.task_name]
        self.initial_loss = task.uniform_loss(recipe.model.num_classes, recipe.loss_name)
        self._augment = partial(augment_batch, recipe.augment, preprocessing, recipe.model.num_classes)
        self._loss = partial(
            loss_and_score,
            task,
            loss=recipe.loss_name,
            label_smoothing=recipe.label_smoothing,
            class_weights_K=class_weights_K,
            logit_offsets_K=logit_offsets_K,
        )
        self._model = model
        self.reducer = make_reducer(model, parallel, hardware.world, recipe.reduce_dtype)
        if recipe.activation_checkpointing:
            checkpoint_activations(model)
        self._forward = _make_forward(model, hardware, parallel, recipe.activation_checkpointing)

    def augment(self, images: Tensor, labels: Tensor, rng: Generator, mix_enabled: Tensor | None = None) -> Batch:
        return self._augment(images, labels, rng, mix_enabled)

    def loss_and_score(self, batch: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, Tensor]:
        images, targets = batch
        return self.loss(self.forward(images), targets, labels)

    def forward(self, images: Tensor) -> Tensor:
        with self.hardware.autocast():
            return self._forward(images)

    def loss(self, logits: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self._loss(logits, targets, labels)

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        return gradient_sync(self._model, self.reducer, is_last)

    def optimizer_step(self, optimizers: Sequence[Optimizer]) -> None:
        step_optimizers(optimizers)

    def eager(self) -> ReferenceBackend:
        backend = copy.copy(self)
        backend._forward, backend.reducer = self._model, None
        return backend


def step_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Update all parameters. Muon, the first optimizer, steps last: its update may already run on side streams."""
    for optimizer in reversed(optimizers):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def gradients_final_after_backward(recipe: Recipe, parallel: ParallelPlan) -> bool:
    """Whether a gradient can be used before the backward pass ends: it is not accumulated, clipped or reduced."""
    return recipe.grad_accum == 1 and not recipe.optim.grad_clip and parallel.mode == "single"


def _make_forward(
    model: nn.Module, hardware: Hardware, parallel: ParallelPlan, activation_checkpointing: bool
) -> Callable[[Tensor], Tensor]:
    rounds_weights = hardware.cuda_graphs and hardware.precision == "bf16" and not activation_checkpointing
    if parallel.mode != "fsdp" and rounds_weights:
        return hardware.maybe_compile(_bf16_forward(model))
    return hardware.maybe_compile(model)


def _bf16_forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Forward pass entirely in bf16 from fp32 weights, which are rounded in every step.

    Gradients reach the weights in fp32. Moves half the bytes of autocast, which keeps norms and residuals in fp32.
    """

    def forward(images_BCHW: Tensor) -> Tensor:
        rounded = {name: tensor.bfloat16() for name, tensor in model.named_parameters()}
        rounded |= {name: t.bfloat16() for name, t in model.named_buffers() if name.endswith("embedding.table")}
        return functional_call(model, rounded, (images_BCHW.bfloat16(),))

    return forward


def make_backend(
    model: ViT,
    recipe: Recipe,
    preprocessing: Preprocessing,
    hardware: Hardware,
    parallel: ParallelPlan,
    *,
    micro_batch_size: int = 16,
    class_weights_K: Tensor | None = None,
    logit_offsets_K: Tensor | None = None,
    log: LogFn = no_log,
    teacher: Teacher | None = None,
) -> Backend:
    """The fastest backend for this hardware. `log` receives the reason for each kernel that cannot be used.

    `teacher` is required if the recipe has `distill`.
    """
    hardware = check_cuda_graphs(hardware, parallel, log)
    reference = ReferenceBackend(model, recipe, preprocessing, hardware, parallel, class_weights_K, logit_offsets_K)
    backend: LabelBackend = reference
    forward_unsupported: str | None = None
    if parallel.mode == "fsdp" and recipe.distill is not None:
        forward_unsupported = "distillation with FSDP"
    if recipe.data.resize == "native":
        forward_unsupported = "native resizing has several patch grids"
    if can_run_triton(hardware.device):
        from vitral.kernels.backend import TritonBackend

        is_plain_softmax = recipe.loss_name == "softmax" and class_weights_K is None and recipe.distill is None
        if recipe.distill is not None:
            log("loss in PyTorch: kernels support labels only, and this run learns from a teacher too")
        backend = TritonBackend(
            reference,
            model=model,
            augment=recipe.augment,
            preprocessing=preprocessing,
            num_classes=recipe.model.num_classes,
            micro_batch_size=micro_batch_size,
            label_smoothing=recipe.label_smoothing if is_plain_softmax else None,
            logit_offsets_K=logit_offsets_K,
            hardware=hardware,
            forward_unsupported=forward_unsupported,
            sharded_reduce_dtype=recipe.reduce_dtype if parallel.mode == "fsdp" else None,
            log=log,
        )
    else:
        reference.hardware = fallback_from_fp8(hardware, forward_unsupported or "FP8 needs Triton kernels", log)
    if recipe.distill is None:
        return backend
    if teacher is None:
        raise ValueError("recipe.distill needs a teacher")
    return DistillBackend(backend, model, recipe.distill, teacher, preprocessing)
