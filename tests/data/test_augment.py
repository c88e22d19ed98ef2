"""Augmentation compared with Pillow and NumPy.

The random draws are recovered from the output: an image of coordinates shows where each pixel was read, and the
reference then applies the same transform.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import Generator, Tensor

from vitral.data.augment import AugmentConfig, _sample_beta, augment_batch, cutmix, erase, mixup
from vitral.data.preprocess import Preprocessing

BORDERS = ("edge", "black")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(
        1, 256, shape, generator=seeded(seed), dtype=torch.uint8
    )  # no zeros, so that black border pixels are recognisable


def coordinates(B: int, H: int, W: int) -> Tensor:
    """(B, 2, H, W): column and row of each pixel."""
    y, x = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    return torch.stack([x, y]).float().expand(B, 2, H, W).clone()


def fitted_maps(augment: AugmentConfig, B: int, H: int, W: int, seed: int) -> np.ndarray[Any, Any]:
    """(B, 2, 3): the affine map from output to source coordinates, fitted to the inner pixels."""
    moved = augment.transform(coordinates(B, H, W), seeded(seed))
    y, x = np.mgrid[:H, :W]
    maps = []
    for read_x, read_y in moved.numpy():
        inner = (read_x > 0.01) & (read_x < W - 1.01) & (read_y > 0.01) & (read_y < H - 1.01)
        points = np.stack([x[inner], y[inner], np.ones(inner.sum())], axis=1)
        maps.append([np.linalg.lstsq(points, read[inner], rcond=None)[0] for read in (read_x, read_y)])
    return np.array(maps)


def shift_by_slicing(
    image: np.ndarray[Any, Any], down: int, right: int, flip: bool, border: str
) -> np.ndarray[Any, Any]:
    """Flip, then shift, by padding and slicing."""
    _, H, W = image.shape
    image = image[:, :, ::-1] if flip else image
    margin = max(abs(down), abs(right))
    mode: Any = "edge" if border == "edge" else "constant"
    padded = np.pad(image, ((0, 0), (margin, margin), (margin, margin)), mode=mode)
    return padded[:, margin - down : margin - down + H, margin - right : margin - right + W]


@pytest.mark.slow
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("flip", [False, True])
def test_shift_and_flip_match_numpy_slicing(border: Any, flip: bool) -> None:
    augment, B, H, W = AugmentConfig(shift=3, flip=flip, border=border), 64, 9, 13
    images = noise(B, 3, H, W)
    moved = augment.transform(images, seeded(5)).numpy()
    draws = [(d, r, f) for d in range(-3, 4) for r in range(-3, 4) for f in ([False, True] if flip else [False])]
    used = set()
    for before, after in zip(images.numpy(), moved, strict=True):
        matches = [draw for draw in draws if np.array_equal(shift_by_slicing(before, *draw, border), after)]
        assert len(matches) == 1
        used.add(matches[0])
    assert len(used) > 30, "independent draws per image"


def test_shift_matches_pillow() -> None:
    images = noise(16, 1, 12, 8)
    moved = AugmentConfig(shift=2, border="black").transform(images, seeded(3))
    for before, after in zip(images, moved, strict=True):
        image = Image.fromarray(before[0].numpy())
        candidates = [
            np.asarray(image.transform(image.size, Image.Transform.AFFINE, (1, 0, -right, 0, 1, -down)))
            for down in range(-2, 3)
            for right in range(-2, 3)
        ]
        assert sum(np.array_equal(candidate, after[0].numpy()) for candidate in candidates) == 1


def test_shift_larger_than_the_image_leaves_only_border() -> None:
    images = noise(200, 1, 3, 3)
    black = AugmentConfig(shift=40, border="black").transform(images, seeded())
    edge = AugmentConfig(shift=40).transform(images, seeded())
    is_black = black.flatten(1).sum(dim=1) == 0
    assert is_black.float().mean() > 0.8
    assert (edge > 0).all()


def test_shifts_are_uniform_including_the_bounds() -> None:
    B, S = 7000, 3
    marked = torch.zeros(B, 1, 9, 9, dtype=torch.uint8)
    marked[:, :, 4, 4] = 1
    positions = AugmentConfig(shift=S, border="black").transform(marked, seeded(11)).flatten(1).argmax(dim=1).numpy()
    counts = np.zeros((9, 9))
    np.add.at(counts, (positions // 9, positions % 9), 1)
    assert counts[4 - S : 5 + S, 4 - S : 5 + S].sum() == B
    assert stats.chisquare(counts[4 - S : 5 + S, 4 - S : 5 + S].ravel()).pvalue > 0.01


def test_half_of_the_images_are_flipped() -> None:
    images = coordinates(4000, 1, 5)[:, :1]
    flipped = AugmentConfig(flip=True).transform(images, seeded(2))[:, 0, 0, 0] == 4
    assert 0.47 < flipped.float().mean() < 0.53


def reference_crops(images: Tensor, min_area: float, size: tuple[int, int], generator: Generator) -> Tensor:
    """Random resized crops, then flips, one image at a time, with the random draws in the order of the transforms."""
    area, ratio, down, right = torch.rand(4, len(images), generator=generator)
    torch.randint(0, 1, (2, len(images), 1), generator=generator)  # shifts by zero pixels
    flipped = torch.rand(len(images), 1, generator=generator) < 0.5
    area, ratio = min_area + area * (1 - min_area), (4 / 3) ** (ratio * 2 - 1)
    crops = []
    for index, image in enumerate(images):
        height, width = min((area[index] * ratio[index]) ** 0.5, 1.0), min((area[index] / ratio[index]) ** 0.5, 1.0)
        top, left = (1 - height) * down[index], (1 - width) * right[index]
        rows = (top + height * (torch.arange(size[0]) + 0.5) / size[0]) * image.shape[1] - 0.5
        columns = (left + width * (torch.arange(size[1]) + 0.5) / size[1]) * image.shape[2] - 0.5
        crop = interpolate_rows(interpolate_rows(image.double(), rows).transpose(1, 2), columns).transpose(1, 2)
        crops.append(crop.flip(2) if flipped[index] else crop)
    return torch.stack(crops)


def interpolate_rows(image: Tensor, rows: Tensor) -> Tensor:
    """The image (C, H, W) at fractional rows; outside of it, its first or last row."""
    rows = rows.double().clamp(0, image.shape[1] - 1)
    first = rows.floor().long()
    second = (first + 1).clamp(max=image.shape[1] - 1)
    return torch.lerp(image[:, first], image[:, second], (rows - first)[None, :, None])


@pytest.mark.parametrize("size", [(24, 24), (12, 30), (40, 20)])
@pytest.mark.parametrize("count", [1, 4, 11])
def test_crops_are_flipped_and_resized_as_one_image_at_a_time(count: int, size: tuple[int, int]) -> None:
    images = noise(count, 3, 30, 26)
    crops = AugmentConfig(crop=0.2, flip=True).transform(images, seeded(7), size)
    assert crops.dtype == torch.float32
    assert (crops - reference_crops(images, 0.2, size, seeded(7))).abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("options", [{}, {"crop": 0.3, "flip": True}, {"shift": 1}, {"rotate": 5.0}])
def test_augmentation_normalises_and_leaves_its_input_unchanged(options: Any, dtype: torch.dtype) -> None:
    images = noise(5, 3, 16, 16).to(dtype)
    before = images.clone()
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3))
    augment = AugmentConfig(**options)
    normalised, _ = augment_batch(augment, preprocessing, 2, images, torch.zeros(5, dtype=torch.int64), seeded(3))
    assert torch.equal(images, before)
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    expected = (augment.transform(images, seeded(3)).float() - mean) / std
    assert torch.allclose(normalised, expected, atol=1e-5)


def test_crops_followed_by_a_shift_are_flipped_afterwards() -> None:
    images = noise(6, 3, 30, 26)
    shifted = AugmentConfig(crop=0.2, flip=True, shift=1).transform(images, seeded(7))
    crops = AugmentConfig(crop=0.2).transform(images, generator := seeded(7))
    assert torch.equal(shifted, AugmentConfig(flip=True, shift=1).transform(crops, generator))


@pytest.mark.parametrize(("H", "W"), [(24, 24), (16, 40), (40, 16)])
def test_rotation_and_scaling_are_about_the_centre_and_uniform_within_bounds(H: int, W: int) -> None:
    maps = fitted_maps(AugmentConfig(rotate=30, scale=0.2), 300, H, W, seed=4)
    linear, offset = maps[:, :, :2], maps[:, :, 2]
    centre = np.array([(W - 1) / 2, (H - 1) / 2])
    assert np.allclose(linear @ centre + offset, centre, atol=1e-3)
    size = 1 / np.sqrt(np.linalg.det(linear))
    rotation = linear * size[:, None, None]
    assert np.allclose(rotation @ rotation.transpose(0, 2, 1), np.eye(2), atol=1e-3), "orthogonal: no shear"
    angle = np.degrees(np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0]))
    for values, low, high in ((angle, -30, 30), (size, 0.8, 1.2)):
        assert values.min() >= low - 1e-2
        assert values.max() <= high + 1e-2
        assert stats.kstest(values, "uniform", args=(low, high - low)).pvalue > 0.01
    assert abs(np.corrcoef(angle, size)[0, 1]) < 0.2


@pytest.mark.parametrize(("H", "W"), [(20, 20), (14, 30), (30, 14)])
def test_rotation_matches_pillow(H: int, W: int) -> None:
    augment, B = AugmentConfig(rotate=45, border="black"), 12
    maps = fitted_maps(AugmentConfig(rotate=45), B, H, W, seed=8)
    images = smooth(B, H, W)
    moved = augment.transform(images, seeded(8)).numpy()[:, 0]
    for (x_row, _), before, after in zip(maps, images.numpy()[:, 0], moved, strict=True):
        degrees = math.degrees(math.atan2(-x_row[1], x_row[0]))
        expected = np.asarray(Image.fromarray(before).rotate(degrees, Image.Resampling.BILINEAR))
        inner = Image.fromarray(np.pad(np.ones((H - 4, W - 4), dtype=np.uint8), 2))
        inside = np.asarray(inner.rotate(degrees)) > 0  # Pillow and PyTorch interpolate differently at the border
        assert inside.mean() > 0.3
        assert np.abs(expected - after)[inside].max() < 0.5


@pytest.mark.parametrize("border", BORDERS)
def test_combined_affine_transform_matches_pillow(border: Any) -> None:
    augment, B, H, W = AugmentConfig(rotate=20, scale=0.3, shift=4, flip=True, border=border), 16, 22, 34
    maps = fitted_maps(AugmentConfig(rotate=20, scale=0.3, shift=4, flip=True), B, H, W, seed=9)
    images = smooth(B, H, W)
    moved = augment.transform(images, seeded(9)).numpy()[:, 0]
    for ((a, b, c), (d, e, f)), before, after in zip(maps, images.numpy()[:, 0], moved, strict=True):
        # Pillow maps pixel corners, `fitted_maps` maps pixel centres.
        corners = (a, b, c - 0.5 * (a + b) + 0.5, d, e, f - 0.5 * (d + e) + 0.5)
        image = Image.fromarray(before)
        expected = np.asarray(image.transform((W, H), Image.Transform.AFFINE, corners, Image.Resampling.BILINEAR))
        y, x = np.mgrid[:H, :W]
        read_x, read_y = a * x + b * y + c, d * x + e * y + f
        inside = (read_x > 0) & (read_x < W - 1) & (read_y > 0) & (read_y < H - 1)
        outside = (read_x < -1.01) | (read_x > W + 0.01) | (read_y < -1.01) | (read_y > H + 0.01)
        assert inside.mean() > 0.3
        assert np.abs(expected - after)[inside].max() < 0.5
        assert (after[outside] == 0).all() if border == "black" else (after > 0).all()
    signs = np.sign(np.linalg.det(maps[:, :, :2]))
    assert set(signs) == {-1, 1}


def smooth(B: int, H: int, W: int) -> Tensor:
    """Low-frequency images with values from 40 to 250, on which different interpolation implementations agree."""
    coarse = torch.rand(B, 1, 4, 5, generator=seeded(6)) * 210 + 40
    return torch.nn.functional.interpolate(coarse, size=(H, W), mode="bilinear")


def test_affine_shift_is_uniform_within_bounds() -> None:
    offsets = fitted_maps(AugmentConfig(scale=1e-6, shift=3), 400, 16, 24, seed=3)[:, :, 2]
    for values in offsets.T:
        assert stats.kstest(values, "uniform", args=(-3, 6)).pvalue > 0.01


ALL_AUGMENTATIONS = AugmentConfig(shift=2, flip=True, rotate=10, scale=0.1, erase=0.5, mixup=0.4, cutmix=1.0)
CONFIGS = [
    AugmentConfig(shift=2, flip=True),
    AugmentConfig(rotate=15),
    AugmentConfig(erase=0.5),
    AugmentConfig(mixup=0.4),
    AugmentConfig(cutmix=1.0),
    ALL_AUGMENTATIONS,
]


def augment_images(augment: AugmentConfig, images: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    targets = torch.eye(5)[torch.arange(len(images)) % 5]
    return augment.erase_and_mix(augment.transform(images, generator).float(), targets, generator)


@pytest.mark.parametrize("augment", CONFIGS)
def test_randomness_comes_only_from_the_generator(augment: AugmentConfig) -> None:
    images, generator = noise(8, 3, 12, 10), seeded(1)
    generator.manual_seed(77)
    state = generator.get_state()
    torch.manual_seed(1)
    first = augment_images(augment, images, generator)
    second = augment_images(augment, images, generator)
    torch.manual_seed(2)
    repeated = augment_images(augment, images, generator.set_state(state))
    assert torch.equal(first[0], repeated[0])
    assert torch.equal(first[1], repeated[1])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], augment_images(augment, images, seeded(78))[0])


@pytest.mark.parametrize("augment", CONFIGS)
def test_every_image_of_a_batch_has_its_own_draws(augment: AugmentConfig) -> None:
    images = noise(5, 1, 16, 16)[torch.arange(50) % 5]  # five images ten times, with the same neighbours
    augmented = augment_images(augment, images, seeded(3))[0]
    assert len(augmented.unique(dim=0)) > 15


def test_default_config_changes_nothing_and_draws_nothing() -> None:
    images, targets, generator = noise(4, 1, 6, 6), torch.eye(4), seeded(3)
    state = generator.get_state()
    assert AugmentConfig().transform(images, generator) is images
    mixed, same_targets = AugmentConfig().erase_and_mix(images, targets, generator)
    assert mixed is images
    assert same_targets is targets
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("border", BORDERS)
def test_shift_and_flip_keep_the_dtype_and_resampling_returns_fp32(border: Any) -> None:
    images, generator = noise(4, 3, 8, 8), seeded()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        assert AugmentConfig(shift=1, flip=True, border=border).transform(images.to(dtype), generator).dtype == dtype
        assert AugmentConfig(rotate=5, border=border).transform(images.to(dtype), generator).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("augment", CONFIGS[2:5])
def test_mixing_keeps_the_dtype_of_images_and_targets(augment: AugmentConfig, dtype: torch.dtype) -> None:
    images, targets = augment.erase_and_mix(noise(6, 1, 8, 8).to(dtype), torch.eye(6, dtype=dtype), seeded())
    assert images.dtype == targets.dtype == dtype
    assert images.isfinite().all()
    torch.testing.assert_close(targets.float().sum(dim=1), torch.ones(6), atol=1e-2, rtol=0)


def test_erased_area_is_one_rectangle_within_bounds_in_the_given_fraction_of_images() -> None:
    B, H, W = 3000, 40, 56
    erased = erase(torch.full((B, 1, H, W), 99.0), 0.3, seeded(2))[:, 0] != 99
    area = erased.float().mean(dim=(1, 2))
    has_box = area > 0
    assert 0.27 < has_box.float().mean() < 0.33
    assert area[has_box].min() > 0.02 * 0.8  # sides are rounded to whole pixels
    assert area[has_box].max() < 0.33 * 1.1
    assert 0.16 < area[has_box].mean() < 0.19
    rows, columns = erased.any(dim=2), erased.any(dim=1)
    assert torch.equal(erased, rows[:, :, None] & columns[:, None, :])
    for line in (rows[has_box], columns[has_box]):
        steps = torch.nn.functional.pad(line.int(), (1, 1)).diff(dim=1)
        assert (steps.abs().sum(dim=1) == 2).all(), "one contiguous interval"
    ratio = torch.log(rows[has_box].sum(1) / H / (columns[has_box].sum(1) / W))
    assert ratio.abs().max() < math.log(3.3) * 1.3
    assert abs(ratio.mean()) < 0.1
    for line in (rows[has_box], columns[has_box]):
        first, last = line[:, 0].float().mean(), line[:, -1].float().mean()
        assert 0.02 < first < 0.1, "boxes may touch the border"
        assert abs(first - last) < 0.03, "no side is preferred"


def test_erasing_fills_with_normal_noise_in_all_or_no_images() -> None:
    images = torch.full((500, 1, 32, 32), 99.0)
    assert torch.equal(erase(images, 0.0, seeded()), images)
    erased = erase(images, 1.0, seeded())
    assert (erased != 99).flatten(1).any(dim=1).all()
    fill = erased[erased != 99]
    assert abs(fill.mean()) < 0.02
    assert abs(fill.std() - 1) < 0.02


def test_mixup_targets_equal_the_blend_of_the_pixels() -> None:
    B = 64
    mixed, targets = mixup(torch.eye(B)[:, :, None, None], torch.eye(B), 0.8, seeded(4))
    torch.testing.assert_close(mixed[:, :, 0, 0], targets)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(B))
    assert ((targets > 0).sum(dim=1) <= 2).all()
    assert targets.diag().unique().numel() > 50


def test_cutmix_targets_equal_the_pixel_counts() -> None:
    B, H, W = 200, 11, 17
    images = torch.arange(B).float().view(B, 1, 1, 1).expand(B, 3, H, W)
    mixed, targets = cutmix(images, torch.eye(B), 1.0, seeded(4))
    assert all(len(image.unique()) <= 2 for image in mixed)
    for image, target in zip(mixed[:, 0].long(), targets, strict=True):
        shares = torch.bincount(image.flatten(), minlength=B) / (H * W)
        torch.testing.assert_close(target, shares)
    own_share = targets.diag()
    assert own_share.min() < 0.1
    assert own_share.max() > 0.9


def test_each_image_gets_either_mixup_or_cutmix() -> None:
    B, H, W = 600, 12, 12
    images = torch.arange(B).float().view(B, 1, 1, 1).expand(B, 1, H, W)
    mixed, targets = AugmentConfig(mixup=1.0, cutmix=1.0).erase_and_mix(images, torch.eye(B), seeded(4))
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(B))
    blended = torch.tensor([not set(image.unique().tolist()) <= {i, (i - 1) % B} for i, image in enumerate(mixed)])
    assert 0.42 < blended.float().mean() < 0.58
    values = torch.arange(B).float()
    torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), targets @ values, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("cutmix_prob", [0.0, 0.2, 1.0])
def test_cutmix_prob_is_the_fraction_of_images_with_cutmix(cutmix_prob: float) -> None:
    B = 600
    images = torch.arange(B).float().view(B, 1, 1, 1).expand(B, 1, 12, 12)
    augment = AugmentConfig(mixup=1.0, cutmix=1.0, cutmix_prob=cutmix_prob)
    mixed, _ = augment.erase_and_mix(images, torch.eye(B), seeded(4))
    pasted = torch.tensor([set(image.unique().tolist()) <= {i, (i - 1) % B} for i, image in enumerate(mixed)])
    assert abs(pasted.float().mean() - cutmix_prob) < 0.06


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 4.0])
def test_mixing_coefficients_follow_the_beta_distribution(alpha: float) -> None:
    shares = _sample_beta(alpha, 40_000, seeded(3), torch.device("cpu")).double().numpy()
    assert np.isfinite(shares).all()
    expected = stats.beta(alpha, alpha)
    assert abs(shares.mean() - 0.5) < 0.01
    assert abs(shares.var() / expected.var() - 1) < 0.03
    assert abs((np.abs(shares - 0.5) < 0.25).mean() - (expected.cdf(0.75) - expected.cdf(0.25))) < 0.01


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 4),
    C=st.integers(1, 4),
    H=st.integers(1, 12),
    W=st.integers(1, 12),
    shift=st.integers(0, 15),
    flip=st.booleans(),
    rotate=st.floats(0, 180),
    scale=st.floats(0, 0.99),
    border=st.sampled_from(BORDERS),
    seed=st.integers(0, 9),
)
def test_shape_and_value_range_are_preserved(
    B: int, C: int, H: int, W: int, shift: int, flip: bool, rotate: float, scale: float, border: Any, seed: int
) -> None:
    augment = AugmentConfig(
        shift=shift, flip=flip, rotate=rotate, scale=scale, border=border, erase=0.5, mixup=0.5, cutmix=0.5
    )
    images = noise(B, C, H, W, seed=seed)
    moved = augment.transform(images, seeded(seed))
    assert moved.shape == images.shape
    assert moved.float().isfinite().all()
    assert moved.max() <= images.max().float() + 1e-2
    assert moved.min() >= (0 if border == "black" else images.min().float() - 1e-2)
    mixed, targets = augment.erase_and_mix(moved.float(), torch.eye(3)[torch.arange(B) % 3], seeded(seed))
    assert mixed.shape == images.shape
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(B))


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, -1) for name in ("shift", "rotate", "scale", "erase", "mixup", "cutmix")]
    + [(name, math.nan) for name in ("rotate", "scale", "erase", "mixup", "cutmix")]
    + [("rotate", math.inf), ("mixup", math.inf), ("scale", 1.0), ("erase", 1.01), ("shift", 1.5), ("border", "white")]
    + [("jitter", 1.5), ("jitter", -0.1), ("cutmix_prob", 2.0), ("repeat", 0)],
)
def test_invalid_value_is_an_error_with_the_field_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"augment\.{field} .*{value}"):
        AugmentConfig(**{field: value})


def test_mix_prob_is_the_fraction_of_mixed_images() -> None:
    images, targets = torch.randn(4000, 1, 4, 4), torch.eye(10).repeat(400, 1)
    generator = torch.Generator().manual_seed(0)
    mixed, mixed_targets = AugmentConfig(mixup=1.0, mix_prob=0.3).erase_and_mix(images, targets, generator)
    untouched = (mixed == images).flatten(1).all(dim=1)
    assert torch.equal(mixed_targets[untouched], targets[untouched])
    assert untouched.float().mean().item() == pytest.approx(0.7, abs=0.03)


def test_mixing_can_be_disabled_with_a_tensor() -> None:
    images, targets = torch.randn(64, 1, 4, 4), torch.eye(8).repeat(8, 1)
    for enabled in (True, False):
        augment = AugmentConfig(cutmix=1.0)
        mixed, mixed_targets = augment.erase_and_mix(images, targets, seeded(), torch.tensor(enabled))
        assert torch.equal(mixed, images) != enabled
        assert torch.equal(mixed_targets, targets) != enabled
