"""ReferenceBackend: the plain PyTorch definition of every computation in a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from vitral.data.augment import augment_batch
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware, fallback_from_fp8
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.tasks.classification import Classification
from vitral.tasks.losses import loss_and_score
from vitral.training.backend import ReferenceBackend, make_backend
from vitral.training.hardware import parallel_plan


@pytest.fixture
def model(recipe: Recipe) -> ViT:
    torch.manual_seed(0)
    model = ViT(recipe.model)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    return model


def reference_backend(model: ViT, recipe: Recipe, preprocessing: Preprocessing, hardware: Hardware) -> ReferenceBackend:
    backend = make_backend(model, recipe, preprocessing, hardware, parallel_plan(recipe, hardware))
    assert isinstance(backend, ReferenceBackend)
    return backend


def test_a_cpu_uses_the_reference(
    model: ViT, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    recipe = recipe.with_overrides({"augment.mixup": 0.4, "augment.shift": 1, "label_smoothing": 0.1})
    backend = reference_backend(model, recipe, preprocessing, cpu)
    images, labels = dataset.train.images[:16], dataset.train.labels[:16]
    rng, same_rng = Generator().manual_seed(1), Generator().manual_seed(1)

    augmented, targets = backend.augment(images, labels, rng)
    expected_images, expected_targets = augment_batch(recipe.augment, preprocessing, 4, images, labels, same_rng)
    assert torch.equal(augmented, expected_images)
    assert torch.equal(targets, expected_targets)

    logits = backend.forward(augmented)
    assert torch.equal(logits, model(augmented))

    loss, num_correct = backend.loss(logits, targets, labels)
    expected_loss, expected_correct = loss_and_score(Classification(), logits, targets, labels, "softmax", 0.1)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(num_correct, expected_correct)


def test_forward_runs_under_autocast(
    model: ViT, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    backend = reference_backend(model, recipe, preprocessing, replace(cpu, precision="bf16"))
    assert backend.forward(preprocessing.normalise(dataset.train.images[:2])).dtype == torch.bfloat16


def test_optimizer_step_updates_and_clears_the_gradients(
    model: ViT, recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    backend = reference_backend(model, recipe, preprocessing, cpu)
    order: list[str] = []

    class Recorder(torch.optim.SGD):
        def __init__(self, name: str, parameters: list[torch.nn.Parameter]) -> None:
            super().__init__(parameters, lr=0.1)
            self.name = name

        def step(self, closure: Any = None) -> Any:
            order.append(self.name)
            return super().step(closure)

    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    backend.optimizer_step([Recorder("first", [first]), Recorder("second", [second])])
    assert order == ["second", "first"]
    for parameter in (first, second):
        torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.9))
        assert parameter.grad is None


def test_the_eager_backend_does_not_use_the_compiled_model(
    model: ViT, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "compile", lambda module: lambda images: pytest.fail("the compiled model was called"))
    backend = reference_backend(model, recipe, preprocessing, replace(cpu, compile=True)).eager()
    calls: list[str] = []
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    backend.forward(preprocessing.normalise(dataset.train.images[:2]))
    assert calls == ["head"]


def test_class_weights_reach_the_loss(model: ViT, recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware) -> None:
    weights: Tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    plan = parallel_plan(recipe, cpu)
    backend = make_backend(model, recipe, preprocessing, cpu, plan, class_weights_K=weights)
    logits, targets, labels = torch.zeros(4, 4), torch.eye(4), torch.arange(4)
    assert isinstance(backend, ReferenceBackend)
    loss, _ = backend.loss(logits, targets, labels)
    assert loss.item() == pytest.approx(10 * torch.tensor(4.0).log().item())


def test_automatic_fp8_falls_back_to_bf16_with_a_reason(
    model: ViT, recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    messages: list[str] = []
    automatic = replace(cpu, precision="bf16", fp8=True, fp8_is_auto=True)
    plan = parallel_plan(recipe, cpu)
    backend = make_backend(model, recipe, preprocessing, automatic, plan, log=messages.append)
    assert not backend.hardware.fp8
    assert len(messages) == 1
    assert "FP8" in messages[0]


def test_requested_fp8_that_is_unavailable_is_an_error(cpu: Hardware) -> None:
    with pytest.raises(VitralError, match="FP8 is unavailable: no Triton"):
        fallback_from_fp8(replace(cpu, fp8=True), "no Triton")
