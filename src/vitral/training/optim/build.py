"""Optimizers, the learning rate over time, and averaged weights."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.recipes.schema import Optim
from vitral.training.optim.adamw import AdamW
from vitral.training.optim.muon import Muon

SPARED = ("token", "table", "registers", "probe")  # learned vectors, not maps: decay would pull them to zero


def make_optimizers(model: nn.Module, optim: Optim, on_device: torch.device | None = None) -> list[Optimizer]:
    """AdamW, SGD, or Muon for the encoder's matrices and AdamW for the rest. Weight decay on matrices alone.

    Parameters that do not learn are left out. With layer decay, a group's `scale` is its share of the learning rate.
    With `on_device`, learning rates are tensors there, which a recorded step reads anew each time.
    """
    matrices: dict[tuple[float, int], list[nn.Parameter]] = defaultdict(list)
    others: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    depth = 1 + max((int(n.split("blocks.")[1].split(".")[0]) for n, _ in model.named_parameters() if "blocks." in n))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = optim.layer_decay ** (depth + 1 - layer_of(name, depth))
        if parameter.ndim < 2 or name.endswith(SPARED):
            others[scale, 0.0].append(parameter)
        elif optim.name == "muon" and "blocks." in name:
            matrices[scale, 3 if name.endswith("qkv.weight") else 1].append(parameter)
        else:
            others[scale, optim.weight_decay].append(parameter)
    groups = [{"params": p, "weight_decay": decay, "scale": scale} for (scale, decay), p in others.items()]
    lr = optim.lr if on_device is None else torch.tensor(optim.lr, device=on_device)
    if optim.name == "sgd":
        optimizers: list[Optimizer] = [torch.optim.SGD(groups, lr=lr, momentum=optim.momentum, fused=True)]
    else:
        recorded = on_device is not None
        optimizers = [AdamW(groups, lr=lr, betas=optim.betas, fused=True, capturable=recorded)]
    if matrices:
        decay = optim.weight_decay if optim.muon_decay is None else optim.muon_decay
        alike = [{"params": p, "scale": scale, "parts": parts} for (scale, parts), p in matrices.items()]
        optimizers.insert(0, Muon(alike, lr=lr, weight_decay=decay))
    if on_device is not None:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["lr"].clone()  # each group's own
    return optimizers


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
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        own = lr * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """The saved state in the tensors that are there, where there are such: a recorded step knows them by address.

    Learning rates stay what they are here, numbers or tensors, whatever they were where the state was saved.
    """
    before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    own = [(group["lr"], group.get("capturable")) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for parameter, values in before.items():
        for name, tensor in values.items():
            if isinstance(tensor, Tensor):
                value = optimizer.state[parameter].get(name)  # nothing yet in a state from before the first step
                optimizer.state[parameter][name] = tensor.zero_() if value is None else tensor.copy_(value)
    for group, (lr, capturable) in zip(optimizer.param_groups, own, strict=True):
        group["lr"] = lr.fill_(float(group["lr"])) if isinstance(lr, Tensor) else float(group["lr"])
        if capturable is not None:
            group["capturable"] = capturable


class Averaged:
    """An exponential moving average of the weights, with a memory that fits the length of the run.

    A fixed decay such as 0.9999 remembers 10,000 steps: in a run of 2,000 it still shows the random start. Here
    the memory is a share of the run, and shorter still in the first steps.
    """

    def __init__(self, model: nn.Module, share: float, steps: int, copied: nn.Module | None = None) -> None:
        """`copied`: for a model that is divided among processes, which cannot be copied any more."""
        self.model = (copied or copy.deepcopy(model)).requires_grad_(False).eval()
        self.memory = max(share * steps, 1.0)
        self._averaged: list[Tensor] = list(self.model.parameters())
        self._current: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """After this step, a number on the device: nothing is read back."""
        share = 1 / ((10 + step) / 9).clamp(max=self.memory)
        ahead = torch._foreach_sub(self._current, self._averaged)
        torch._foreach_mul_(ahead, share)
        torch._foreach_add_(self._averaged, ahead)
