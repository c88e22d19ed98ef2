"""Values with 95% confidence intervals: Wilson's for proportions, Student's t for means."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f}-{self.high:.4f})"

    def percent(self, digits: int = 2) -> str:
        """`98.75% (95% CI 98.51-98.95%)`"""
        return f"{self.value:.{digits}%} (95% CI {percent_range(self.low, self.high, digits)})"

    def percent_range(self, digits: int = 2) -> str:
        """`98.51-98.95%`"""
        return percent_range(self.low, self.high, digits)


def percent_range(low: float, high: float, digits: int = 2) -> str:
    """`98.51-98.95%`"""
    return f"{100 * low:.{digits}f}-{high:.{digits}%}"


def wilson_interval(proportion: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson, 1927), valid near 0 and 1 too."""
    centre = (proportion + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(proportion * (1 - proportion) / count + z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def proportion_interval(count: int, total: int) -> Interval:
    """The proportion count / total. Unlike a bootstrap interval, this one is not empty for proportions of 0 and 1."""
    low, high = wilson_interval(count / total, total)
    return Interval(value=count / total, low=low, high=high)


def student_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t distribution: half of a 95% interval, in standard errors."""
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(freedom, 0.975))


def images_to_show(proportion: float, z: float = 1.96) -> int:
    """Smallest count for which the 95% interval of a proportion of 1 is above `proportion`."""
    return math.ceil(z**2 * proportion / (1 - proportion))
