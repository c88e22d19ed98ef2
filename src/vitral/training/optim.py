"""Optimizers, the learning rate over time, and averaged weights."""

from __future__ import annotations

import copy
import math
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.training.muon import Muon
from vitral.training.recipe import Optim

SPARED = ("token", "table", "registers", "probe")  # learned vectors, not maps: decay would pull them to zero


def make_optimizers(model: nn.Module, optim: Optim) -> list[Optimizer]:
    """AdamW, SGD, or Muon for the encoder's matrices and AdamW for the rest. Weight decay on matrices alone.

    Parameters that do not learn are left out. With layer decay, a group's `scale` is its share of the learning rate.
    """
    matrices: dict[float, list[nn.Parameter]] = defaultdict(list)
    others: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    depth = 1 + max((int(n.split("blocks.")[1].split(".")[0]) for n, _ in model.named_parameters() if "blocks." in n))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = optim.layer_decay ** (depth + 1 - layer_of(name, depth))
        if parameter.ndim < 2 or name.endswith(SPARED):
            others[scale, 0.0].append(parameter)
        elif optim.name == "muon" and "blocks." in name:
            matrices[scale].append(parameter)
        else:
            others[scale, optim.weight_decay].append(parameter)
    groups = [{"params": p, "weight_decay": decay, "scale": scale} for (scale, decay), p in others.items()]
    if optim.name == "sgd":
        return [torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
    if not matrices:
        return [adamw]
    alike = [{"params": p, "scale": scale} for scale, p in matrices.items()]
    return [Muon(alike, lr=optim.lr, weight_decay=optim.weight_decay), adamw]


def layer_of(name: str, depth: int) -> int:
    """0 for the embedding, 1 … depth for the blocks, depth + 1 for what comes after them."""
    if "blocks." in name:
        return 1 + int(name.split("blocks.")[1].split(".")[0])
    return depth + 1 if name.startswith(("encoder.norm", "head", "attention_pooling", "pooled_norm")) else 0


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """At `step` of `steps`: a straight climb to lr, then down to lr·final_lr along half a cosine or a line."""
    warmup = round(optim.warmup * steps) if optim.warmup < 1 else optim.warmup
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(steps - warmup, 1)
    falling = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * falling[optim.schedule])


def set_learning_rate(optimizers: list[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)


class Averaged:
    """An exponential moving average of the weights, with a memory that fits the length of the run.

    A fixed decay such as 0.9999 remembers 10,000 steps: in a run of 2,000 it still shows the random start. Here
    the memory is a share of the run, and shorter still in the first steps.
    """

    def __init__(self, model: nn.Module, share: float, steps: int) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.memory = max(share * steps, 1.0)
        self._averaged: list[Tensor] = list(self.model.parameters())
        self._current: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        memory = min(self.memory, (10 + step) / 9)
        torch._foreach_lerp_(self._averaged, self._current, 1 / memory)
