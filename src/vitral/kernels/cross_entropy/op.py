"""Loss, gradient and right answers of a batch in one launch, in place of some twenty operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from vitral.device.hardware import Hardware
from vitral.kernels.cross_entropy import kernel as judge_kernels
from vitral.kernels.precompile import launcher
from vitral.kernels.self_check import Say, largest, reason_against

Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, targets, labels → loss, right answers
AT_ONCE = 4096  # numbers
MOST = 2**15  # for a single program


class Judged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BK: Tensor, targets_BK: Tensor, labels_B: Tensor, smoothing: float) -> Any:
        B, K = logits_BK.shape
        dlogits, sums = torch.empty_like(targets_BK), targets_BK.new_empty(2)
        classes = triton.next_power_of_2(K)
        launcher(judge_kernels.judge, (1,))(
            logits_BK.contiguous(), targets_BK.contiguous(), labels_B, dlogits, sums, B, smoothing,
            K=K, ROWS=max(AT_ONCE // classes, 1), CLASSES=classes, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(dlogits)
        ctx.number = logits_BK.dtype
        loss, right = sums.unbind()
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits,) = ctx.saved_tensors
        return (dlogits * dloss).to(ctx.number), None, None, None


def judge_of(plain: Judge, images: int, classes: int, smoothing: float, hardware: Hardware, say: Say) -> Judge | None:
    """For softmax, if a single program can hold so much, and if it gives here what the `plain` one gives."""
    if images * triton.next_power_of_2(classes) > MOST:
        return None

    def ours(logits_BK: Tensor, targets_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        loss, right = Judged.apply(logits_BK, targets_BK, labels_B, smoothing)  # type: ignore[no-untyped-call]
        return loss, right

    if reason := reason_against(partial(difference, ours, plain, images, classes, hardware), 1e-2):
        say(f"the loss is left to PyTorch: {reason}")
    return None if reason else ours


def difference(ours: Judge, plain: Judge, images: int, classes: int, hardware: Hardware) -> float:
    """Between what two say: the largest share of loss, right answers and gradients."""
    draws, found = torch.Generator(hardware.device).manual_seed(0), []
    logits = torch.randn(images, classes, generator=draws, device=hardware.device)
    targets = torch.rand(images, classes, generator=draws, device=hardware.device)
    for judge in (ours, plain):
        given = logits.clone().requires_grad_()
        loss, right = judge(given, targets, logits.argmax(dim=1))
        found.append([loss.detach(), right, *torch.autograd.grad(loss, given)])
    return largest(*found)
