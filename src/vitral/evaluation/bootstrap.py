"""Bootstrap confidence intervals (Efron, 1979), computed for blocks of resamples at once.

A resample is a row of counts: how often each image was drawn. Means over resamples are then matrix products.

Shapes:  N images   R resamples   V values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vitral.utils.intervals import Interval

NUM_RESAMPLES = 1000
SEED = 1979
COVERAGE = 0.95
MAX_COUNTS = 2_000_000  # elements of a block of resamples


def resamples(*sizes: int, count: int) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of counts, one tensor (R, N) for each independently drawn set of images."""
    generator = torch.Generator().manual_seed(SEED)
    rows = max(MAX_COUNTS // max(sizes), 1)
    for start in range(0, count, rows):
        R = min(rows, count - start)
        yield tuple(
            torch.zeros(R, N).scatter_add_(1, torch.randint(N, (R, N), generator=generator), torch.ones(R, N))
            for N in sizes
        )


def bootstrap(statistic: Callable[..., Tensor], *sizes: int, count: int = NUM_RESAMPLES) -> Tensor:
    """Values (count, V) of a statistic on all resamples. `statistic` maps counts, (R, N) per set, to (R, V)."""
    return torch.cat([statistic(*counts) for counts in resamples(*sizes, count=count)])


def percentile_interval(values_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper percentiles (V,) that enclose the middle 95% of the values."""
    tail = (1 - COVERAGE) / 2
    low, high = values_RV.double().quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    return low, high


def intervals(values_V: Tensor, samples_RV: Tensor) -> list[Interval]:
    lows, highs = percentile_interval(samples_RV)
    rows = zip(values_V.tolist(), lows.tolist(), highs.tolist(), strict=True)
    return [Interval(value=value, low=low, high=high) for value, low, high in rows]


def mean_interval(values_N: Tensor, count: int = NUM_RESAMPLES) -> Interval:
    N, values_N1 = len(values_N), values_N[:, None].float()
    samples = bootstrap(lambda counts_RN: counts_RN @ values_N1 / N, N, count=count)
    return intervals(values_N1.double().mean(dim=0), samples)[0]
