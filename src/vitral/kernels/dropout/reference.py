"""The reference encoder with the dropout masks of the fused encoder, so that both can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitral.kernels.dropout.op import Dropout, apply_dropout, draw_seeds
from vitral.kernels.linear import linear_layers

if TYPE_CHECKING:
    from vitral.kernels.encoder import FusedEncoder


@contextmanager
def same_dropout(fused: FusedEncoder) -> Iterator[None]:
    """Enable dropout in the blocks, with masks that are the same in the fused and in the reference encoder."""
    blocks = fused.dropout_blocks
    lora_layers = fused.weights.separate_lora
    fused.dropout_seeds = seeds = draw_seeds(3 * len(blocks) + len(lora_layers), fused.drop_probs.device)
    sites: list[tuple[nn.Dropout, list[Tensor], bool]] = []  # modules, their seeds, and whether they drop class tokens
    for block, (project, gelu, contract) in zip(blocks, seeds[: 3 * len(blocks)].view(-1, 3, 4), strict=True):
        cls_only = fused.cls_only and block is fused.blocks[-1]
        sites += [(block.attention.dropout, [project], cls_only), (block.mlp.dropout, [gelu, contract], cls_only)]
    last_layers = linear_layers(fused.blocks[-1])[1:] if fused.cls_only else []
    for layer, seed in zip(lora_layers, seeds[3 * len(blocks) :], strict=True):
        sites.append((layer.lora_dropout, [seed], any(layer is last for last in last_layers)))
    was_training = [module.training for module, _, _ in sites]
    handles = []
    for module, module_seeds, cls_only in sites:
        masks = cycle([Dropout(seed, module.p) for seed in module_seeds])  # the MLP calls its module twice
        handles.append(module.register_forward_hook(mask_output(masks, cls_only)))
        module.train()
    try:
        yield
    finally:
        fused.dropout_seeds = None
        for handle in handles:
            handle.remove()
        for (module, _, _), mode in zip(sites, was_training, strict=True):
            module.train(mode)


def mask_output(masks: Iterator[Dropout], cls_only: bool) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """A forward hook that replaces the module's own random mask. cls_only: the mask is that of the class tokens."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x_BTD, dropout = args[0], next(masks)
        factors = torch.ones_like(x_BTD)
        dropped = factors[:, :1] if cls_only else factors
        dropped.copy_(apply_dropout(dropped.flatten(0, 1).contiguous(), dropout).view_as(dropped))
        return x_BTD * factors

    return hook
