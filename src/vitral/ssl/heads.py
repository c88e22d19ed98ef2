"""Heads on top of the encoder during pretraining. They are saved in checkpoints, but not part of the resulting model.

Shapes:  B images of this rank   K outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.distributed.world import SINGLE_PROCESS, World


class SumOverRanks(torch.autograd.Function):
    """Sum over the ranks whose backward pass sums the gradients: the loss of every rank depends on the result."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.all_reduce_sum(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.world.all_reduce_sum(gradient.clone()), None


def sum_over_ranks(tensor: Tensor, world: World) -> Tensor:
    """Differentiable sum over the ranks."""
    return tensor if world.size == 1 else SumOverRanks.apply(tensor, world)  # type: ignore[no-untyped-call]


def mean_over_ranks(tensor_BK: Tensor, world: World) -> Tensor:
    """Mean over the images of all ranks: B K -> K. Ranks may have different numbers of images."""
    if world.size == 1:
        return tensor_BK.mean(dim=0)
    count = world.all_reduce_sum(tensor_BK.new_full((), len(tensor_BK)))
    return sum_over_ranks(tensor_BK.sum(dim=0), world) / count


class BatchNorm(nn.Module):
    """Batch norm over the images of all ranks, in fp32. It has no running statistics, as heads are used in training only.

    The result therefore depends on neither the number of ranks nor earlier steps.
    """

    def __init__(self, width: int, world: World = SINGLE_PROCESS, affine: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.world, self.eps = world, eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x_BK: Tensor) -> Tensor:
        x_BK = x_BK.float()
        if self.world.size == 1:
            return F.batch_norm(x_BK, None, None, self.weight, self.bias, training=True, eps=self.eps)
        centred = x_BK - mean_over_ranks(x_BK, self.world)
        normed = centred * torch.rsqrt(mean_over_ranks(centred.square(), self.world) + self.eps)
        return normed if self.weight is None else normed * self.weight + self.bias


class MLP(nn.Sequential):
    """Linear layers with batch norm (optional) and GELU between them.

    Args:
        widths: Of the input, of each hidden layer and of the output.
        world: Ranks that batch norm averages over.
        batch_norm: Whether hidden layers have batch norm; their linear layers then need no bias.
        norm_output: Whether the output has batch norm without a learned scale.
    """

    def __init__(
        self, widths: Sequence[int], world: World, *, batch_norm: bool = True, norm_output: bool = False
    ) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in zip(widths[:-2], widths[1:-1], strict=True):
            layers.append(nn.Linear(inputs, outputs, bias=not batch_norm))
            layers += [BatchNorm(outputs, world)] if batch_norm else []
            layers.append(nn.GELU())
        layers.append(nn.Linear(widths[-2], widths[-1], bias=not norm_output))
        layers += [BatchNorm(widths[-1], world, affine=False)] if norm_output else []
        super().__init__(*layers)
        for layer in self:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


class Prototypes(nn.Module):
    """Cosine similarity with K learned vectors, the last layer of DINO's head (arXiv 2104.14294, appendix C)."""

    def __init__(self, width: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(prototypes, width))
        nn.init.trunc_normal_(self.weight, std=width**-0.5)

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.linear(F.normalize(x_BD.float(), dim=-1), F.normalize(self.weight, dim=-1))
