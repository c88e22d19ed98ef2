"""Batches of a set that lies on the device, in an order that depends on seed and epoch alone.

So a place in a training is two numbers, epoch and step, and a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Loader:
    images: Tensor  # uint8, N C H W
    labels: Tensor  # int64, N
    batch: int
    seed: int

    @property
    def steps(self) -> int:
        """Full batches an epoch. What is left over, less than a batch, sits this epoch out: other images each time."""
        return max(len(self.labels) // self.batch, 1)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, from batch `start` on."""
        generator = torch.Generator().manual_seed(((self.seed << 20) + epoch) % 2**64)
        order = torch.randperm(len(self.labels), generator=generator).to(self.labels.device)
        for step in range(start, self.steps):
            chosen = order[step * self.batch : (step + 1) * self.batch]
            yield self.images[chosen], self.labels[chosen]
