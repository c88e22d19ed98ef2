"""Feature distillation: its losses against NumPy, its statistics, and a student that approaches its teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.distillation import STUDENT, TEACHER, preprocessing_of, random_views, tiny_distillation, tiny_teacher
from vitral.errors import VitralError
from vitral.ssl.distillation import (
    FeatureDistillConfig,
    match_losses,
    mean_and_std,
    patch_moments,
    resample_patches,
    standardise,
)
from vitral.ssl.teacher import Teacher


def numpy_match(x: np.ndarray, y: np.ndarray) -> float:
    cosine = float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    difference = np.abs(x - y)
    smooth_l1 = np.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
    return 0.9 * (1 - cosine) + 0.1 * float(smooth_l1)


def test_match_loss_of_known_vectors() -> None:
    """cos = 0.6; differences 0 and 2 have smooth-L1 0 and 1.5: 0.9 · 0.4 + 0.1 · 0.75."""
    losses = match_losses(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    assert losses.tolist() == pytest.approx([0, 0], abs=1e-6)
    (loss,) = match_losses(torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 0.0]])).tolist()
    assert loss == pytest.approx(0.9 * 0.4 + 0.1 * (1.5 + 3.5) / 2)


def test_loss_is_that_of_numpy() -> None:
    method = tiny_distillation(patch_weight=0.7)
    method.set_statistics(torch.cat([method.feature_sums(view) for view in random_views(count=20, seed=5).unbind(1)]))
    views = random_views(count=3)
    loss, cosine = method(views)
    teacher = method.frozen_teacher.features(views[:, 0], method.preprocessing)
    tokens = method.student.tokens(views[:, 0])
    assert teacher.patches is not None
    targets = resample_patches(teacher.patches, (2, 2)).double().numpy()
    pooled = teacher.pooled.double().numpy()
    (mean, std), (patch_mean, patch_std) = (
        stats.double().numpy() for stats in (method.pooled_stats_2E, method.patch_stats_2F)
    )
    x = method.pooled_projection(tokens[:, 0]).detach().double().numpy()
    patches = method.patch_projection(tokens[:, 1:]).detach().double().numpy()  # type: ignore[misc]
    y = (pooled - mean) / std
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in zip(x, y, strict=True)]
    expected = sum(1 - value for value in cosines)
    for image in range(3):
        z = (targets[image] - patch_mean) / patch_std
        expected += 0.7 * float(np.mean([numpy_match(patches[image, n], z[n]) for n in range(4)]))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert cosine.item() == pytest.approx(sum(cosines), rel=1e-5)


def test_several_views_count_as_their_mean() -> None:
    method = tiny_distillation()
    views = torch.cat([random_views(seed=1), random_views(seed=2)], dim=1)
    both, (first, _), (second, _) = method(views)[0], method(views[:, :1]), method(views[:, 1:])
    torch.testing.assert_close(both, (first + second) / 2)


def test_patches_are_resampled_to_the_grid_of_the_student() -> None:
    """A triangle filter of two old patches on either side: weights 3, 3, 1 of 7 for the first of two new patches."""
    patches = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(resample_patches(patches, (4, 4))[0, :, 0], torch.arange(16.0))
    rows = torch.tensor([[3.0, 3, 1, 0], [0, 1, 3, 3]]) / 7
    torch.testing.assert_close(resample_patches(patches, (2, 2))[0, :, 0], (rows @ patches[0, 0] @ rows.T).flatten())
    constant = resample_patches(torch.full((1, 1, 3, 5), 7.0), (4, 2))
    torch.testing.assert_close(constant, torch.full((1, 8, 1), 7.0))


def test_standardised_features_have_mean_0_and_std_1() -> None:
    features = torch.randn(500, 3, dtype=torch.float64) * torch.tensor([1.0, 5.0, 20.0]) + 3
    standard = standardise(features, mean_and_std(features.mean(dim=0), features.square().mean(dim=0)))
    torch.testing.assert_close(standard.mean(dim=0), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(standard.std(dim=0, correction=0), torch.ones(3, dtype=torch.float64))


def test_constant_dimensions_are_not_amplified() -> None:
    mean, std = mean_and_std(torch.tensor([1.0, 1.0]), torch.tensor([5.0, 1.0]))  # standard deviations 2 and 0
    assert mean.tolist() == [1, 1]
    assert std.tolist() == pytest.approx([2, 0.01])


def test_patch_moments_are_those_of_all_patches() -> None:
    patches = torch.randn(2, 3, 4, 5)
    mean, square = patch_moments(patches)
    torch.testing.assert_close(mean, patches.flatten(2).mean(dim=2))
    torch.testing.assert_close(square, (patches**2).flatten(2).mean(dim=2))


def test_student_features_approach_those_of_the_teacher() -> None:
    method = tiny_distillation()
    views = random_views(count=8)
    method.set_statistics(method.feature_sums(views[:, 0]))
    optimizer = torch.optim.AdamW(method.parameters(), lr=1e-2)
    cosines = []
    for _ in range(60):
        loss, cosine = method(views)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cosines.append(cosine.item() / 8)
    assert cosines[0] < 0.5
    assert cosines[-1] > 0.95


def test_teacher_is_not_a_part_of_the_method() -> None:
    teacher = tiny_teacher()
    method = tiny_distillation(teacher)
    weights = {tensor.data_ptr() for tensor in teacher.network.state_dict().values()}  # type: ignore[attr-defined]
    assert not weights & {tensor.data_ptr() for tensor in method.state_dict().values()}
    method.train()
    assert not teacher.network.training  # type: ignore[attr-defined]
    method(random_views())[0].backward()
    assert all(parameter.grad is None for parameter in teacher.network.parameters())  # type: ignore[attr-defined]
    assert all(parameter.grad is not None for parameter in method.parameters())


@pytest.mark.parametrize("variant", ["distilled", "class-and-mean"])
def test_student_may_pool_several_tokens(variant: str) -> None:
    method = tiny_distillation(variant=variant)
    assert method.pooled_projection[-1].in_features == 2 * STUDENT.width
    assert method(random_views())[0].isfinite()


def test_student_may_be_wider_than_its_teacher() -> None:
    method = tiny_distillation(student=replace(STUDENT, width=64))
    assert method(random_views())[0].isfinite()


def test_cnn_teacher_has_no_patch_loss_without_a_feature_map() -> None:
    cnn = nn.Sequential(nn.Conv2d(3, 7, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    method = tiny_distillation(Teacher(cnn, preprocessing_of(STUDENT), name="cnn"))
    assert method.patch_projection is None
    assert not method.needs_patches
    assert method(random_views())[0].isfinite()


def test_weight_0_leaves_the_patches_out() -> None:
    pooled_only, both = tiny_distillation(patch_weight=0.0), tiny_distillation()
    assert pooled_only.patch_projection is None
    assert pooled_only(random_views())[0] < both(random_views())[0]


def test_targets_of_the_rows_are_part_of_the_batch() -> None:
    method = tiny_distillation(augment=False)
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    expected = method(*method.make_batch(images, torch.Generator()))
    method.targets = method.teacher_features(method.preprocessing.normalise(images))
    rows = torch.tensor([3, 0])
    batch = method.make_batch_of_rows(images[rows], rows, torch.Generator())
    assert torch.equal(batch[1], method.targets.pooled[rows])
    stored = method(*method.make_batch_of_rows(images, torch.arange(5), torch.Generator()))
    assert torch.equal(stored[0], expected[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_teacher_that_returns_nan_is_refused(value: float) -> None:
    teacher = Teacher(lambda images: images.new_full((len(images), 4), value), preprocessing_of(STUDENT), name="broken")
    method = tiny_distillation(teacher)
    with pytest.raises(VitralError, match="broken gives 6 of 6 images features that are NaN or infinite") as error:
        method.set_statistics(method.feature_sums(random_views()[:, 0]))
    assert "--precision fp32" in error.value.hint


def test_teacher_with_equal_features_for_all_images_is_refused() -> None:
    teacher = Teacher(lambda images: images.new_ones(len(images), 4), preprocessing_of(STUDENT), name="constant")
    method = tiny_distillation(teacher)
    with pytest.raises(VitralError, match="constant gives all images the same features"):
        method.set_statistics(method.feature_sums(random_views()[:, 0]))


@pytest.mark.parametrize("name", ["patch_weight", "cache"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"distill.{name}"):
        FeatureDistillConfig(**{name: value})


def test_teacher_with_a_finer_grid_and_another_size() -> None:
    teacher = tiny_teacher(replace(TEACHER, image_size=(24, 24)))
    assert tiny_distillation(teacher)(random_views())[0].isfinite()
