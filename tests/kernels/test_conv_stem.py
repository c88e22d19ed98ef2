"""The stem with kernels of our own against the plain one: in Triton's interpreter, in fp32, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.triton_interpreter import a_gpu, interpreted
from vitral.distributed.parallel import Way, forward_of
from vitral.kernels import fused_model as fused
from vitral.kernels.conv_stem import op as own
from vitral.kernels.conv_stem.op import FusedStem
from vitral.models.variants.hybrid import ConvStem, ConvStemConfig, HybridConfig, HybridViT

pytestmark = interpreted
GPU = a_gpu(precision="bf16")


def a_stem(widths: tuple[int, ...], strides: tuple[int, ...], channels: int = 3, whole: bool = True) -> ConvStem:
    torch.manual_seed(0)
    stem = ConvStem(ConvStemConfig(widths=widths, strides=strides, whole=whole), channels, 1e-6)
    with torch.no_grad():
        for parameter in stem.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stem


def outcome(stem: Any, plain: ConvStem, images: Tensor) -> list[Tensor]:
    out = stem(images)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, list(plain.parameters()), torch.randn(out.shape))]


@pytest.mark.parametrize(
    ("widths", "strides", "channels", "size"),
    [
        ((16, 24, 40), (1, 2, 2), 3, (8, 12)),  # as in the recipes: zeros behind the first two
        ((40, 16), (2, 1), 3, (12, 8)),  # odd at the very beginning, none later
        ((8, 16), (1, 3), 1, (9, 9)),
        ((16, 8), (2, 2), 5, (8, 8)),  # too many numbers in the first filters for one product
        ((72,), (1,), 3, (10, 10)),  # more pixels than a program takes at once, and channels for three
    ],
    ids=str,
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "less"])
def test_the_fused_stem_is_the_stem(
    widths: tuple[int, ...], strides: tuple[int, ...], channels: int, size: tuple[int, int], whole: bool
) -> None:
    plain = a_stem(widths, strides, channels, whole)
    images = torch.randn(2, channels, *size)
    wanted = outcome(plain, plain, images)
    found = outcome(FusedStem(plain, torch.float32), plain, images)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() / b.norm().clamp_min(1e-3) < 5e-5


def a_hybrid() -> HybridViT:
    torch.manual_seed(0)
    config = HybridConfig(
        image_size=(8, 8), patch_size=4, classes=5, width=32, depth=1, heads=2, pooling="mean",
        conv=ConvStemConfig(widths=(8, 16, 16), strides=(1, 2, 2)),
    )  # fmt: skip
    return HybridViT(config).train()


def test_a_training_forward_takes_it_and_every_parameter_gets_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.ops, "SHORT", 1)  # the interpreter cannot multiply bf16 matrices
    monkeypatch.setattr(fused.ops, "LONG", 1)
    model, images = a_hybrid(), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        model.head.out.weight.normal_()  # type: ignore[union-attr, operator]
    asked: list[tuple[int, ...]] = []
    real = FusedStem.__call__
    monkeypatch.setattr(FusedStem, "__call__", lambda self, x: asked.append(tuple(x.shape)) or real(self, x))
    forward, _ = forward_of(model, Way(name="alone", reason="one process"), GPU, False)
    logits = forward(images)
    assert asked == [(16, 3, 8, 8), (4, 3, 8, 8)]  # tried, then used
    wanted = model(images)
    assert (logits - wanted).norm() / wanted.norm() < 0.05
    logits.float().square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    wanted.square().sum().backward()
    for name, parameter in model.named_parameters():
        gradient = found[name]
        assert gradient is not None, name
        assert parameter.grad is not None
        if parameter.grad.norm() > 1e-3:
            assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 0.3, name


def test_a_stem_whose_kernels_fail_or_lie_is_left_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model, state = a_hybrid(), torch.get_rng_state()
    assert fused.stem_of(model, GPU) is not None
    assert torch.equal(torch.get_rng_state(), state)
    real, said = own.by_patches, []
    monkeypatch.setattr(own, "by_patches", lambda *given: real(*given).flip(2))
    assert fused.stem_of(model, GPU, said.append) is None

    def fails(*given: object) -> None:
        raise KeyError("out of shared memory")

    monkeypatch.setattr(own, "by_patches", fails)
    assert fused.stem_of(model, GPU, said.append) is None
    assert [sentence.partition("its kernels ")[2][:8] for sentence in said] == ["are off ", "fail her"]
