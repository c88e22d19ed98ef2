"""RandAugment, TrivialAugment and colour jitter: search spaces compared with timm and torchvision, and the draws."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from PIL import ImageEnhance
from scipy import stats
from torch import Generator, Tensor

from support.op_images import from_pil, smooth_images, to_pil
from vitral.data.augment import AugmentConfig
from vitral.data.autoaugment import (
    AutoAugmentPolicy,
    augreg_space,
    color_jitter,
    increasing_space,
    trivialaugment_space,
)
from vitral.data.image_ops import OPS, apply_ops

DEIT = AutoAugmentPolicy(
    name="randaugment", num_ops=2, magnitude=9, magnitude_std=0.5, increasing=True, probability=0.5
)
AUGREG = AutoAugmentPolicy(name="randaugment", num_ops=2, magnitude=15)
TRIVIAL = AutoAugmentPolicy(name="trivialaugment")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


# ── search spaces────────────────────────────────────────────────────────────────────────────────────────────────

TIMM_INCREASING_OPS = {
    "AutoContrast": "autocontrast", "Equalize": "equalize", "Invert": "invert", "Rotate": "rotate",
    "PosterizeIncreasing": "posterize", "SolarizeIncreasing": "solarize", "SolarizeAdd": "solarize_add",
    "ColorIncreasing": "color", "ContrastIncreasing": "contrast", "BrightnessIncreasing": "brightness",
    "SharpnessIncreasing": "sharpness", "ShearX": "shear_x", "ShearY": "shear_y", "TranslateXRel": "translate_x",
    "TranslateYRel": "translate_y",
}  # fmt: skip
TIMM_OPS = {
    "Rotate": "rotate", "Posterize": "posterize", "SolarizeAdd": "solarize_add", "Color": "color", "ShearX": "shear_x",
}  # fmt: skip


def test_increasing_space_matches_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.references import timm

    reference = timm.data.auto_augment
    assert set(reference._RAND_INCREASING_TRANSFORMS) == set(TIMM_INCREASING_OPS)
    for level in (0.0, 2.5, 5.0, 8.0, 9.0, 9.7, 10.0):
        for coin in (0.0, 1.0):
            monkeypatch.setattr(random, "random", lambda coin=coin: coin)
            sign = torch.tensor([reference._randomly_negate(1.0)])
            arguments = increasing_space(torch.tensor([level / 10]), sign, (100, 200))
            assert set(arguments) == set(TIMM_INCREASING_OPS.values())
            for timm_name, name in TIMM_INCREASING_OPS.items():
                to_argument = reference.LEVEL_TO_ARG[timm_name]
                if to_argument is None:
                    continue
                (expected,) = to_argument(level, {})
                expected *= {"translate_x": 200, "translate_y": 100}.get(name, 1)
                assert arguments[name].item() == pytest.approx(expected, abs=1e-4), (name, level)


def test_augreg_space_matches_timm_for_common_ops() -> None:
    """timm's operations without "Increasing" follow the same TensorFlow code as big_vision."""
    from support.references import timm

    reference: dict[str, Any] = timm.data.auto_augment.LEVEL_TO_ARG
    for level in (0.0, 5.0, 10.0):
        arguments = augreg_space(torch.tensor([level / 10]), torch.ones(1), (224, 224))
        for timm_name, name in TIMM_OPS.items():
            expected = abs(reference[timm_name](level, {})[0])
            assert abs(arguments[name].item()) == pytest.approx(expected, abs=1e-4), (name, level)
    strong = augreg_space(torch.tensor([2.0]), torch.ones(1), (224, 224))
    assert {name: strong[name].item() for name in ("rotate", "translate_x", "cutout", "posterize", "color")} == {
        "rotate": 60, "translate_x": pytest.approx(200), "cutout": 80, "posterize": 8, "color": pytest.approx(3.7),
    }  # fmt: skip
    assert len(strong) == 16


def test_trivialaugment_space_matches_torchvision() -> None:
    from support.references import torchvision

    reference = torchvision.transforms.TrivialAugmentWide()._augmentation_space(31)
    names = {
        "Identity": "identity", "ShearX": "shear_x", "ShearY": "shear_y", "TranslateX": "translate_x",
        "TranslateY": "translate_y", "Rotate": "rotate", "Brightness": "brightness", "Color": "color",
        "Contrast": "contrast", "Sharpness": "sharpness", "Posterize": "posterize", "Solarize": "solarize",
        "AutoContrast": "autocontrast", "Equalize": "equalize",
    }  # fmt: skip
    assert set(reference) == set(names)
    m = torch.arange(31) / 30
    positive, negative = trivialaugment_space(m, torch.ones(31)), trivialaugment_space(m, -torch.ones(31))
    assert set(positive) == set(names.values())
    for torchvision_name, name in names.items():
        magnitudes, is_signed = reference[torchvision_name]
        if magnitudes.ndim == 0:
            continue
        tolerance = 1.0 if name.startswith("translate") else 1e-4  # truncated pixels: one of them is 15.999 in fp32
        if name.startswith("translate"):
            magnitudes = magnitudes.int()
        centre = 1 if name in ("brightness", "color", "contrast", "sharpness") else 0
        torch.testing.assert_close(positive[name], centre + magnitudes.float(), rtol=0, atol=tolerance)
        if is_signed:
            torch.testing.assert_close(negative[name], centre - magnitudes.float(), rtol=0, atol=tolerance)


# ── draws ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", [DEIT, AUGREG, TRIVIAL], ids=["deit", "augreg", "trivial"])
def test_draws_differ_between_images_and_repeat_with_the_generator(policy: AutoAugmentPolicy) -> None:
    images = smooth_images(1).expand(48, -1, -1, -1)
    augmented = policy(images, seeded(7))
    assert augmented.dtype == torch.uint8
    assert augmented.shape == images.shape
    assert torch.equal(augmented, policy(images, seeded(7)))
    assert not torch.equal(augmented, policy(images, seeded(8)))
    assert len({image.numpy().tobytes() for image in augmented}) > (25 if policy is AUGREG else 20)


@pytest.mark.parametrize("policy", [DEIT, AUGREG, TRIVIAL], ids=["deit", "augreg", "trivial"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 1, 2, 7), (2, 4, 9, 2), (5, 3, 8, 8)])
def test_shape_is_preserved(policy: AutoAugmentPolicy, shape: tuple[int, ...]) -> None:
    images = torch.randint(0, 256, shape, generator=seeded(), dtype=torch.uint8)
    for seed in range(20):
        assert policy(images, seeded(seed)).shape == shape


def sampled_ops(policy: AutoAugmentPolicy, B: int = 4000) -> tuple[Tensor, Tensor]:
    """Operations and arguments of the first layer."""
    calls: list[tuple[Tensor, Tensor]] = []

    def record(images: Tensor, op: Tensor, argument: Tensor, position: Tensor | None) -> Tensor:
        calls.append((op, argument))
        return images

    policy(torch.zeros(B, 1, 2, 2, dtype=torch.uint8), seeded(5), apply_fn=record)
    assert len(calls) == (1 if policy.name == "trivialaugment" else policy.num_ops)
    return calls[0]


def test_operations_are_drawn_uniformly() -> None:
    for policy, count in ((AUGREG, 16), (TRIVIAL, 14)):
        op, _ = sampled_ops(policy)
        counts = torch.bincount(op, minlength=len(OPS))
        assert (counts > 0).sum() == count
        assert stats.chisquare(counts[counts > 0].numpy()).pvalue > 0.01


def test_probability_and_magnitude_follow_the_policy() -> None:
    op, argument = sampled_ops(DEIT)
    assert abs((op == OPS.index("identity")).float().mean() - 0.5) < 0.03
    angles = argument[op == OPS.index("rotate")]
    magnitudes = angles.abs() / 3
    assert abs((angles > 0).float().mean() - 0.5) < 0.15
    assert magnitudes.max() <= 10
    assert abs(magnitudes.mean() - 9) < 0.15
    assert 0.35 < magnitudes.std() < 0.6  # normal with std 0.5, clipped at 10


def test_consecutive_batches_have_different_draws() -> None:
    images, generator = smooth_images(30), seeded(2)
    first = AUGREG(images, generator)
    assert not torch.equal(AUGREG(images, generator), first)


# ── colour jitter and AugmentConfig ────────────────────────────────────────────────────────────────────────────


def test_color_jitter_matches_pillow_enhancers() -> None:
    images = smooth_images(40)
    factors: list[Tensor] = []

    def record(images: Tensor, op: Tensor, argument: Tensor, position: Tensor | None) -> Tensor:
        factors.append(argument)
        return apply_ops(images, op, argument, position)

    jittered = color_jitter(images, 0.3, seeded(1), apply_fn=record)
    assert torch.equal(jittered, color_jitter(images, 0.3, seeded(1)))
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for index, (image, after) in enumerate(zip(images, jittered, strict=True)):
        expected = to_pil(image)
        for enhancer, factor in zip(enhancers, factors, strict=True):
            expected = enhancer(expected).enhance(factor[index].item())
        assert (from_pil(expected).int() - after.int()).abs().max() <= 1
    for factor in factors:
        assert 0.7 <= factor.min() < factor.max() <= 1.3
        assert factor.std() > 0.12


@pytest.mark.parametrize("geometry", [{}, {"crop": 0.3}, {"shift": 2, "flip": True}, {"rotate": 10.0, "scale": 0.1}])
def test_color_ops_follow_geometric_transforms_on_uint8(geometry: dict[str, Any]) -> None:
    images, generator = smooth_images(16), seeded(3)
    moved = AugmentConfig(**geometry).transform(images, generator)
    rounded = moved.float().round().clamp(0, 255).to(torch.uint8)
    expected = color_jitter(AUGREG(rounded, generator), 0.2, generator)
    augmented = AugmentConfig(**geometry, policy=AUGREG, jitter=0.2).transform(images, seeded(3))
    assert torch.equal(augmented, expected)
    assert augmented.dtype == torch.uint8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "auto"),
        ("num_ops", 0),
        ("magnitude", -1),
        ("magnitude", 31),
        ("magnitude_std", -1),
        ("probability", 1.1),
    ],
)
def test_invalid_value_is_an_error_with_the_field_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"augment\.policy\.{field} .*{value}"):
        AutoAugmentPolicy(**{field: value})
