"""The fused convolutional stem against the reference, in fp32 in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.triton_interpreter import fake_gpu, requires_interpreter
from vitral.kernels.attention import op as attention_op
from vitral.kernels.conv_stem import op
from vitral.kernels.conv_stem.op import FusedConvStem
from vitral.kernels.short_attention import op as short_attention_op
from vitral.kernels.training import make_fused_stem, make_training_forward
from vitral.models.variants.hybrid import ConvStem, ConvStemConfig, HybridConfig, HybridViT

pytestmark = [requires_interpreter, pytest.mark.slow]
GPU = fake_gpu(precision="bf16")


def make_stem(widths: tuple[int, ...], strides: tuple[int, ...], channels: int, same_padding: bool) -> ConvStem:
    torch.manual_seed(0)
    stem = ConvStem(ConvStemConfig(widths=widths, strides=strides, same_padding=same_padding), channels, 1e-6)
    with torch.no_grad():
        for parameter in stem.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stem


def output_and_gradients(stem: Any, parameters: Sequence[Tensor], images: Tensor) -> list[Tensor]:
    out = stem(images)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, parameters, torch.randn(out.shape))]


@pytest.mark.parametrize(
    ("widths", "strides", "channels", "size"),
    [
        ((16, 24, 40), (1, 2, 2), 3, (8, 12)),  # as in the recipes: padding after the first two layers
        ((40, 16), (2, 1), 3, (12, 8)),  # extra padding before the first layer only
        ((8, 16), (1, 3), 1, (9, 9)),
        ((16, 8), (2, 2), 5, (8, 8)),  # first filters too large for the patch GEMM
        ((72,), (1,), 3, (10, 10)),  # several blocks of pixels and of channels
    ],
    ids=str,
)
@pytest.mark.parametrize("same_padding", [True, False], ids=["same", "valid"])
def test_output_and_gradients_match_the_reference(
    widths: tuple[int, ...], strides: tuple[int, ...], channels: int, size: tuple[int, int], same_padding: bool
) -> None:
    stem = make_stem(widths, strides, channels, same_padding)
    images, parameters = torch.randn(2, channels, *size), list(stem.parameters())
    expected = output_and_gradients(stem, parameters, images)
    fused = output_and_gradients(FusedConvStem(stem, torch.float32), parameters, images)
    for a, b in zip(fused, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() / b.norm().clamp_min(1e-3) < 5e-5


def make_hybrid() -> HybridViT:
    torch.manual_seed(0)
    config = HybridConfig(
        image_size=(8, 8), patch_size=4, num_classes=5, width=32, depth=1, heads=2, pooling="mean",
        conv=ConvStemConfig(widths=(8, 16, 16), strides=(1, 2, 2)),
    )  # fmt: skip
    return HybridViT(config).train()


def test_training_forward_uses_the_stem_and_gives_every_parameter_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_attention_op, "MAX_SHORT_TOKENS", 1)  # the interpreter has no bf16 dot product
    monkeypatch.setattr(attention_op, "MAX_TOKENS", 1)
    model, images = make_hybrid(), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.head.out.weight.normal_()  # type: ignore[union-attr, operator]
    stem_inputs: list[tuple[int, ...]] = []
    real_call = FusedConvStem.__call__

    def recording_call(self: FusedConvStem, images: Tensor) -> Tensor:
        stem_inputs.append(tuple(images.shape))
        return real_call(self, images)

    monkeypatch.setattr(FusedConvStem, "__call__", recording_call)
    logits = make_training_forward(model, GPU)(images)
    assert stem_inputs == [(16, 3, 8, 8), (4, 3, 8, 8)]  # the self-check, then the batch
    expected = model(images)
    assert (logits - expected).norm() / expected.norm() < 0.05
    logits.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert gradient is not None, name
        assert parameter.grad is not None
        if parameter.grad.norm() > 1e-3:
            assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 0.3, name


def test_self_check_keeps_the_random_state() -> None:
    model, rng_state = make_hybrid(), torch.get_rng_state()
    assert make_fused_stem(model, GPU) is not None
    assert torch.equal(torch.get_rng_state(), rng_state)


@pytest.mark.parametrize("fault", ["fails", "differs"])
def test_a_faulty_stem_kernel_is_not_used_and_the_reason_is_logged(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_conv, messages = op.patch_conv, list[str]()

    def faulty(*args: Any) -> Tensor:
        if fault == "fails":
            raise KeyError("out of shared memory")
        return real_conv(*args).flip(2)

    monkeypatch.setattr(op, "patch_conv", faulty)
    assert make_fused_stem(make_hybrid(), GPU, messages.append) is None
    (message,) = messages
    assert ("kernel failed" if fault == "fails" else "differs by") in message
