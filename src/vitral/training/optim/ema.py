"""Exponential moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class EMA:
    """Average of the weights over a window that is a fraction of the run.

    A fixed decay such as 0.9999 averages over 10,000 steps; in a run of 2,000 steps it would still contain the random
    initialisation. Here the window is `fraction * total_steps`, and shorter during the first steps.
    """

    def __init__(self, model: nn.Module, fraction: float, total_steps: int, ema_model: nn.Module | None = None) -> None:
        """`ema_model`: a copy made before `model` was sharded, because a sharded model cannot be copied."""
        self.model = (ema_model or copy.deepcopy(model)).requires_grad_(False).eval()
        self.window = max(fraction * total_steps, 1.0)
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        trained = [(average, weight) for average, weight in pairs if weight.requires_grad]
        self._averages: list[Tensor] = [average for average, _ in trained]
        self._weights: list[Tensor] = [weight for _, weight in trained]

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """Update the average after `step`, which is a tensor on the device so that the host never waits."""
        rate = 1 / ((10 + step) / 9).clamp(max=self.window)
        difference = torch._foreach_sub(self._weights, self._averages)
        torch._foreach_mul_(difference, rate)
        torch._foreach_add_(self._averages, difference)
