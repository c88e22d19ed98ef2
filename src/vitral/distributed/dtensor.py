"""Tensors of which each process holds some rows: made whole, divided again, read from what was saved in either form."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def is_divided(tensor: Any) -> bool:
    """torch's DTensor, by what it can: its module takes a second to import, which a process alone need not wait for."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which each process may hold a part. Every process must ask."""
    found: Tensor = tensor.full_tensor() if is_divided(tensor) else tensor
    return found


def placed(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor divided as `like` is; what is divided, or no tensor of that shape, stays as it is."""
    if not is_divided(like) or is_divided(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's, on every process."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def load_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    now = model.state_dict()
    model.load_state_dict({name: placed(tensor, now.get(name)) for name, tensor in saved.items()})


def placed_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's saved state, divided as its parameters are."""
    parameters = parameters_of(optimizer)
    state = {
        index: {k: placed(v, parameters[index]) if isinstance(v, Tensor) else v for k, v in had.items()}
        for index, had in saved["state"].items()
    }
    return {**saved, "state": state}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order that its saved state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
