"""A model whose numbers are about to be replaced, without drawing them first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.weights.key_mapping import State

DRAWS = ("uniform_", "normal_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_")


class _NoDraws(TorchFunctionMode):
    """Drawing takes a second for a B/16; on the meta device it would even load a compiler."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def blank(variant: str, config: ViTConfig) -> ViT:
    """Its parameters hold whatever was in memory."""
    with _NoDraws():
        return VARIANTS[variant](config)


def shapes(variant: str, config: ViTConfig) -> State:
    """Names and shapes of its tensors, no numbers."""
    with torch.device("meta"):
        return dict(blank(variant, config).state_dict())
