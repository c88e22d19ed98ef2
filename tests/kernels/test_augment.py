"""Fused augmentation against `data.augment`, value by value, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from support.triton_interpreter import requires_interpreter
from vitral.data.augment import AugmentConfig, augment_batch
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.image_ops import GEOMETRIC_OPS, OPS, apply_ops
from vitral.data.preprocess import Preprocessing
from vitral.kernels.augment import checks
from vitral.kernels.augment.op import fused_apply_ops, fused_augment, normalization_table
from vitral.kernels.self_check import relative_error
from vitral.recipes.builtin import RECIPES

pytestmark = [requires_interpreter, pytest.mark.slow]
CPU = torch.device("cpu")


def make_preprocessing(size: tuple[int, int], channels: int = 3) -> Preprocessing:
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels]
    return Preprocessing(image_size=size, channels=channels, mean=mean, std=std)


@settings(max_examples=30, deadline=None)
@given(
    shift=st.integers(0, 4),
    flip=st.booleans(),
    border=st.sampled_from(("edge", "black")),
    cutmix=st.sampled_from((0.0, 0.2, 1.0)),
    mix_prob=st.sampled_from((0.4, 1.0)),
    mix_enabled=st.sampled_from((None, True, False)),
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    channels=st.sampled_from((1, 3)),
    B=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_same_seed_gives_the_same_images_and_targets(
    shift: int, flip: bool, border: Any, cutmix: float, mix_prob: float, mix_enabled: bool | None,
    size: tuple[int, int], channels: int, B: int, seed: int,
) -> None:  # fmt: skip
    config = AugmentConfig(shift=shift, flip=flip, border=border, cutmix=cutmix, mix_prob=mix_prob)
    preprocessing, rng = make_preprocessing(size, channels), Generator().manual_seed(seed)
    images = torch.randint(0, 256, (B, channels, *size), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, 7, (B,), generator=rng)
    mix_flag = None if mix_enabled is None else torch.tensor(mix_enabled)
    before = rng.get_state()
    expected_images, expected_targets = augment_batch(config, preprocessing, 7, images, labels, rng, mix_flag)
    after = rng.get_state()
    table = normalization_table(preprocessing, CPU, torch.float32)
    out, targets = fused_augment(config, table, 7, images, labels, rng.set_state(before), mix_flag)
    assert torch.equal(out, expected_images)
    torch.testing.assert_close(targets, expected_targets, atol=1e-6, rtol=0)
    assert torch.equal(rng.get_state(), after)  # later draws are the same too


@pytest.mark.parametrize("name", ["cifar10-94", "cifar10-97", "cifar10-patch"])
def test_speed_recipes_are_supported(name: str) -> None:
    assert checks.supports(RECIPES[name]().augment)


@pytest.mark.parametrize(
    "changes", [{"mixup": 0.2}, {"erase": 0.1}, {"crop": 0.5}, {"rotate": 5.0}, {"scale": 0.1}], ids=str
)
def test_other_augmentations_are_not_supported(changes: dict[str, Any]) -> None:
    assert not checks.supports(AugmentConfig(flip=True, cutmix=1.0, **changes))


ARG_RANGES = {
    "posterize": (0, 8),
    "solarize": (0, 384),
    "solarize_add": (0, 110),
    "cutout": (0, 9),
    "rotate": (-135, 135),
}
ARG_RANGES |= dict.fromkeys(("brightness", "contrast", "color", "sharpness"), (0, 2))
ARG_RANGES |= dict.fromkeys(("translate_x", "translate_y"), (-30, 30)) | dict.fromkeys(("shear_x", "shear_y"), (-1, 1))
INTEGER_ARGS = ("posterize", "solarize", "solarize_add", "cutout")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(OPS),
    strength=st.floats(0, 1, width=32),
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    channels=st.sampled_from((1, 3)),
    levels=st.sampled_from(((0, 256), (40, 90), (77, 78), (0, 2))),
    has_centers=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_operation_matches_the_reference(
    name: str, strength: float, size: tuple[int, int], channels: int, levels: tuple[int, int], has_centers: bool,
    seed: int,
) -> None:  # fmt: skip
    """Exactly, except that interpolated values may be rounded the other way."""
    rng = Generator().manual_seed(seed)
    images = torch.randint(*levels, (2, channels, *size), generator=rng, dtype=torch.uint8)
    low, high = ARG_RANGES.get(name, (0, 1))
    args = torch.full((2,), low + (high - low) * strength)
    args = args.floor() if name in INTEGER_ARGS else args
    ops = torch.full((2,), OPS.index(name))
    centers = torch.rand(2, 2, generator=rng) if has_centers else None
    expected, out = apply_ops(images, ops, args, centers), fused_apply_ops(images, ops, args, centers)
    assert (expected.int() - out.int()).abs().max() <= (1 if name in GEOMETRIC_OPS else 0)


POLICIES = [
    AutoAugmentPolicy(name="randaugment", num_ops=1, magnitude=7, increasing=True, probability=0.5),
    AutoAugmentPolicy(name="randaugment", num_ops=2, magnitude=9, magnitude_std=0.5, increasing=True, probability=0.5),
    AutoAugmentPolicy(name="randaugment", magnitude=15),
    AutoAugmentPolicy(name="trivialaugment"),
]
CHANGES: list[dict[str, Any]] = [{"shift": 2, "flip": True, "cutmix": 1.0, "mix_prob": 0.5}, {}, {"jitter": 0.3}]


@pytest.mark.parametrize(
    ("policy", "changes"),
    [(policy, changes) for policy in POLICIES for changes in CHANGES],
    ids=str,
)
def test_policies_between_shift_and_cutmix_use_the_same_draws(
    policy: AutoAugmentPolicy, changes: dict[str, Any]
) -> None:
    config, preprocessing = AugmentConfig(policy=policy, **changes), make_preprocessing((9, 11))
    rng = Generator().manual_seed(3)
    images = torch.randint(0, 256, (24, 3, 9, 11), generator=rng, dtype=torch.uint8)
    labels, before = torch.randint(0, 7, (24,), generator=rng), rng.get_state()
    expected_images, expected_targets = augment_batch(config, preprocessing, 7, images, labels, rng)
    after = rng.get_state()
    table = normalization_table(preprocessing, CPU, torch.float32)
    out, targets = fused_augment(config, table, 7, images, labels, rng.set_state(before))
    assert torch.equal(rng.get_state(), after)
    assert relative_error(out, expected_images) < checks.COLOR_OPS_TOLERANCE
    torch.testing.assert_close(targets, expected_targets, atol=1e-6, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_color_ops_check_passes(channels: int) -> None:
    assert checks.color_ops_error(make_preprocessing((12, 12), channels), CPU) <= checks.COLOR_OPS_TOLERANCE


@pytest.mark.parametrize("num_images", [1, 5])
def test_multi_hot_labels_and_real_values_are_mixed_like_the_images(num_images: int) -> None:
    config = AugmentConfig(shift=2, flip=True, cutmix=1.0, mix_prob=0.7)
    preprocessing, rng = make_preprocessing((12, 12)), Generator().manual_seed(3)
    images = torch.randint(0, 256, (num_images, 3, 12, 12), generator=rng, dtype=torch.uint8)
    labels = torch.randn(num_images, 4, generator=rng)
    before = rng.get_state()
    expected_images, expected_targets = augment_batch(config, preprocessing, 4, images, labels, rng)
    table = normalization_table(preprocessing, CPU, torch.float32)
    out, targets = fused_augment(config, table, 4, images, labels, rng.set_state(before))
    assert torch.equal(out, expected_images)
    torch.testing.assert_close(targets, expected_targets, atol=1e-6, rtol=1e-6)
