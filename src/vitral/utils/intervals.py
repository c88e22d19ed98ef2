"""Confidence intervals of proportions."""

from __future__ import annotations

import math


def wilson_interval(proportion: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson, 1927), valid near 0 and 1 too."""
    centre = (proportion + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(proportion * (1 - proportion) / count + z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def images_to_show(proportion: float, z: float = 1.96) -> int:
    """Smallest count for which the 95% interval of a proportion of 1 is above `proportion`."""
    return math.ceil(z**2 * proportion / (1 - proportion))
