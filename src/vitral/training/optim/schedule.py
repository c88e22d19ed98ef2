"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from vitral.recipes.schema import OptimConfig


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Learning rate at `step`, counted from 0.

    Linear warm-up to `lr`, then a half cosine or a line down to `lr * final_lr`, or constant.
    """
    warmup = round(optim.warmup * total_steps) if optim.warmup < 1 else optim.warmup
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total_steps - warmup, 1)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * decay[optim.schedule])


def set_learning_rate(optimizers: Sequence[Optimizer], lr: float) -> None:
    """Set every group's learning rate to `lr` times its `scale`.

    Learning rates that are tensors are filled in place, because a captured CUDA graph reads them by address.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group_lr = lr * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group_lr)
        else:
            group["lr"] = group_lr
