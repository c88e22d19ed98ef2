"""Kernels are tried before they are used: not every GPU was at hand when they were written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor

Say = Callable[[str], None]


def reason_against(compare: Callable[[], float], most: float) -> str:
    """Why kernels are not used here: they fail, or are off by more than `most` from what PyTorch gives. Else empty."""
    try:
        off = compare()
    except Exception as error:  # the compiler's, the driver's, of whatever kind
        return f"its kernels fail here: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return "" if off <= most else f"its kernels are off by {off:.0%} here"


def largest(ours: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """Of the shares by which these are off. What is not a number is infinitely far off."""
    off = [share_off(a.float(), b.float()) for a, b in zip(ours, wanted, strict=True)]
    return max(off) if all(map(math.isfinite, off)) else math.inf


def share_off(ours: Tensor, wanted: Tensor) -> float:
    apart, length = float((ours - wanted).norm()), float(wanted.norm())
    return apart / length if length else math.inf if apart else 0.0
