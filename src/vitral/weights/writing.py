"""What each family's writer begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vitral.errors import VitralError
from vitral.models.vit import PositionEmbedding
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.key_mapping import State


def _no_variant(variant: str, variants: Sequence[str]) -> str:
    if variant == "plain":
        return f"no plain ViT, only with what vitral calls {' or '.join(variants)}"
    return f"no variant '{variant}'"


def writable(
    checkpoint: Checkpoint,
    library: str,
    *,
    variants: Sequence[str] = ("plain",),
    poolings: Sequence[str] = ("class",),
    registers: bool = False,
    qk_norm: bool = False,
    hidden: bool = False,
    norm_eps: float | None = None,
    gelu: str | None = None,
) -> tuple[State, list[str]]:
    """The tensors, with a position table, if this library can hold the model; and what will be different there."""
    config, notes = checkpoint.config, []
    lacks = {
        _no_variant(checkpoint.variant, variants): checkpoint.variant not in variants,
        f"no pooling '{config.pooling}'": config.pooling not in poolings,
        f"no registers, this model {config.registers}": config.registers > 0 and not registers,
        "no norms on q and k": config.qk_norm and not qk_norm,
        "no hidden layer in the head": config.head == "mlp" and not hidden,
        f"no positions '{config.positions}'": "rotary" in config.positions,
    }
    for lack, so in lacks.items():
        if so:
            raise VitralError(f"{library} cannot hold this model: it has {lack}", "another family may: --to vitral can")
    if norm_eps is not None and config.norm_eps != norm_eps:
        notes.append(f"norm eps is {norm_eps:g} in {library}, here {config.norm_eps:g}: logits move a little")
    if gelu is not None and config.gelu != gelu:
        notes.append(f"GELU is {gelu} in {library}, here {config.gelu}: logits move in the third decimal")
    state = {
        name: tensor for name, tensor in checkpoint.state.items() if not checkpoint.headless or ".out." not in name
    }
    if config.positions == "sincos":
        state["position_embedding.table"] = PositionEmbedding(config).table
    elif config.positions == "none":
        rows = config.prefix - config.registers + math.prod(config.grid)
        state["position_embedding.table"] = torch.zeros(1, rows, config.width)
    return state, notes
