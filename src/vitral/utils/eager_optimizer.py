"""Optimizers of torch without torch.compile.

`torch.optim` imports torch._dynamo, which takes 2 s, even where nothing is compiled: its methods are wrapped to tell
torch.compile what not to trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class EagerOptimizer(Optimizer):
    """Base of an optimizer that is never compiled, before a class of `torch.optim`.

    Functions that torch does not wrap are used as they are.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


def eager_step(optimizer: type[Optimizer]) -> Callable[..., Any]:
    """The `step` of a class of `torch.optim` that is never compiled and not differentiated."""
    return torch.no_grad()(inspect.unwrap(optimizer.step))


class SGD(EagerOptimizer, torch.optim.SGD):
    step = eager_step(torch.optim.SGD)


class LBFGS(EagerOptimizer, torch.optim.LBFGS):
    step = eager_step(torch.optim.LBFGS)
