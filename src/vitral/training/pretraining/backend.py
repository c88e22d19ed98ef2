"""The computations of a pretraining step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Generator, Tensor
from torch.optim import Optimizer

from vitral.device.select import Hardware, can_run_triton, fallback_from_fp8
from vitral.distributed.gradients import GradientReducer
from vitral.distributed.parallel import ParallelPlan, gradient_sync, make_reducer
from vitral.recipes.schema import Recipe
from vitral.ssl.method import PretrainMethod
from vitral.ssl.views import render_views
from vitral.training.activation_checkpointing import checkpoint_activations
from vitral.training.backend import gradients_final_after_backward, step_optimizers
from vitral.utils.progress import LogFn, no_log


class PreparesOptimizers(Protocol):
    def prepare(self, optimizers: Sequence[Any]) -> None: ...


class PretrainBackend:
    """A pretraining method as the backend of a step, with DDP, torch.compile and autocast.

    On an NVIDIA GPU, `make_pretrain_backend` gives its encoders and optimizers fused kernels.
    """

    def __init__(
        self,
        method: PretrainMethod,
        hardware: Hardware,
        forward: Callable[..., tuple[Tensor, Tensor]],
        optimizer_kernels: PreparesOptimizers | None = None,
        reducer: GradientReducer | None = None,
    ) -> None:
        self.reducer = reducer
        self.method, self.hardware, self.initial_loss = method, hardware, method.initial_loss
        self._forward, self._optimizer_kernels = forward, optimizer_kernels

    def augment(
        self, images: Tensor, labels: Tensor, rng: Generator, mix_enabled: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self.method.make_batch_of_rows(images, labels, rng)

    def loss_and_score(self, batch: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, Tensor]:
        with self.hardware.autocast():
            return self._forward(*batch)

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        return gradient_sync(self.method, self.reducer, is_last)

    def optimizer_step(self, optimizers: Sequence[Optimizer]) -> None:
        if self._optimizer_kernels is not None:
            self._optimizer_kernels.prepare(optimizers)
        step_optimizers(optimizers)

    def eager(self) -> PretrainBackend:
        """The same step in plain PyTorch, where hooks see every module."""
        backend = copy.copy(self)
        backend._forward, backend.reducer = self.method.reference_forward, None
        return backend


def make_pretrain_backend(
    method: PretrainMethod,
    recipe: Recipe,
    hardware: Hardware,
    parallel: ParallelPlan,
    *,
    micro_batch_size: int,
    log: LogFn = no_log,
) -> PretrainBackend:
    """The fastest backend for this hardware. `log` receives the reason for each kernel that cannot be used."""
    if recipe.activation_checkpointing:
        for branch in filter(None, (method.student, method.teacher)):
            checkpoint_activations(branch.vit)
    hardware = fallback_from_fp8(hardware, "FP8 kernels support training with labels only", log)
    if hardware.compile:
        method.render_fn = hardware.maybe_compile(render_views)
    if hardware.cuda_graphs and parallel.mode != "single":
        hardware = hardware.without_cuda_graphs("the collectives of pretraining methods are not captured")
    reducer = make_reducer(method, parallel, hardware.world, recipe.reduce_dtype)
    if not can_run_triton(hardware.device):
        return PretrainBackend(method, hardware, hardware.maybe_compile(method), reducer=reducer)
    from vitral.kernels.optimizers import OptimizerKernels
    from vitral.kernels.pretraining import fuse_encoders

    is_fused = (
        parallel.mode != "fsdp"
        and not recipe.activation_checkpointing
        and fuse_encoders(method, hardware, micro_batch_size, log)
    )
    # A compiled method would trace into the fused kernels, which are compiled already.
    forward = method if is_fused else hardware.maybe_compile(method)
    kernels = OptimizerKernels(
        hardware, overlap_muon=is_fused and gradients_final_after_backward(recipe, parallel), overrides=set(), log=log
    )
    return PretrainBackend(method, hardware, forward, kernels, reducer)
