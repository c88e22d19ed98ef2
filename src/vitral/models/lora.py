"""LoRA, low-rank adaptation (arXiv 2106.09685): train W + (alpha/rank)·B·A with W frozen.

A is (rank, in) and random, B is (out, rank) and zero, so that training starts from the model itself. Names and
initialisation of A and B are those of the peft library: `encoder.blocks.0.attention.qkv.lora_A.weight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vitral.models.vit import QKVLinear, ViT

LoRATarget = Literal["qkv", "project", "expand", "contract"]  # linear layers of a block, as named in vit.py
LORA_MARK = ".lora_"  # part of the names of A and B, and of no other parameter


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adaptation of the encoder's linear layers. Used with tune "lora"."""

    rank: int = 8  # rank of the update
    alpha: float = 16.0  # the update is B·A times alpha/rank
    targets: tuple[LoRATarget, ...] = ("qkv", "project", "expand", "contract")  # layers of each block to adapt
    dropout: float = 0.0  # dropout rate of the input of A; above 0, every layer needs extra thin GEMMs

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha must be above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(f"lora.targets must be different layers, at least one, got {', '.join(self.targets)!r}")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank update. Takes over the weight and bias of `layer`."""

    def __init__(self, layer: nn.Linear, config: LoRAConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.scaling = config.scaling
        self.lora_dropout = nn.Dropout(config.dropout)
        factory = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.lora_A = nn.Linear(layer.in_features, config.rank, bias=False, **factory)  # uniform, ±1/√in
        self.lora_B = nn.Linear(config.rank, layer.out_features, bias=False, **factory)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        # Two thin GEMMs: adding B·A to the weight first would need the gradient of the whole weight.
        update = self.lora_B(self.lora_A(self.lora_dropout(x)) * self.scaling)
        return super().forward(x) + update

    def merged_weight(self) -> Tensor:
        """W + (alpha/rank)·B·A, (out, in)."""
        return torch.addmm(self.weight, self.lora_B.weight, self.lora_A.weight, alpha=self.scaling)


class LoRAQKVLinear(LoRALinear, QKVLinear):
    """The projections to queries, keys and values, without a bias of the keys."""


LORA_CLASSES: dict[type, type[LoRALinear]] = {nn.Linear: LoRALinear, QKVLinear: LoRAQKVLinear}


def add_lora(model: ViT, config: LoRAConfig) -> None:
    """Replace the target layers of every block by LoRALinear. Raises ValueError for a layer that cannot be adapted."""
    for index, block in enumerate(model.encoder.blocks):
        for target in config.targets:
            name = next((name for name, _ in block.named_modules() if name.rpartition(".")[2] == target), None)
            layer = None if name is None else block.get_submodule(name)
            if name is None or not isinstance(layer, nn.Linear) or type(layer) not in LORA_CLASSES:
                kind = "does not exist" if layer is None else f"is a {type(layer).__name__}, not a linear layer"
                raise ValueError(f"lora.targets: {target} {kind} in block {index} of this model")
            parent, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(parent), attribute, LORA_CLASSES[type(layer)](layer, config))


@torch.no_grad()
def merge_lora(state: dict[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The state dict of the plain model: every A and B multiplied into the weight of its layer."""
    merged = {name: tensor for name, tensor in state.items() if LORA_MARK not in name}
    for name in (name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")):
        A, B = state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"]
        merged[f"{name}.weight"] = torch.addmm(merged[f"{name}.weight"], B, A, alpha=scaling)
    return merged
