"""Optimizers without torch.compile against those of torch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.training.optim.adamw import AdamW
from vitral.utils.eager_optimizer import LBFGS, SGD

OPTIMIZERS: dict[str, tuple[type[Optimizer], type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "lbfgs": (LBFGS, torch.optim.LBFGS, {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
}


def optimize(
    optimizer_class: type[Optimizer], options: dict[str, Any], compile: Callable[[Any], Any] = lambda function: function
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of six steps, with the state saved and loaded after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 5))
    images, labels = torch.randn(16, 20), torch.randint(5, (16,))
    optimizer, losses = optimizer_class(model.parameters(), **options), []
    forward, step = compile(model), compile(optimizer.step)

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = F.cross_entropy(forward(images), labels)
            loss.backward()
        return loss.item()

    for _ in range(6):
        losses.append(closure())
        step(closure) if "max_iter" in options else step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_weights_are_those_of_torch_bit_for_bit(name: str) -> None:
    eager, reference, options = OPTIMIZERS[name]
    (losses, weights), (expected_losses, expected_weights) = (optimize(each, options) for each in (eager, reference))
    assert losses == expected_losses
    assert all(torch.equal(*pair) for pair in zip(weights, expected_weights, strict=True))


def test_training_does_not_import_the_compiler() -> None:
    code = """
import sys
import torch
from vitral.training.optim.adamw import AdamW
from vitral.training.optim.muon import Muon
from vitral.utils.eager_optimizer import LBFGS, SGD
for optimizer_class, options in (
    (AdamW, {"fused": True}), (SGD, {"lr": 0.1}), (LBFGS, {}), (Muon, {"lr": 0.1, "weight_decay": 0.1})
):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_class([weight], **options)
    weight.square().sum().backward()
    optimizer.step(lambda: weight.square().sum())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert not weight.equal(torch.ones(2, 2))
print("torch._dynamo" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["False"], result.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which torch.compile imports
def test_a_model_and_its_optimizer_can_be_compiled_afterwards() -> None:
    options = {"lr": 0.01, "weight_decay": 0.1}
    losses, weights = optimize(AdamW, options)
    compiled_losses, compiled = optimize(AdamW, options, partial(torch.compile, backend="aot_eager"))
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
    for expected, weight in zip(weights, compiled, strict=True):
        torch.testing.assert_close(weight, expected)
