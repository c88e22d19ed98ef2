from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import OptimConfig
from vitral.training.optim.builder import make_optimizers, restore_optimizer
from vitral.training.optim.muon import Muon
from vitral.training.optim.schedule import set_learning_rate

CONFIG = ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=3, width=16, depth=2, heads=2)


def test_recipe_settings_reach_the_optimizer() -> None:
    model = ViT(CONFIG)
    (adamw,) = make_optimizers(model, OptimConfig(lr=0.3, betas=(0.8, 0.7)))
    assert all((group["lr"], group["betas"]) == (0.3, (0.8, 0.7)) for group in adamw.param_groups)
    (sgd,) = make_optimizers(model, OptimConfig(name="sgd", lr=0.2, momentum=0.6))
    assert all((group["lr"], group["momentum"]) == (0.2, 0.6) for group in sgd.param_groups)


def test_frozen_parameters_are_left_out() -> None:
    model = ViT(CONFIG)
    model.encoder.requires_grad_(False)
    (adamw,) = make_optimizers(model, OptimConfig())
    grouped = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ["sgd", "muon"])  # torch's AdamW accepts tensor learning rates only on a GPU
def test_tensor_learning_rates_give_the_same_updates_as_numbers(name: Any) -> None:
    def weights_after_three_steps(lr_device: torch.device | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = ViT(CONFIG)
        optimizers = make_optimizers(model, OptimConfig(name=name, layer_decay=0.8), lr_device)
        for step in range(3):
            set_learning_rate(optimizers, 0.01 * (step + 1))
            for parameter in model.parameters():
                parameter.grad = torch.cos(parameter.detach() * (step + 7))
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    numbers, tensors = weights_after_three_steps(None), weights_after_three_steps(torch.device("cpu"))
    for expected, actual in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(actual, expected)


def stepped_muon(lr: float | Tensor = 0.02) -> tuple[Muon, list[nn.Parameter]]:
    rng = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((16, 16), (16, 64))]
    optimizer = Muon(parameters, lr=lr, weight_decay=0.1)
    step(optimizer, parameters)
    return optimizer, parameters


def step(optimizer: Muon, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.cos(parameter.detach())
    optimizer.step()


def test_restore_keeps_the_addresses_of_state_tensors() -> None:
    optimizer, parameters = stepped_muon()
    saved = copy.deepcopy(optimizer.state_dict())
    step(optimizer, parameters)
    addresses = [optimizer.state[p]["momentum"].data_ptr() for p in parameters]
    restore_optimizer(optimizer, saved)
    assert [optimizer.state[p]["momentum"].data_ptr() for p in parameters] == addresses
    for parameter, values in zip(parameters, saved["state"].values(), strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum"], values["momentum"])


def test_restore_keeps_the_form_of_the_learning_rate() -> None:
    with_number, _ = stepped_muon()
    with_tensor, _ = stepped_muon(torch.tensor(1.0))
    lr = with_tensor.param_groups[0]["lr"]
    restore_optimizer(with_tensor, with_number.state_dict())
    assert with_tensor.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.02)
    restore_optimizer(with_number, with_tensor.state_dict())
    assert isinstance(with_number.param_groups[0]["lr"], float)
