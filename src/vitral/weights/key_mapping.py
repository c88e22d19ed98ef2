"""Tables of tensor names, read both ways, and the few ways in which libraries cut the same weights differently."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]


class Names:
    """vitral's names beside theirs. {i} stands for a block's number, {leaf} for weight or bias.

    Where they have several spellings, all are read and one is written.
    """

    def __init__(self, table: Mapping[str, str | tuple[str, ...]]) -> None:
        self.table = {ours: (theirs,) if isinstance(theirs, str) else theirs for ours, theirs in table.items()}
        self.rules_in = [(_pattern(theirs), ours) for ours, spelled in self.table.items() for theirs in spelled]
        self.rules_out = [(_pattern(ours), spelled) for ours, spelled in self.table.items()]

    def ours(self, name: str) -> str | None:
        return next((_fill(ours, found) for rule, ours in self.rules_in if (found := rule.fullmatch(name))), None)

    def theirs(self, name: str, spelling: int = 0) -> str | None:
        for rule, spelled in self.rules_out:
            if found := rule.fullmatch(name):
                return _fill(spelled[min(spelling, len(spelled) - 1)], found)
        return None

    def read(self, tensors: State) -> tuple[State, list[str]]:
        """Their tensors under vitral's names, and the names that the table does not know. `tensors` is emptied."""
        state: State = {}
        unknown = []
        for name in list(tensors):
            ours = self.ours(name)
            if ours is None or ours in state:
                unknown.append(name)
            else:
                state[ours] = tensors.pop(name)
        return state, unknown

    def write(self, state: State, spelling: int = 0) -> State:
        """vitral's tensors under their names. `state` is emptied."""
        tensors: State = {}
        for name in list(state):
            theirs = self.theirs(name, spelling)
            if theirs is None:
                raise LookupError(f"no name for {name}")  # a writer lets nothing through that its table cannot name
            tensors[theirs] = state.pop(name)
        return tensors


def _pattern(template: str) -> re.Pattern[str]:
    literal = re.escape(template)
    return re.compile(literal.replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{leaf\}", r"(?P<leaf>weight|bias)"))


def _fill(template: str, found: re.Match[str]) -> str:
    for key, value in found.groupdict().items():
        template = template.replace(f"{{{key}}}", value)
    return template


# Attention as three maps (…attention.q, .k, .v) or as one above the other (…attention.qkv); pooling has k and v.
PARTS = {"attention.qkv": ("attention.q", "attention.k", "attention.v")}
POOLING_PARTS = {"attention_pooling.kv": ("attention_pooling.k", "attention_pooling.v")}


def join_maps(state: State) -> None:
    """q, k and v, where all are there, become one tensor."""
    for whole, parts in (PARTS | POOLING_PARTS).items():
        for name in [name for name in state if f"{parts[0]}." in name]:
            pieces = [name.replace(f"{parts[0]}.", f"{part}.") for part in parts]
            if len({state[piece].shape for piece in pieces if piece in state}) == 1 and all(p in state for p in pieces):
                joined = torch.cat([state.pop(piece) for piece in pieces])
                state[name.replace(f"{parts[0]}.", f"{whole}.")] = joined


def split_maps(state: State) -> None:
    """The way back; the pieces are views."""
    for whole, parts in (PARTS | POOLING_PARTS).items():
        for name in [name for name in state if f"{whole}." in name]:
            for part, piece in zip(parts, state.pop(name).chunk(len(parts)), strict=True):
                state[name.replace(f"{whole}.", f"{part}.")] = piece


def fold_layer_scale(state: State) -> None:
    """γ·(W·x + b) = (γW)·x + γb: layer scale moves into the projection before it."""
    for residual, projection in (("residual1", "attention.project"), ("residual2", "mlp.contract")):
        for name in [name for name in state if name.endswith(f"{residual}.scale")]:
            scale, branch = state.pop(name), name.replace(f"{residual}.scale", projection)
            state[f"{branch}.weight"] = state[f"{branch}.weight"] * scale[:, None]
            state[f"{branch}.bias"] = state[f"{branch}.bias"] * scale


def with_qkv_bias(state: State) -> None:
    """A bias of zeros where there is none."""
    for name in [name for name in state if name.endswith("attention.qkv.weight")]:
        state.setdefault(name.replace("weight", "bias"), state[name].new_zeros(state[name].shape[0]))
