"""How far a figure would move with other test images: the bootstrap (Efron, 1979), whole blocks of it at once.

A resample is a row of counts: how often each image was drawn. A mean over resamples is then one matrix product.

Shapes:  N images   R resamples   V values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 1000
SEED = 1979
BLOCK = 2_000_000  # counts held at a time


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure, and between what it lies with 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} – {self.high:.4f})"


def resamples(*sizes: int, count: int = RESAMPLES, seed: int = SEED) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of counts, one tensor R N for each of the sets of images, which are drawn from independently."""
    draws = torch.Generator().manual_seed(seed)
    rows = max(BLOCK // max(sizes), 1)
    for start in range(0, count, rows):
        R = min(rows, count - start)
        yield tuple(
            torch.zeros(R, N).scatter_add_(1, torch.randint(N, (R, N), generator=draws), torch.ones(R, N))
            for N in sizes
        )


def bootstrap(statistic: Callable[..., Tensor], *sizes: int, count: int = RESAMPLES, seed: int = SEED) -> Tensor:
    """`statistic` turns counts, R N for each set, into R V; the values of all resamples: count V."""
    return torch.cat([statistic(*counts) for counts in resamples(*sizes, count=count, seed=seed)])


def between(values_RV: Tensor, share: float = 0.95) -> tuple[Tensor, Tensor]:
    """The percentiles that hold the middle `share`: V and V."""
    tail = (1 - share) / 2
    low, high = values_RV.double().quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    return low, high


def intervals(values_V: Tensor, samples_RV: Tensor) -> list[Interval]:
    low, high = between(samples_RV)
    rows = zip(values_V.tolist(), low.tolist(), high.tolist(), strict=True)
    return [Interval(value=value, low=at_least, high=at_most) for value, at_least, at_most in rows]


def mean_intervals(values_NV: Tensor, count: int = RESAMPLES) -> list[Interval]:
    """Of the mean of each column."""
    N = len(values_NV)
    values_NV = values_NV.float()
    samples = bootstrap(lambda counts_RN: counts_RN @ values_NV / N, N, count=count)
    return intervals(values_NV.double().mean(dim=0), samples)
