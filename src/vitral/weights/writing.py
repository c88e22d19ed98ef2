"""Steps that all writers share: refuse models that a format cannot represent, and prepare the tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from vitral.errors import VitralError
from vitral.models.vit import PositionEmbedding, Resampling, ViTConfig
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.key_mapping import State, fold_layer_scale


class NotRepresentableError(VitralError):
    """The format of another library cannot represent this model."""

    def __init__(self, library: str, reason: str) -> None:
        super().__init__(
            f"{library} cannot represent this model: {reason}", "Use another format; --to vitral supports every model"
        )


def exportable_state(
    checkpoint: Checkpoint,
    library: str,
    *,
    variants: Sequence[str] = ("plain",),
    poolings: Sequence[str] = ("class",),
    registers: bool = False,
    qk_norm: bool = False,
    hidden_head: bool = False,
    supported: Collection[str] = (),
    norm_eps: float | None = None,
    activation: str | None = None,
) -> tuple[State, list[str]]:
    """Tensors with an explicit position table, and notes about differences in the other library.

    The arguments state what the library supports; a model that needs more raises `NotRepresentableError`. `norm_eps`
    and `activation` are values that the library fixes. `supported` names further options: swiglu, pre_norm,
    no_final_norm, rotary, class_token (one that is not pooled), register_positions.
    """
    config, notes = checkpoint.config, []
    unsupported = {
        f"variant '{checkpoint.variant}' (supported: {', '.join(variants)})": checkpoint.variant not in variants,
        f"{config.pooling} pooling": config.pooling not in poolings,
        f"{config.registers} registers": config.registers > 0 and not registers,
        "q and k norms": config.qk_norm and not qk_norm,
        "a hidden layer in the head": config.head == "mlp" and not hidden_head,
        f"{config.positions} positions": "rotary" in config.positions and "rotary" not in supported,
        "SwiGLU": config.activation == "swiglu" and "swiglu" not in supported,
        "a norm before the first block": config.pre_norm and "pre_norm" not in supported,
        "a model without final norm": not config.final_norm and "no_final_norm" not in supported,
        "a class token that is not pooled": (
            config.has_class_token and config.pooling != "class" and "class_token" not in supported
        ),
    }
    for feature, is_needed in unsupported.items():
        if is_needed:
            raise NotRepresentableError(library, f"it does not support {feature}")
    if norm_eps is not None and config.norm_eps != norm_eps:
        notes.append(f"norm eps is {norm_eps:g} in {library}, {config.norm_eps:g} here: logits change slightly")
    if activation is not None and config.activation != activation:
        if {activation, config.activation} != {"gelu", "gelu_tanh"}:
            raise NotRepresentableError(library, f"it does not support the activation {config.activation}")
        notes.append(f"activation is {activation} in {library}, {config.activation} here: logits change by about 1e-3")
    state = {
        name: tensor for name, tensor in checkpoint.state.items() if not checkpoint.headless or ".out." not in name
    }
    if config.positions == "sincos":
        state["position_embedding.table"] = PositionEmbedding(config).table
    elif config.positions == "none":
        num_prefix = config.num_prefix_tokens if config.register_positions else int(config.has_class_token)
        rows = num_prefix + math.prod(config.grid)
        state["position_embedding.table"] = torch.zeros(1, rows, config.width)
    if config.register_positions and "register_positions" not in supported:
        _fold_register_positions(config, state)
    return state, notes


def _fold_register_positions(config: ViTConfig, state: State) -> None:
    """Add the position rows of the registers to the registers themselves."""
    table, num_cls = state["position_embedding.table"], int(config.has_class_token)
    cls, rows, patches = table.split([num_cls, config.registers, table.shape[1] - num_cls - config.registers], dim=1)
    state["registers"] = state["registers"] + rows
    state["position_embedding.table"] = torch.cat([cls, patches], dim=1)


def resampling_notes(config: ViTConfig, library: str, resampling: Resampling) -> list[str]:
    """A note if the library resizes learned positions in another way than this model."""
    if config.positions != "learned" or resampling == config.position_resampling:
        return []
    return [f"other image sizes: {library} resamples positions with {resampling}, here {config.position_resampling}"]


def unflatten_patch_kernel(state: State, config: ViTConfig) -> None:
    """Restore the shape of the patch convolution: (D, C·P·P) to (D, C, P, P)."""
    kernel = state["patch_embedding.project.weight"]
    state["patch_embedding.project.weight"] = kernel.unflatten(1, (config.channels, config.patch_size, -1))


def fold_unsupported_layer_scale(checkpoint: Checkpoint, state: State) -> list[str]:
    """For libraries without layer scale: fold it into the weights; returns a note if there was any."""
    if checkpoint.config.layer_scale is None:
        return []
    fold_layer_scale(state)
    return ["layer scale is multiplied into the preceding projections"]
