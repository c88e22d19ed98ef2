"""TritonBackend: overrides match the reference, and faulty ones are replaced by it. In Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from support.triton_interpreter import fake_gpu, requires_interpreter
from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.errors import VitralError
from vitral.kernels import backend as backend_module
from vitral.kernels.augment import checks as augment_checks
from vitral.kernels.augment import op as augment_op
from vitral.kernels.backend import TritonBackend
from vitral.kernels.cross_entropy import op as cross_entropy_op
from vitral.kernels.muon import op as muon_op
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.training.backend import ReferenceBackend
from vitral.training.optim.adamw import AdamW
from vitral.training.optim.builder import make_optimizers
from vitral.training.optim.muon import Muon
from vitral.training.state import init_state
from vitral.training.step import StepContext, StepRunner
from vitral.training.tuning import apply_tuning

pytestmark = requires_interpreter
GPU = fake_gpu(precision="fp32")
MODEL = ViTConfig(image_size=(8, 8), patch_size=4, channels=3, num_classes=5, width=16, depth=1, heads=2)
RECIPE = Recipe(
    name="tiny",
    data=DataConfig(name="none"),
    model=MODEL,
    optim=OptimConfig(name="muon", lr=1e-2, grad_clip=0.0),
    augment=AugmentConfig(flip=True),
    label_smoothing=0.1,
    batch_size=16,
)


def make_backend(
    hardware: Hardware = GPU, recipe: Recipe = RECIPE, channels: int = 3, micro_batch_size: int = 16, **changes: Any
) -> tuple[TritonBackend, list[str]]:
    torch.manual_seed(0)
    messages: list[str] = []
    model = ViT(replace(recipe.model, channels=channels))
    preprocessing = Preprocessing(image_size=(8, 8), channels=channels, mean=(0.5,) * channels, std=(0.2,) * channels)
    single = ParallelPlan(mode="single", reason="one process")
    settings: dict[str, Any] = {
        "model": model,
        "augment": recipe.augment,
        "preprocessing": preprocessing,
        "num_classes": 5,
        "micro_batch_size": micro_batch_size,
        "label_smoothing": recipe.label_smoothing,
        "hardware": hardware,
        "forward_unsupported": "not part of this test",
        "log": messages.append,
    }
    offsets = changes.get("logit_offsets_K")
    reference = ReferenceBackend(model, recipe, preprocessing, hardware, single, logit_offsets_K=offsets)
    return TritonBackend(reference, **settings | changes), messages


def test_augment_and_loss_match_the_reference() -> None:
    backend, messages = make_backend()
    assert backend.overrides == {"augment", "loss"}
    assert messages == []
    images, labels = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % 5
    fused = backend.augment(images, labels, Generator().manual_seed(1))
    expected = backend.reference.augment(images, labels, Generator().manual_seed(1))
    for a, b in zip(fused, expected, strict=True):
        torch.testing.assert_close(a, b)
    logits = torch.randn(16, 5)
    torch.testing.assert_close(
        backend.loss(logits, expected[1], labels)[0], backend.reference.loss(logits, expected[1], labels)[0]
    )


def test_logit_offsets_reach_the_fused_loss() -> None:
    offsets = torch.tensor([0.0, -1.0, -2.0, -3.0, -4.0])
    backend, _ = make_backend(logit_offsets_K=offsets)
    plain, _ = make_backend()
    assert backend.overrides == {"augment", "loss"}
    logits, targets, labels = torch.randn(16, 5), torch.eye(5)[torch.arange(16) % 5], torch.arange(16) % 5
    loss, num_correct = backend.loss(logits, targets, labels)
    adjusted, _ = plain.loss(logits + offsets, targets, labels)
    torch.testing.assert_close(loss, adjusted)
    assert num_correct == (logits.argmax(dim=1) == labels).sum()


def test_without_triton_only_the_optimizers_are_fused() -> None:
    backend, _ = make_backend(replace(GPU, use_triton=False))
    assert backend.overrides == set()
    optimizers_after_one_step(backend)
    assert backend.overrides == {"muon", "adamw"}


def test_large_batches_and_other_losses_use_the_reference_loss() -> None:
    for changes in ({"micro_batch_size": 8000}, {"label_smoothing": None}):
        backend, messages = make_backend(**changes)
        assert backend.overrides == {"augment"}
        assert messages == []


@pytest.mark.parametrize("fault", ["fails", "differs"])
def test_a_faulty_loss_kernel_is_replaced(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if fault == "fails":
            raise RuntimeError("no C compiler\nand a long traceback")
        loss, num_correct = cross_entropy_op.fused_cross_entropy(*args, **kwargs)
        return 1.5 * loss, num_correct

    monkeypatch.setattr(backend_module, "fused_cross_entropy", faulty)
    backend, messages = make_backend()
    assert backend.overrides == {"augment"}
    reason = "the kernel failed: no C compiler" if fault == "fails" else "differs by 50% from PyTorch's"
    assert len(messages) == 1
    assert messages[0].startswith("loss in PyTorch: ")
    assert messages[0].endswith(reason)


@pytest.mark.parametrize("fault", ["fails", "differs"])
def test_a_faulty_augment_kernel_is_replaced(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: Any) -> list[Tensor]:
        if fault == "fails":
            raise KeyError("out of shared memory")
        return [tensor.flip(0) for tensor in augment_op.fused_augment(*args)]

    monkeypatch.setattr(backend_module, "fused_augment", faulty)
    backend, messages = make_backend()
    assert backend.overrides == {"loss"}
    assert [message.partition(":")[0] for message in messages] == ["augmentation in PyTorch"]


@pytest.mark.slow
def test_color_operations_are_fused_even_if_other_transforms_are_not() -> None:
    policy = AutoAugmentPolicy(name="randaugment", num_ops=2, magnitude=9, increasing=True, probability=0.5)
    recipe = replace(RECIPE, augment=AugmentConfig(crop=0.5, erase=0.2, policy=policy))
    backend, messages = make_backend(recipe=recipe)
    assert messages == []
    assert backend.overrides == {"color_ops", "loss"}
    images, labels = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 5
    out, _ = backend.augment(images, labels, Generator().manual_seed(0))
    expected, _ = backend.reference.augment(images, labels, Generator().manual_seed(0))
    assert (out - expected).norm() / expected.norm() < augment_checks.COLOR_OPS_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("num_ops", "magnitude", "increasing"), [(4, 10, True), (2, 10, False), (3, 30, False)])
def test_amplified_rounding_of_color_operations_passes_the_check(
    num_ops: int, magnitude: float, increasing: bool
) -> None:
    policy = AutoAugmentPolicy(name="randaugment", num_ops=num_ops, magnitude=magnitude, increasing=increasing)
    backend, messages = make_backend(recipe=replace(RECIPE, augment=AugmentConfig(policy=policy, jitter=0.4)))
    assert backend.overrides == {"augment", "color_ops", "loss"}
    assert messages == []


@pytest.mark.parametrize("changes", [{"flip": True}, pytest.param({"crop": 0.5}, marks=pytest.mark.slow)], ids=str)
def test_the_color_kernel_of_jitter_is_checked_too(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitter has no cutout centres and therefore uses another specialisation of the kernel."""

    def wrong_without_centers(images: Tensor, ops: Tensor, args: Tensor, centers: Tensor | None = None) -> Tensor:
        return torch.zeros_like(images) if centers is None else augment_op.fused_apply_ops(images, ops, args, centers)

    monkeypatch.setattr(augment_checks, "fused_apply_ops", wrong_without_centers)
    backend, messages = make_backend(recipe=replace(RECIPE, augment=AugmentConfig(jitter=0.3, **changes)))
    assert backend.overrides == {"loss"}
    assert [message.partition(":")[0] for message in messages] == ["colour augmentation in PyTorch"]


def test_four_channels_are_left_to_pytorch() -> None:
    backend, messages = make_backend(recipe=replace(RECIPE, augment=AugmentConfig(jitter=0.2)), channels=4)
    assert backend.overrides == {"loss"}
    assert messages == ["colour augmentation in PyTorch: kernels support 1 or 3 channels, not 4"]


def optimizers_after_one_step(backend: TritonBackend) -> tuple[list[Any], list[Tensor]]:
    torch.manual_seed(0)
    model = ViT(MODEL)
    optimizers = make_optimizers(model, RECIPE.optim)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    backend.optimizer_step(optimizers)
    assert all(parameter.grad is None for parameter in model.parameters())
    return optimizers, [parameter.detach() for parameter in model.parameters()]


def test_optimizers_get_their_kernels_at_the_first_step() -> None:
    backend, messages = make_backend()
    (muon, adamw), weights = optimizers_after_one_step(backend)
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    assert muon.kernels is muon_op
    assert adamw.kernels is not None
    assert messages == []
    reference, _ = make_backend()
    reference._optimizer_kernels.is_prepared = True  # without kernels
    (muon, _), expected = optimizers_after_one_step(reference)
    assert muon.kernels is None
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fault", ["fails", "differs"])
def test_optimizers_keep_the_reference_if_a_kernel_is_faulty(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_stack = muon_op.momentum_stack

    def faulty(*args: Any) -> Tensor:
        if fault == "fails":
            raise RuntimeError("no C compiler")
        return real_stack(*args).flip(0, 1)

    monkeypatch.setattr(muon_op, "momentum_stack", faulty)
    backend, messages = make_backend()
    (muon, adamw), _ = optimizers_after_one_step(backend)
    assert muon.kernels is None
    assert adamw.kernels is not None
    assert [message.partition(":")[0] for message in messages] == ["muon in PyTorch"]


def test_automatic_fp8_falls_back_to_bf16_and_requested_fp8_raises() -> None:
    fp8 = fake_gpu(precision="bf16", fp8=True)
    backend, messages = make_backend(replace(fp8, fp8_is_auto=True))
    assert not backend.hardware.fp8
    assert not backend.reference.hardware.fp8
    assert "using bf16 instead of FP8: not part of this test" in messages
    with pytest.raises(VitralError, match="FP8 is unavailable: not part of this test"):
        make_backend(fp8)


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["lora", "last-1", "bias", "head"])
def test_partial_tuning_uses_the_fused_forward_pass_and_has_the_reference_gradients(tune: str) -> None:
    recipe = replace(RECIPE, tune=tune, model=replace(MODEL, depth=2), optim=OptimConfig(grad_clip=0.0))
    torch.manual_seed(0)
    model = ViT(recipe.model)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    apply_tuning(model, recipe)
    backend, messages = make_backend(recipe=recipe, model=model, forward_unsupported=None)
    assert "forward" in backend.overrides
    assert messages == []
    images, gradients = torch.randn(4, 3, 8, 8), []
    for forward in (backend.forward, model):
        model.zero_grad()
        forward(images).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    fused, reference = gradients
    assert fused.keys() == reference.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, gradient in reference.items():
        torch.testing.assert_close(fused[name], gradient, rtol=0.05, atol=0.05 * float(gradient.abs().max()) + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"optim.layer_decay": 0.75, "optim.grad_clip": 0.1, "ema": 0.5, "model.num_classes": 7},
        {"activation_checkpointing": True, "model.layer_scale": 0.5},
        {"model.layer_scale": 0.5, "tune": "last-1"},
    ],
    ids=str,
)
def test_settings_of_fine_tuning_train_with_the_fused_forward_pass(fields: dict[str, Any]) -> None:
    recipe = RECIPE.with_overrides({"model.depth": 2, "optim.name": "adamw", "optim.warmup": 0.0} | fields)
    preprocessing = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.2,) * 3)
    single, results, num_classes = ParallelPlan(mode="single", reason="one process"), [], recipe.model.num_classes
    images, labels = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16) % num_classes
    for fused in (True, False):
        state = init_state(recipe, GPU, 4)
        backend: Any = ReferenceBackend(state.vit, recipe, preprocessing, GPU, single)
        if fused:
            messages: list[str] = []
            backend = TritonBackend(
                backend, model=state.vit, augment=recipe.augment, preprocessing=preprocessing, num_classes=num_classes,
                micro_batch_size=16, label_smoothing=0.1, hardware=GPU, log=messages.append,
            )  # fmt: skip
            assert "forward" in backend.overrides, messages
        runner, losses = StepRunner(state, StepContext(recipe, backend), 4), []
        for state.step in range(4):
            state.epoch_sums.zero_()
            runner.run(images, labels)
            losses.append(float(state.epoch_sums[0]) / 16)
        results.append(losses)
    assert results[0][-1] < results[0][0]
    assert results[0] == pytest.approx(results[1], rel=0.03)
