"""Sharded tensors (DTensor): gather them, shard full tensors again, load state saved in either form."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor. Tests an attribute because importing the DTensor module takes about a second."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:
    """The full tensor of a possibly sharded one. A collective: every rank must call it."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Shard a full tensor as `like` is sharded. Returned unchanged if `like` is not sharded, if the tensor is
    already sharded, or if the shapes differ."""
    if not is_sharded(like) or is_sharded(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def full_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with full tensors, on every rank."""
    return {name: full_tensor(tensor) for name, tensor in state.items()}


def load_full_state_dict(model: nn.Module, state: dict[str, Tensor], unchanged: Collection[str] = ()) -> None:
    """Load full tensors into a model that may be sharded. Tensors named in `unchanged` may be missing."""
    current = model.state_dict()
    missing = {name: current[name] for name in unchanged if name not in state}
    model.load_state_dict(missing | {name: shard_like(tensor, current.get(name)) for name, tensor in state.items()})


def shard_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state, sharded as its parameters are."""
    parameters = optimizer_parameters(optimizer)
    state = {
        index: {
            name: shard_like(value, parameters[index]) if isinstance(value, Tensor) else value
            for name, value in parameter_state.items()
        }
        for index, parameter_state in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters in the order in which the optimizer's state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
