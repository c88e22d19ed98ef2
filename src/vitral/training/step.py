"""One optimizer step: augment, forward, backward, update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitral.distributed.dtensor import full_tensor
from vitral.recipes.schema import Recipe
from vitral.ssl.method import PretrainMethod
from vitral.training.backend import Backend
from vitral.training.optim.schedule import learning_rate, set_learning_rate
from vitral.training.state import TrainState

MAX_LOSS_RATIO = 1000  # a loss this many times that of an untrained model counts as diverged


@dataclass(frozen=True)
class StepContext:
    """The constants of a run that every step needs."""

    recipe: Recipe
    backend: Backend
    mix_off_step: int | None = None  # first step without mixup and CutMix

    @property
    def max_loss(self) -> float:
        """A loss above this counts as diverged."""
        return MAX_LOSS_RATIO * self.backend.initial_loss


def train_step(
    state: TrainState, images_BCHW: Tensor, labels_B: Tensor, context: StepContext, total_steps: int = 1
) -> None:
    """One optimizer step on a batch of uint8 images. Never synchronises with the host, so it can be captured.

    If the loss or the gradient norm is not finite, this update and all later ones are skipped on the device, so that
    the state is still the one before the bad step when the host finds out (`Trainer.check_finite`).
    """
    recipe = context.recipe
    loss, score_sum = forward_backward(state, images_BCHW, labels_B, context.backend, context)
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    grad_norm = full_tensor(nn.utils.get_total_norm(gradients))
    if recipe.optim.grad_clip:
        nn.utils.clip_grads_with_norm_(state.model.parameters(), recipe.optim.grad_clip, grad_norm)
    is_good = (grad_norm < math.inf) & (loss < context.max_loss)  # false for NaN
    is_first = (state.first_nonfinite_step < 0) & ~is_good
    state.first_nonfinite_step.copy_(torch.where(is_first, state.step_tensor, state.first_nonfinite_step))
    state.found_nonfinite.copy_(state.first_nonfinite_step >= 0)
    context.backend.optimizer_step(state.optimizers)
    if state.ema is not None:
        state.ema.update(state.step_tensor)
    if isinstance(state.model, PretrainMethod):
        state.model.after_step(state.step_tensor / total_steps, 1 - state.found_nonfinite)
    state.epoch_sums += torch.stack([loss * len(labels_B), score_sum, torch.full_like(loss, len(labels_B))])


def forward_backward(
    state: TrainState, images_BCHW: Tensor, labels_B: Tensor, backend: Backend, context: StepContext
) -> tuple[Tensor, Tensor]:
    """Mean loss of the batch and sum of its running score; gradients accumulate in the parameters.

    The batch is augmented and mixed as a whole, which keeps the result independent of the number of ranks and
    micro-batches. Each rank then computes its slice in `grad_accum` micro-batches. Losses are sums divided by the size
    of the whole batch, so micro-batches of different sizes still add up to the gradient of the whole batch.
    """
    world = backend.hardware.world
    B = len(labels_B)
    mix_enabled = None if context.mix_off_step is None else state.step_tensor < context.mix_off_step
    batch = backend.augment(images_BCHW, labels_B, state.augment_rng, mix_enabled)
    rank_range = world.shard_range(B)
    rank_slice = slice(rank_range.start, rank_range.stop)
    num_micro_batches = min(context.recipe.grad_accum, B // world.size)
    micro_batches = zip(
        *(tensor[rank_slice].tensor_split(num_micro_batches) for tensor in (*batch, labels_B)), strict=True
    )
    sums = []
    for index, (*micro_batch, micro_labels) in enumerate(micro_batches, start=1):
        with backend.gradient_sync(is_last=index == num_micro_batches):
            loss_sum, score_sum = backend.loss_and_score(tuple(micro_batch), micro_labels)
            (loss_sum * (world.size / B)).backward()  # gradients are averaged over the ranks, not summed
        sums.append(torch.stack([loss_sum.detach() / B, score_sum]))
    mean_loss, total_score = world.all_reduce_sum(
        torch.stack(sums).sum(dim=0) if num_micro_batches > 1 else sums[0]
    ).unbind()
    return mean_loss, total_score


class StepRunner:
    """Runs optimizer steps at the scheduled learning rate, as a captured CUDA graph where the hardware supports it."""

    def __init__(self, state: TrainState, context: StepContext, total_steps: int) -> None:
        self.state, self.context, self.total_steps = state, context, total_steps
        self.capture()

    def capture(self) -> None:
        """Capture again, after tensors of the state have been replaced."""
        self._step = self.context.backend.hardware.capture_step(self._train_step, self.state.augment_rng)

    def _train_step(self, images_BCHW: Tensor, labels_B: Tensor) -> None:
        train_step(self.state, images_BCHW, labels_B, self.context, self.total_steps)

    def run(self, images_BCHW: Tensor, labels_B: Tensor, lr: float | None = None) -> None:
        """One step, at the scheduled learning rate unless `lr` is given. Does not advance `state.step`."""
        state, recipe = self.state, self.context.recipe
        if lr is None:
            lr = learning_rate(state.step, self.total_steps, recipe.optim) * recipe.lr_scale * 0.5**state.rollbacks
        set_learning_rate(state.optimizers, lr)
        state.step_tensor.fill_(state.step)
        self._step(images_BCHW, labels_B)
