"""Activation checkpointing: less memory for more computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitral.device.cpu_attention import recompute_contexts
from vitral.models.vit import ViT


def checkpoint_activations(model: ViT) -> None:
    """Make each block save only its input and recompute its activations during backward, with the same random draws.

    The forward pass runs twice, so that a step takes about a third longer. The gradients are the same.
    """
    model.encoder.activation_checkpointing = True
    for block in model.encoder.blocks:
        _checkpoint_block(block)


def _checkpoint_block(block: nn.Module) -> None:
    original_forward = block.forward

    def forward(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return original_forward(*args)
        contexts = recompute_contexts()
        options: dict[str, Any] = {} if contexts is None else {"context_fn": lambda: contexts}
        return checkpoint(original_forward, *args, use_reentrant=False, **options)

    block.forward = forward
