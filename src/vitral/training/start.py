"""First weights that suit a recipe better than the paper's."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def start_at_even_odds(model: nn.Module) -> None:
    """Sigmoid: a head that has not learned yet begins by giving each class 1/K, not 1/2.

    AugReg's biases (arXiv 2106.10270) are these: -6.9 for ImageNet's 1000 classes, -10 for ImageNet-21k's 21,843.
    """
    for head in (module for name, module in model.named_modules() if name.endswith("head.out")):
        if isinstance(head, nn.Linear) and not head.weight.any() and not head.bias.any():
            head.bias.fill_(-math.log(max(len(head.bias) - 1, 1)))


@torch.no_grad()
def start_as_identity(model: nn.Module) -> None:
    """Each block begins as the identity: the last matrix of its branches is zero (arXiv 1901.09321, section 3).

    The signal reaches the head unmixed, and each branch joins in when it has learned something.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.project.weight", "mlp.contract.weight")):
            parameter.zero_()
