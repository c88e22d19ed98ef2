"""Distillation with fused kernels, in Triton's interpreter: the forward pass is fused, the loss is the reference's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.distillation import STUDENT, VIEWS, tiny_distillation
from support.models import randomize_weights
from support.triton_interpreter import fake_gpu, requires_interpreter
from vitral.data.preprocess import Preprocessing
from vitral.kernels.backend import TritonBackend
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.distillation import DistillConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.ssl.config import PretrainConfig
from vitral.ssl.teacher import Teacher
from vitral.training.backend import make_backend
from vitral.training.distillation.backend import DistillBackend
from vitral.training.hardware import parallel_plan
from vitral.training.pretraining.backend import make_pretrain_backend

pytestmark = [requires_interpreter, pytest.mark.slow]
MODEL = ViTConfig(image_size=(8, 8), patch_size=4, num_classes=5, width=16, depth=1, heads=2)
PREPROCESSING = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.2,) * 3)


@pytest.mark.parametrize("variant", ["plain", "distilled"])
def test_fused_forward_pass_gives_the_loss_and_gradients_of_the_reference(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(
        name="tiny", data=DataConfig(name="none"), model=MODEL, variant=variant, optim=OptimConfig(grad_clip=0.0),
        batch_size=16, distill=DistillConfig(teacher="tiny", kind="soft"),
    )  # fmt: skip
    gpu, messages = fake_gpu(precision="fp32"), list[str]()
    model = randomize_weights(VARIANTS[variant](MODEL), seed=1).train()
    teacher = Teacher(randomize_weights(ViT(replace(MODEL, width=24))), PREPROCESSING, name="tiny")
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 5
    losses, gradients = [], []
    for is_fused in (True, False):
        monkeypatch.setattr("vitral.training.backend.can_run_triton", lambda _, is_fused=is_fused: is_fused)
        backend = make_backend(
            model, recipe, PREPROCESSING, gpu, parallel_plan(recipe, gpu), log=messages.append, teacher=teacher
        )
        assert isinstance(backend, DistillBackend)
        if isinstance(backend.backend, TritonBackend):
            assert ("forward" in backend.backend.overrides) == (variant == "plain")
            assert "loss" not in backend.backend.overrides
        model.zero_grad()
        loss, _ = backend.loss_and_score((images, torch.eye(5)[labels]), labels)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert messages.pop(0) == "loss in PyTorch: kernels support labels only, and this run learns from a teacher too"
    reasons = [] if variant == "plain" else ["forward pass in PyTorch instead of fused kernels"]
    assert [message.partition(":")[0] for message in messages] == reasons
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for name, gradient in gradients[1].items():
        assert gradient is not None
        torch.testing.assert_close(
            gradients[0][name], gradient, rtol=0.05, atol=0.05 * float(gradient.abs().max()) + 1e-3
        )


def test_feature_distillation_with_a_fused_student_has_the_loss_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitral.kernels.encoder_checks.check_batch_size", lambda _: 2)
    monkeypatch.setattr("vitral.training.pretraining.backend.can_run_triton", lambda _: True)
    recipe = Recipe(
        name="tiny", data=DataConfig(name="none", validation=0.0), model=STUDENT, batch_size=6,
        pretrain=PretrainConfig(method="distill", views=VIEWS),
    )  # fmt: skip
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    losses = []
    for use_triton in (True, False):
        hardware, method = fake_gpu(use_triton=use_triton), tiny_distillation()
        plan = parallel_plan(recipe, hardware)
        backend = make_pretrain_backend(method, recipe, hardware, plan, micro_batch_size=6)
        batch = backend.augment(images, torch.arange(6), torch.Generator().manual_seed(3))
        loss, _ = backend.loss_and_score(batch, torch.arange(6))
        loss.backward()
        losses.append(loss.item())
        assert (method.student.encode_fn is not None) == use_triton
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
