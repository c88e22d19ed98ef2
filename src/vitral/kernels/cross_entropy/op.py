"""Softmax cross-entropy, its gradient and the number of correct predictions in one launch instead of about twenty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from vitral.kernels.cross_entropy.kernel import cross_entropy_kernel
from vitral.kernels.precompile import launch
from vitral.kernels.self_check import max_relative_error

# logits (B, K), soft targets (B, K), labels (B,) → summed loss, number of correct predictions
BatchLossFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

BLOCK_SIZE = 4096  # logits per iteration
MAX_LOGITS = 2**15  # logits that one program handles faster than PyTorch's many kernels do


class FusedCrossEntropy(torch.autograd.Function):
    """The gradient is computed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BK: Tensor,
        targets_BK: Tensor,
        labels_B: Tensor,
        label_smoothing: float,
        logit_offsets_K: Tensor | None,
    ) -> Any:
        B, K = logits_BK.shape
        grad_logits, sums = torch.empty_like(targets_BK), targets_BK.new_empty(2)
        block_classes = triton.next_power_of_2(K)
        launch(cross_entropy_kernel, (1,))(
            logits_BK.contiguous(), sums if logit_offsets_K is None else logit_offsets_K, targets_BK.contiguous(),
            labels_B, grad_logits, sums, B, label_smoothing, NUM_CLASSES=K, HAS_OFFSETS=logit_offsets_K is not None,
            BLOCK_ROWS=max(BLOCK_SIZE // block_classes, 1), BLOCK_CLASSES=block_classes, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(grad_logits)
        ctx.logits_dtype = logits_BK.dtype
        loss_sum, num_correct = sums.unbind()
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad_logits,) = ctx.saved_tensors
        return (grad_logits * grad_loss).to(ctx.logits_dtype), None, None, None, None


def fused_cross_entropy(
    logits_BK: Tensor,
    targets_BK: Tensor,
    labels_B: Tensor,
    label_smoothing: float,
    logit_offsets_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed loss, differentiable with respect to the logits, and the number of correct predictions.

    `logit_offsets_K` (fp32) are added to the logits in the loss, not for the predictions.
    """
    loss_sum, num_correct = FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_BK, targets_BK, labels_B, label_smoothing, logit_offsets_K
    )
    return loss_sum, num_correct


def is_supported(batch_size: int, num_classes: int) -> bool:
    """Whether a single program can process the batch."""
    return batch_size * triton.next_power_of_2(num_classes) <= MAX_LOGITS


def loss_error(
    loss_fn: BatchLossFn, reference: BatchLossFn, batch_size: int, num_classes: int, device: torch.device
) -> float:
    """Largest relative error of loss, number of correct predictions and gradient on random logits."""
    rng, outputs = torch.Generator(device).manual_seed(0), []
    random_logits = torch.randn(batch_size, num_classes, generator=rng, device=device)
    targets = torch.rand(batch_size, num_classes, generator=rng, device=device)
    for compute_loss in (loss_fn, reference):
        logits = random_logits.clone().requires_grad_()
        loss_sum, num_correct = compute_loss(logits, targets, random_logits.argmax(dim=1))
        outputs.append([loss_sum.detach(), num_correct, *torch.autograd.grad(loss_sum, logits)])
    return max_relative_error(*outputs)
