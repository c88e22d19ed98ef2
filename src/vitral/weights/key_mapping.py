"""Two-way mappings between tensor names, and layout differences that several libraries share."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]


class KeyMapping:
    """vitral's tensor names and those of another library.

    In the templates, {i} is the block index and {leaf} is weight or bias. Where the library has several spellings, all
    are read; the writer selects one by its index.
    """

    def __init__(self, table: Mapping[str, str | tuple[str, ...]]) -> None:
        spellings = {key: (names,) if isinstance(names, str) else names for key, names in table.items()}
        self._read_rules = [(_compile(name), key) for key, names in spellings.items() for name in names]
        self._write_rules = [(_compile(key), names) for key, names in spellings.items()]

    def to_vitral(self, name: str) -> str | None:
        """vitral's name of one of the library's tensors; None if it is not in the table."""
        return next((_fill(key, match) for rule, key in self._read_rules if (match := rule.fullmatch(name))), None)

    def from_vitral(self, key: str, spelling: int = 0) -> str | None:
        """The library's name of one of vitral's tensors; None if it is not in the table."""
        for rule, names in self._write_rules:
            if match := rule.fullmatch(key):
                return _fill(names[min(spelling, len(names) - 1)], match)
        return None

    def rename_to_vitral(self, tensors: State) -> tuple[State, list[str]]:
        """Tensors under vitral's names, and the names that are not in the table. Empties `tensors` to save memory."""
        state: State = {}
        unexpected = []
        for name in list(tensors):
            key = self.to_vitral(name)
            if key is None or key in state:
                unexpected.append(name)
            else:
                state[key] = tensors.pop(name)
        return state, unexpected

    def rename_from_vitral(self, state: State, spelling: int = 0) -> State:
        """Tensors under the library's names. Empties `state` to save memory."""
        tensors: State = {}
        for key in list(state):
            name = self.from_vitral(key, spelling)
            if name is None:
                raise LookupError(f"no name for {key}")  # writers refuse models that their table cannot express
            tensors[name] = state.pop(key)
        return tensors


def _compile(template: str) -> re.Pattern[str]:
    literal = re.escape(template)
    return re.compile(literal.replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{leaf\}", r"(?P<leaf>weight|bias)"))


def _fill(template: str, match: re.Match[str]) -> str:
    for placeholder, value in match.groupdict().items():
        template = template.replace(f"{{{placeholder}}}", value)
    return template


# vitral stores the q, k and v projections as one tensor; attention pooling has one for k and v, SwiGLU one for gate and
# value.
SWIGLU = {"mlp.expand": ("mlp.gate", "mlp.value")}
FUSED_PROJECTIONS = {
    "attention.qkv": ("attention.q", "attention.k", "attention.v"),
    "attention_pooling.kv": ("attention_pooling.k", "attention_pooling.v"),
}


def fuse_qkv(state: State) -> None:
    """Concatenate separate q, k and v projections, and gates and values of SwiGLU.

    Incomplete or mismatched ones stay, to be reported later.
    """
    for fused, parts in (FUSED_PROJECTIONS | SWIGLU).items():
        for first in [key for key in state if f"{parts[0]}." in key]:
            keys = [first.replace(f"{parts[0]}.", f"{part}.") for part in parts]
            if all(key in state for key in keys) and len({state[key].shape for key in keys}) == 1:
                tensor = torch.cat([state.pop(key) for key in keys])
                state[first.replace(f"{parts[0]}.", f"{fused}.")] = tensor


def split_qkv(state: State) -> None:
    """Split fused projections into q, k and v; the parts are views."""
    _split(state, FUSED_PROJECTIONS)


def split_swiglu(state: State) -> None:
    """Split the first layer of the MLP into gate and value; the parts are views."""
    _split(state, SWIGLU)


def _split(state: State, projections: Mapping[str, tuple[str, ...]]) -> None:
    for fused, parts in projections.items():
        for key in [key for key in state if f"{fused}." in key]:
            for part, tensor in zip(parts, state.pop(key).chunk(len(parts)), strict=True):
                state[key.replace(f"{fused}.", f"{part}.")] = tensor


def fold_layer_scale(state: State) -> None:
    """Multiply layer scale into the projection before it: γ·(W·x + b) = (γW)·x + γb."""
    for residual, projection in (("residual1", "attention.project"), ("residual2", "mlp.contract")):
        for key in [key for key in state if key.endswith(f"{residual}.scale")]:
            scale, branch = state.pop(key), key.replace(f"{residual}.scale", projection)
            state[f"{branch}.weight"] = state[f"{branch}.weight"] * scale[:, None]
            state[f"{branch}.bias"] = state[f"{branch}.bias"] * scale


def add_unit_layer_scale(state: State, depth: int) -> None:
    """Add a layer scale of 1 to blocks without one, for models that always have it."""
    for index in range(depth):
        for residual in ("residual1", "residual2"):
            state.setdefault(f"encoder.blocks.{index}.{residual}.scale", torch.ones_like(state["encoder.norm.weight"]))


def add_zero_key_bias(state: State) -> bool:
    """Add the zero bias of keys where only queries and values have one; returns whether there are any."""
    keys = [key for key in state if key.endswith("attention.q.bias")]
    missing = [key for key in keys if key.replace(".q.", ".k.") not in state]
    for key in missing:
        state[key.replace(".q.", ".k.")] = torch.zeros_like(state[key])
    return bool(missing)


def add_zero_qkv_bias(state: State) -> None:
    """Add a zero bias to qkv projections without one, for libraries that always have it."""
    for key in [key for key in state if key.endswith("attention.qkv.weight")]:
        state.setdefault(key.replace("weight", "bias"), state[key].new_zeros(state[key].shape[0]))
