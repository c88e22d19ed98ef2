"""Muon (Jordan, 2024): momentum whose matrix is replaced by the nearest orthogonal one before each step.

torch.optim.Muon goes matrix by matrix; here all matrices of one shape are orthogonalised together, which is what the
blocks of a ViT offer: a few batched products a step instead of hundreds of small ones. A matrix of which each process
holds some rows is gathered for it: its singular vectors cannot be had from rows alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitral.hardware import bf16_is_faster
from vitral.training.divided import placed, whole


class Muon(Optimizer):
    """For matrices alone. Steps are as long as AdamW's (arXiv 2502.16982), so that both share a learning rate.

    A group's `parts` says how many square maps its matrices hold, one above the other: queries, keys and values are
    three. Each is orthogonalised by itself. With `compile`, the learning rate must be a tensor.
    """

    found_inf: Tensor | None = None  # as in torch's fused optimizers: where it is 1, no weight moves

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor,
        weight_decay: float,
        momentum: float = 0.95,
        compile: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "parts": 1})
        self.turn = torch.compile(turn) if compile else turn
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon moves matrices; this parameter has shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moving:
            return
        averages = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p, _ in moving]
        moves = self.turn(
            [p.grad for p, _ in moving],
            averages,
            [group["momentum"] for _, group in moving],
            [group["parts"] for _, group in moving],
        )
        for group in self.param_groups:
            mine = [(p, move) for (p, its), move in zip(moving, moves, strict=True) if its is group]
            lr, decay = group["lr"], group["lr"] * group["weight_decay"]
            if self.found_inf is not None:
                lr, decay = lr * (1 - self.found_inf), decay * (1 - self.found_inf)
            if mine:
                parameters, directions = map(list, zip(*mine, strict=True))
                if self.found_inf is not None:  # 0 times what is not finite is not 0
                    directions = [torch.where(self.found_inf > 0, 0.0, direction) for direction in directions]
                torch._foreach_mul_(parameters, 1 - decay)
                torch._foreach_mul_(directions, lr)
                torch._foreach_sub_(parameters, [placed(d, p) for d, p in zip(directions, parameters, strict=True)])


def turn(gradients: list[Tensor], averages: list[Tensor], momentum: list[float], parts: list[int]) -> list[Tensor]:
    """The averages moved on, and for each matrix the orthogonal direction of its step, of AdamW's length.

    All square maps and all wide matrices of one shape, tall ones turned on their side, go through together.
    """
    ahead = []
    for gradient, average, memory in zip(gradients, averages, momentum, strict=True):
        average.lerp_(gradient, 1 - memory)
        ahead.append(whole(gradient.lerp(average, memory)))  # Nesterov
    alike: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for matrix, count in zip(ahead, parts, strict=True):
        for piece in matrix.chunk(count):
            wide = piece.mT if piece.shape[0] > piece.shape[1] else piece
            alike[wide.shape[0], wide.shape[1]].append(wide)
    # The mean square of a step is that of AdamW's.
    turned = {
        shape: iter((orthogonalise(torch.stack(pieces)) * (0.2 * shape[1] ** 0.5)).unbind(0))
        for shape, pieces in alike.items()
    }
    directions = []
    for matrix, count in zip(ahead, parts, strict=True):
        rows, columns = matrix.shape[0] // count, matrix.shape[1]
        found = [next(turned[min(rows, columns), max(rows, columns)]) for _ in range(count)]
        direction = torch.cat([piece.mT if rows > columns else piece for piece in found])
        directions.append(direction.to(matrix.dtype))
    return directions


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
