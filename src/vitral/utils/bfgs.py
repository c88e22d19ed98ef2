"""Minimise a smooth function of up to a few thousand numbers.

As torch.optim.LBFGS, without the import of torch._dynamo that every optimizer of torch needs (2 s).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SUFFICIENT_DECREASE = 1e-4  # of the Armijo condition
MIN_STEP = 1e-10
TOLERANCE = 1e-8  # largest element of the gradient at the minimum


def minimize(function: Callable[[Tensor], Tensor], start: Tensor, max_steps: int = 200) -> Tensor:
    """The minimum of `function` (a vector to a scalar) near `start`, by BFGS with backtracking.

    Stops early where no step decreases the function, such as next to values that are not finite.
    """

    def value_and_gradient(x: Tensor) -> tuple[float, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = function(x)
            (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient

    x = start.detach()
    inverse_hessian: Tensor | None = None
    value, gradient = value_and_gradient(x)
    for _ in range(max_steps):
        if gradient.abs().max() <= TOLERANCE:
            break
        direction = -gradient if inverse_hessian is None else -inverse_hessian @ gradient
        slope, step = (gradient @ direction).item(), 1.0
        while True:
            next_value, next_gradient = value_and_gradient(x + step * direction)
            if next_value <= value + SUFFICIENT_DECREASE * step * slope:
                break
            step /= 2
            if step < MIN_STEP:
                return x
        inverse_hessian = _updated(inverse_hessian, step * direction, next_gradient - gradient)
        x, value, gradient = x + step * direction, next_value, next_gradient
    return x


def _updated(inverse_hessian: Tensor | None, s: Tensor, y: Tensor) -> Tensor | None:
    """The BFGS update for a step `s` and the change `y` of the gradient; none where the curvature is not positive."""
    curvature = s @ y
    if not curvature > 0:
        return inverse_hessian
    if inverse_hessian is None:
        inverse_hessian = torch.eye(len(s), dtype=s.dtype) * (curvature / (y @ y))
    hy = inverse_hessian @ y
    cross = torch.outer(hy, s) / curvature
    return inverse_hessian - cross - cross.T + torch.outer(s, s) * ((1 + y @ hy / curvature) / curvature)
