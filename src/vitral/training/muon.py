"""Muon (Jordan, 2024): momentum whose matrix is replaced by the nearest orthogonal one before each step.

torch.optim.Muon goes matrix by matrix; here all matrices of one shape are orthogonalised together, which is what the
blocks of a ViT offer: a few batched products a step instead of hundreds of small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitral.hardware import bf16_is_faster


class Muon(Optimizer):
    """For matrices alone. Steps are as long as AdamW's (arXiv 2502.16982), so that both share a learning rate."""

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon moves matrices; this parameter has shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for parameters in alike.values():
                self._move(parameters, **{name: group[name] for name in ("lr", "weight_decay", "momentum")})

    def _move(self, parameters: list[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        """One step for matrices of one shape."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, averages, momentum)  # Nesterov
        directions = orthogonalise(torch.stack(list(ahead)))
        length = 0.2 * max(parameters[0].shape) ** 0.5  # makes the mean square of a step that of AdamW's
        decay: float | Tensor = 1 - lr * weight_decay
        if self.found_inf is not None:  # as in torch's fused optimizers: where it is 1, no weight moves
            decay = 1 - lr * weight_decay * (1 - self.found_inf)
            directions = torch.where(self.found_inf > 0, 0.0, directions)
        torch._foreach_mul_(parameters, decay)
        torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype).unbind(0)), alpha=-lr * length)


def orthogonalise(matrices_NAB: Tensor, steps: int = 5) -> Tensor:
    """Five Newton–Schulz steps towards U·Vᵀ of each matrix's singular value decomposition U·S·Vᵀ.

    The quintic's coefficients (Jordan, 2024) trade exactness for speed: singular values end between about 0.7 and
    1.2, which serves as well as 1. So bf16 is exact enough, where it is faster.
    """
    tall = matrices_NAB.shape[-2] > matrices_NAB.shape[-1]
    x = matrices_NAB.mT if tall else matrices_NAB
    x = x.to(torch.bfloat16 if bf16_is_faster(x.device, x.shape[-2]) else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x
