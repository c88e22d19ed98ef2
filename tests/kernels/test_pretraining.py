"""The fused encoders of pretraining: tokens and gradients of the reference, and reasons against them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.pretraining import TINY, random_images, tiny_method
from support.triton_interpreter import (
    break_kernel,
    fake_gpu,
    relative_difference,
    requires_interpreter,
)
from vitral.distributed.parallel import ParallelPlan
from vitral.kernels import encoder_checks, pretraining
from vitral.kernels.pretraining import fuse_encoders
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import DataConfig, Recipe
from vitral.ssl.config import MethodName
from vitral.ssl.method import PretrainMethod
from vitral.training.pretraining.backend import make_pretrain_backend

pytestmark = requires_interpreter
GPU = fake_gpu()
TOLERANCE = 0.06  # bf16, of tokens and of all gradients together
MODEL = ViTConfig(
    image_size=(8, 16), patch_size=4, num_classes=1, width=16, depth=1, heads=1, positions="learned+rotary"
)
POOLING: dict[str, ViTConfig] = {"class": MODEL, "mean": replace(MODEL, pooling="mean", positions="learned")}


@pytest.fixture(autouse=True)
def fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images per self-check: the interpreter is slow."""
    monkeypatch.setattr(encoder_checks, "check_batch_size", lambda _: 2)
    monkeypatch.setattr(pretraining, "CHECK_IMAGES", 2)


def fused_method(name: MethodName, model: ViTConfig = MODEL, **options: Any) -> tuple[PretrainMethod, list[str], bool]:
    """A method with fused encoders, the reasons against them, and whether they are used."""
    method, messages = tiny_method(name, model, options=options), list[str]()
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return method, messages, fuse_encoders(method, GPU, 4, messages.append)


def tokens_and_gradients(method: PretrainMethod, encode: Any, images: Tensor, mask: Tensor | None) -> list[Tensor]:
    method.zero_grad()
    with GPU.autocast():
        tokens = encode(images, mask).float()
    pooled = tokens[:, 0] if method.student.vit.config.pooling == "class" else tokens.mean(dim=1)
    pooled.backward(torch.randn(pooled.shape, generator=torch.Generator().manual_seed(9)))
    gradients = [p.grad.flatten() for p in method.student.vit.parameters() if p.grad is not None]
    return [tokens.detach(), torch.cat(gradients)]


@pytest.mark.parametrize("pooling", ["class", pytest.param("mean", marks=pytest.mark.slow)])
def test_tokens_and_gradients_are_those_of_the_reference(pooling: str) -> None:
    """For global views, global views with masked patches, and local views."""
    method, messages, is_fused = fused_method("dino", POOLING[pooling])
    assert is_fused, messages
    student, rng = method.student, torch.Generator().manual_seed(1)
    mask = torch.tensor([[True, False, False, True] * 2, [False, True, False, False] * 2])
    for size, view_mask in (((8, 16), None), ((8, 16), mask), ((4, 8), None)):
        images = torch.randn(2, 3, *size, generator=rng)
        reference = tokens_and_gradients(method, student.encode, images, view_mask)
        fused = tokens_and_gradients(method, student.encode_fn, images, view_mask)
        for actual, expected in zip(fused, reference, strict=True):
            assert relative_difference(actual, expected) < TOLERANCE
        assert student.mask_token is not None
        assert (student.mask_token.grad is None) == (view_mask is None)


def test_losses_that_use_pooled_features_compute_only_the_class_token() -> None:
    method, messages, is_fused = fused_method("lejepa")
    assert is_fused, messages
    images = torch.randn(2, 3, 8, 16)
    assert method.student.tokens(images).shape == (2, 1, 16)
    with GPU.autocast():
        expected = method.student.encode(images)[:, 0]
    assert relative_difference(method.student.features(images).float(), expected.float()) < TOLERANCE


@pytest.mark.slow
def test_the_fused_teacher_follows_its_changing_weights() -> None:
    method, messages, is_fused = fused_method("moco")
    assert is_fused, messages
    images, teacher = torch.randn(2, 3, 8, 16), method.teacher
    assert teacher is not None
    before = teacher.features(images)
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for _ in range(20):
        method.after_step(torch.tensor(0.0), torch.tensor(1.0))
        method.teacher_momentum = 0.5
    with torch.no_grad(), GPU.autocast():
        after, expected = teacher.features(images), teacher.vit.pool(teacher.encode(images))
    assert relative_difference(after.float(), expected.float()) < TOLERANCE
    assert relative_difference(after.float(), before.float()) > 5 * TOLERANCE


@pytest.mark.slow
def test_a_copy_of_a_fused_branch_uses_its_own_weights() -> None:
    method, _, _ = fused_method("moco")
    duplicate = copy.deepcopy(method.student)
    assert duplicate.encode_fn is None


def test_masked_autoencoding_uses_the_reference() -> None:
    method, messages, is_fused = fused_method("mae")
    assert not is_fused
    assert method.student.encode_fn is None
    assert messages == [
        "encoder in PyTorch instead of fused kernels: masked autoencoding drops different patches of each image"
    ]


def test_unsupported_models_use_the_reference_and_say_why() -> None:
    method, messages, is_fused = fused_method("dino", replace(MODEL, activation="relu"))
    assert not is_fused
    assert method.student.encode_fn is None
    (message,) = messages
    assert message.startswith("encoder in PyTorch instead of fused kernels: ")
    assert "relu" in message


def test_without_triton_nothing_is_fused_or_reported() -> None:
    method, messages = tiny_method("dino", MODEL), list[str]()
    assert not fuse_encoders(method, replace(GPU, use_triton=False), 4, messages.append)
    assert messages == []


def test_a_kernel_that_fails_the_check_of_local_views_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "max_relative_error", lambda *_: 0.5)
    method, messages, is_fused = fused_method("dino")
    assert not is_fused
    assert [branch.encode_fn for branch in (method.student, method.teacher) if branch is not None] == [None, None]
    assert "fused kernels: " in messages[-1]


def test_a_failed_check_of_local_views_leaves_mode_and_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("does not work here")

    monkeypatch.setattr(pretraining, "make_encode", lambda *_: fail)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    method, messages = tiny_method("dino", MODEL).train(), list[str]()
    torch.set_rng_state(before)
    assert not fuse_encoders(method, GPU, 4, messages.append)
    assert "does not work here" in messages[-1]
    assert all(module.training for module in method.student.modules())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_broken_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("does not work here")

    break_kernel(monkeypatch, "layernorm_gelu", "bias_gelu_kernel", fail)
    _, messages, is_fused = fused_method("dino")
    assert not is_fused
    assert "does not work here" in messages[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lejepa", "moco", "dino"])
def test_a_step_of_the_backend_has_the_loss_of_the_reference(name: MethodName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.training.pretraining.backend.can_run_triton", lambda _: True)
    single = ParallelPlan(mode="single", reason="one process")
    recipe = Recipe(name="tiny", data=DataConfig(name="none", validation=0.0), model=MODEL, pretrain=TINY, batch_size=6)
    losses = []
    for hardware in (GPU, replace(GPU, use_triton=False)):
        method = tiny_method(name, MODEL)
        backend = make_pretrain_backend(method, recipe, hardware, single, micro_batch_size=6)
        batch = backend.augment(random_images(MODEL), torch.zeros(6), torch.Generator().manual_seed(3))
        loss, _ = backend.loss_and_score(batch, torch.zeros(6))
        loss.backward()
        losses.append(float(loss.detach()))
        assert (method.student.encode_fn is not None) == hardware.use_triton
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
