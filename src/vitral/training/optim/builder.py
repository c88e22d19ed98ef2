"""Build the optimizers of a run and restore their state."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.recipes.schema import OptimConfig
from vitral.training.optim.adamw import AdamW
from vitral.training.optim.muon import Muon
from vitral.training.optim.param_groups import ParamSettings, num_blocks, param_settings
from vitral.utils.eager_optimizer import SGD


def make_optimizers(model: nn.Module, optim: OptimConfig, lr_device: torch.device | None = None) -> list[Optimizer]:
    """AdamW, SGD, or Muon for the matrices of the blocks plus AdamW for everything else.

    Parameters that do not require gradients are left out. A group's `scale` is its factor on the learning rate. With
    `lr_device`, learning rates are tensors on that device, which a captured CUDA graph reads again at every replay.
    """
    depth = num_blocks(model)
    grouped: dict[ParamSettings, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grouped[param_settings(name, parameter, optim, depth)].append(parameter)
    muon_groups = [
        {"params": params, "scale": settings.lr_scale, "num_matrices": settings.num_matrices}
        for settings, params in grouped.items()
        if settings.use_muon
    ]
    groups = [
        {"params": params, "weight_decay": settings.weight_decay, "scale": settings.lr_scale}
        for settings, params in grouped.items()
        if not settings.use_muon
    ]
    lr = optim.lr if lr_device is None else torch.tensor(optim.lr, device=lr_device)
    optimizers: list[Optimizer] = []
    if muon_groups:
        muon_decay = next(settings.weight_decay for settings in grouped if settings.use_muon)
        optimizers.append(Muon(muon_groups, lr=lr, weight_decay=muon_decay))
    if optim.name == "sgd":
        optimizers.append(SGD(groups, lr=lr, momentum=optim.momentum, fused=True))
    else:
        optimizers.append(AdamW(groups, lr=lr, betas=optim.betas, fused=True, capturable=lr_device is not None))
    if lr_device is not None:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["lr"].clone()  # one tensor per group: their scales differ
    return optimizers


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a saved state into the existing tensors, which a captured CUDA graph reads by address.

    Learning rates keep their form (number or tensor), whatever they were when the state was saved.
    """
    state_before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    lr_before = [(group["lr"], group.get("capturable")) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for parameter, values in state_before.items():
        for name, tensor in values.items():
            if isinstance(tensor, Tensor):
                value = optimizer.state[parameter].get(name)  # missing in a state saved before the first step
                optimizer.state[parameter][name] = tensor.zero_() if value is None else tensor.copy_(value)
    for group, (lr, capturable) in zip(optimizer.param_groups, lr_before, strict=True):
        group["lr"] = lr.fill_(float(group["lr"])) if isinstance(lr, Tensor) else float(group["lr"])
        if capturable is not None:
            group["capturable"] = capturable


def restore_moments(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load the state of each parameter, as `restore_optimizer` does, and keep the settings of the groups."""
    restore_optimizer(optimizer, {**saved, "param_groups": optimizer.state_dict()["param_groups"]})
