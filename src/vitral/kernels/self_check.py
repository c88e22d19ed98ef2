"""Comparison of a kernel with its PyTorch reference on the current device, before the kernel is first used.

The kernels were developed on a few GPU models. On others they may fail to compile, run out of shared memory or return
wrong results; the reference is then used instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor


def self_check_failure(compare: Callable[[], float], tolerance: float) -> str | None:
    """Why a kernel must not be used here, or None. `compare` runs it and returns its error.

    For training, pass the result to `World.first_reason`, so that all ranks use the same implementation.
    """
    try:
        error = compare()
    except Exception as exception:  # of any kind: from the compiler, the driver or the kernel's own checks
        first_line = (str(exception).splitlines() or [type(exception).__name__])[0]
        return f"the kernel failed: {first_line}"
    return None if error <= tolerance else f"the kernel's result differs by {error:.0%} from PyTorch's"


def max_relative_error(outputs: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """The largest relative error of several tensors; infinite if any is not finite."""
    errors = [relative_error(a.float(), b.float()) for a, b in zip(outputs, reference, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def relative_error(output: Tensor, reference: Tensor) -> float:
    """‖output - reference‖ / ‖reference‖."""
    difference, norm = float((output - reference).norm()), float(reference.norm())
    return difference / norm if norm else math.inf if difference else 0.0
