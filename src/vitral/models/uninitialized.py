"""Build models without initializing their parameters, for weights that are loaded right after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitral.models.variants import SAVED_VARIANTS
from vitral.models.vit import ViT, ViTConfig

INIT_FUNCTIONS = ("uniform_", "normal_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_")
RANGE_FUNCTIONS = (torch.arange, torch.linspace)


class SkipInit(TorchFunctionMode):
    """Skip random initialization, which takes a second for B/16 and loads a compiler on the meta device.

    Constants such as tables of positions would load it too; they are computed on the CPU instead of the meta device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in INIT_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        is_on_meta = torch.device(kwargs.get("device") or torch.get_default_device()).type == "meta"
        if func in RANGE_FUNCTIONS and is_on_meta:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def build_uninitialized(variant: str, config: ViTConfig) -> ViT:
    """The model with uninitialized parameters."""
    with SkipInit():
        return SAVED_VARIANTS[variant](config)


def meta_state_dict(variant: str, config: ViTConfig) -> dict[str, Tensor]:
    """Names and shapes of the model's tensors, on the meta device."""
    with torch.device("meta"):
        return dict(build_uninitialized(variant, config).state_dict())
