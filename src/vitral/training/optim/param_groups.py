"""Optimizer settings of each parameter of a ViT: frozen or trained, weight decay, learning-rate scale, Muon or not.

Every decision that depends on a parameter's name is made in this file. The names are those of `models/vit.py` and its
variants:

    patch_embedding.* class_token distillation_token position_embedding.* registers    layer 0: the embedding
    encoder.blocks.0.* ... encoder.blocks.{L-1}.*                                      layers 1 ... L
    encoder.norm.* attention_pooling.* pooled_norm.* head.*                            layer L + 1

In pretraining, the names of the ViT have the prefix "student.vit.", and everything else is in layer L + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from vitral.models.lora import LORA_MARK
from vitral.models.vit import LEARNED_VECTORS
from vitral.recipes.options import LAST_BLOCKS

if TYPE_CHECKING:
    from vitral.recipes.schema import OptimConfig

STUDENT = "student.vit."  # prefix of the ViT in a pretraining method
HEAD = "head."  # prefix of the parameters that train with any `Recipe.tune`
AFTER_BLOCKS = ("encoder.norm", "head", "attention_pooling", "pooled_norm")  # prefixes of layer L + 1
PRETRAINING_HEADS = ("student.", "predictor.", "decoder.", "pooled_projection.", "patch_projection.")  # without STUDENT

NO_DECAY = LEARNED_VECTORS  # suffixes; weight decay would only pull these vectors towards zero
FUSED_QKV = "qkv.weight"  # queries, keys and values: three square matrices stacked along the rows

# Suffixes of the last matrix of each residual branch. Zero makes the block the identity.
RESIDUAL_OUTPUT = ("attention.project.weight", "mlp.contract.weight")
HEAD_OUTPUT = "head.out"  # suffix of the modules that produce the logits


@dataclass(frozen=True, kw_only=True)
class ParamSettings:
    """How the optimizers treat one parameter."""

    weight_decay: float
    lr_scale: float = 1.0  # factor on the learning rate, from layer-wise decay
    use_muon: bool = False
    num_matrices: int = 1  # Muon: matrices stacked along the rows, orthogonalised separately


def param_settings(name: str, parameter: nn.Parameter, optim: OptimConfig, depth: int) -> ParamSettings:
    """Settings of one trainable parameter of a model with `depth` blocks.

    Matrices decay; norms, biases, tokens and position tables do not. Muon updates the matrices of the blocks, except
    the factors of LoRA, which are too thin to be orthogonalised.
    """
    lr_scale = optim.layer_decay ** (depth + 1 - layer_index(name, depth))
    if parameter.ndim < 2 or name.endswith(NO_DECAY):
        return ParamSettings(weight_decay=0.0, lr_scale=lr_scale)
    if optim.name == "muon" and "blocks." in name and LORA_MARK not in name:
        decay = optim.weight_decay if optim.muon_weight_decay is None else optim.muon_weight_decay
        num_matrices = 3 if name.endswith(FUSED_QKV) else 1
        return ParamSettings(weight_decay=decay, lr_scale=lr_scale, use_muon=True, num_matrices=num_matrices)
    return ParamSettings(weight_decay=optim.weight_decay, lr_scale=lr_scale)


def layer_index(name: str, depth: int) -> int:
    """0 for the embedding, 1 ... depth for the blocks, depth + 1 for everything after them."""
    name = name.removeprefix(STUDENT)
    if name.startswith((*AFTER_BLOCKS, *PRETRAINING_HEADS)):
        return depth + 1
    return 1 + _block_index(name) if "blocks." in name else 0


def num_blocks(model: nn.Module) -> int:
    """Depth of the ViT, also inside a pretraining method."""
    names = (name.removeprefix(STUDENT) for name, _ in model.named_parameters())
    return 1 + max(_block_index(name) for name in names if name.startswith("encoder.blocks."))


def _block_index(name: str) -> int:
    return int(name.split("blocks.")[1].split(".")[0])


def set_trainable(model: nn.Module, tune: str) -> None:
    """Set `requires_grad` according to `Recipe.tune`. The head always trains."""
    depth = num_blocks(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trainable(name, tune, depth))


def is_trainable(name: str, tune: str, depth: int) -> bool:
    """Whether a parameter trains: with "last-2", those of the last two blocks and of everything after them."""
    if tune == "full" or name.startswith(HEAD):
        return True
    if tune.startswith(LAST_BLOCKS):
        return layer_index(name, depth) > depth - int(tune.removeprefix(LAST_BLOCKS))
    return (tune == "lora" and LORA_MARK in name) or (tune == "bias" and name.endswith("bias"))
