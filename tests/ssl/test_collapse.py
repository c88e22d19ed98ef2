"""Measures of collapse on features with known values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from vitral.ssl.collapse import (
    CollapseMetrics,
    advice_for_similar_images,
    collapse_reason,
    effective_rank,
    feature_std,
    image_deviation,
    mean_cosine,
    measure_collapse,
    output_entropies,
)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthonormal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(gaussian(rows, columns).double()).Q


def with_singular_values(values: list[float]) -> Tensor:
    k = len(values)
    return orthonormal(50, k) @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ orthonormal(20, k).T


@pytest.mark.parametrize("rank", [1, 2, 7, 20])
def test_k_equal_singular_values_have_rank_k(rank: int) -> None:
    assert effective_rank(with_singular_values([3.0] * rank)) == pytest.approx(rank, rel=1e-4)


def test_effective_rank_of_unequal_singular_values_by_hand() -> None:
    """Singular values 3 and 1: p = (3/4, 1/4), entropy 2 log 2 - 3/4 log 3."""
    expected = math.exp(2 * math.log(2) - 0.75 * math.log(3))
    assert effective_rank(with_singular_values([3.0, 1.0])) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_effective_rank_matches_the_entropy_of_numpys_singular_values(shape: tuple[int, int]) -> None:
    features = gaussian(*shape)
    singular_values = np.linalg.svd(features.double().numpy(), compute_uv=False)
    expected = math.exp(stats.entropy(singular_values))  # which normalises
    assert effective_rank(features) == pytest.approx(expected, rel=1e-4)


def test_constant_features_have_rank_1_with_and_without_noise() -> None:
    constant = torch.ones(100, 16)
    assert effective_rank(constant) == pytest.approx(1, abs=1e-3)
    assert effective_rank(constant + 1e-4 * gaussian(100, 16)) < 1.01
    assert effective_rank(torch.zeros(100, 16)) == pytest.approx(1, abs=1e-3)


def test_isotropic_features_use_nearly_all_dimensions() -> None:
    metrics = measure_collapse(gaussian(20_000, 16))
    assert metrics.effective_rank == pytest.approx(16, rel=0.01)
    assert metrics.feature_std == pytest.approx(1, abs=0.01)
    assert metrics.mean_cosine == pytest.approx(0, abs=0.001)


def test_features_that_are_not_finite_have_no_rank() -> None:
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.nan]])))


def test_constant_features_have_cosine_1_and_no_deviation() -> None:
    constant = gaussian(1, 8).expand(10, 8)
    assert mean_cosine(constant) == pytest.approx(1)
    assert feature_std(constant) == pytest.approx(0, abs=1e-7)


def test_cosine_and_deviation_by_hand() -> None:
    """Two images along one axis and one along the other: cosines 1, 0, 0; both axes have deviation √2 / 3."""
    features = torch.tensor([[2.0, 0.0], [5.0, 0.0], [0.0, 1.0]])
    assert mean_cosine(features) == pytest.approx(1 / 3)
    assert feature_std(features) == pytest.approx(math.sqrt(2) / 3 * math.sqrt(2))


def test_mean_cosine_matches_all_pairs() -> None:
    features = gaussian(9, 5) + 1
    pairs = torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
    assert mean_cosine(features) == pytest.approx(float((pairs.sum() - 9) / 72), abs=1e-6)


def test_output_entropies_by_hand() -> None:
    different = torch.eye(4)
    assert output_entropies(different) == pytest.approx((0, math.log(4)))  # sharp and different: not collapsed
    uniform = torch.full((5, 4), 0.25)
    assert output_entropies(uniform) == pytest.approx((math.log(4), math.log(4)))
    constant = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(5, 4)
    assert output_entropies(constant) == (0, 0)
    mixed = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    marginal = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert output_entropies(mixed) == pytest.approx((math.log(2) / 2, marginal))


def test_all_metrics_of_one_check() -> None:
    metrics = measure_collapse(gaussian(10, 4), torch.eye(10))
    assert metrics.num_outputs == 10
    assert metrics.teacher_entropy == 0
    assert metrics.teacher_marginal_entropy == pytest.approx(math.log(10))
    assert measure_collapse(gaussian(10, 4)).teacher_entropy is None


HEALTHY = CollapseMetrics(
    effective_rank=60.0,
    feature_std=0.9,
    mean_cosine=0.2,
    teacher_entropy=0.4 * math.log(1000),
    teacher_marginal_entropy=0.95 * math.log(1000),
    num_outputs=1000,
)


def history(name: str, *values: float, start: int = 3) -> list[CollapseMetrics]:
    """Healthy checks, then checks in which one metric has these values."""
    changes: list[dict[str, Any]] = [{name: value} for value in values]
    return [HEALTHY] * start + [replace(HEALTHY, **change) for change in changes]


def what(checks: list[CollapseMetrics]) -> str | None:
    collapse = collapse_reason(checks)
    assert collapse is None or collapse.hint
    return None if collapse is None else collapse.what


def test_healthy_features_are_not_reported() -> None:
    for count in (0, 1, 3, 10):
        assert what([HEALTHY] * count) is None
    without_teacher = replace(HEALTHY, teacher_entropy=None, teacher_marginal_entropy=None, num_outputs=None)
    assert what([without_teacher] * 5) is None


def test_a_low_rank_is_reported_after_three_checks() -> None:
    assert what(history("effective_rank", 1.1, 1.1)) is None
    assert what(history("effective_rank", 1.1, 1.1, 1.1)) == "features have collapsed: their effective rank is 1.1"
    assert what(history("effective_rank", 1.1, 1.1, 1.1, start=0)) is not None
    assert what(history("effective_rank", 1.1, 1.1, 20.0)) is None


def test_a_low_rank_that_recovers_is_not_reported() -> None:
    assert what(history("effective_rank", 1.2, 1.8, 2.5)) is None
    assert what(history("effective_rank", 1.001, 1.002, 1.003)) is not None  # noise


def test_a_fall_to_a_small_fraction_of_the_best_rank_is_reported() -> None:
    assert what(history("effective_rank", 5.0, 5.0, 4.5)) == (
        "features are collapsing: their effective rank fell from 60.0 to 4.5"
    )
    assert what(history("effective_rank", 7.0, 7.0, 7.0)) is None
    assert what(history("effective_rank", 4.0, 4.5, 5.0)) is None  # recovers


def test_nearly_equal_features_are_reported() -> None:
    assert "cosine similarity of 0.9995" in str(what(history("mean_cosine", 0.9994, 0.9995, 0.9995)))
    assert what(history("mean_cosine", 0.9999, 0.9995, 0.9991)) is None  # recovers


def test_features_that_are_not_finite_are_reported_at_once() -> None:
    assert what(history("effective_rank", math.nan)) == "features are not finite"


@pytest.mark.parametrize(
    ("entropy", "marginal", "expected"),
    [
        (1.0, 1.0, "uniform for every image"),
        (0.0, 0.0, "the same single dimension for every image"),
        (0.5, 0.5, "its output is the same for every image"),
        (0.5, 0.6, None),
        (0.0, 1.0, None),
    ],
)
def test_collapsed_teachers_are_reported(entropy: float, marginal: float, expected: str | None) -> None:
    unit = math.log(1000)
    check = replace(HEALTHY, teacher_entropy=entropy * unit, teacher_marginal_entropy=marginal * unit)
    reason = what([HEALTHY, check, check, check])
    assert reason is None if expected is None else expected in str(reason)


def test_a_teacher_that_becomes_sharper_is_not_reported() -> None:
    """The output of an untrained teacher is nearly uniform."""
    entropies = [0.998, 0.996, 0.993]
    checks = [replace(HEALTHY, teacher_entropy=entropy * math.log(1000)) for entropy in entropies]
    checks = [replace(check, teacher_marginal_entropy=math.log(1000)) for check in checks]
    assert what(checks) is None


def test_features_of_a_collapsing_encoder_are_reported() -> None:
    """Features shrink to their mean over ten checks."""
    features, checks = gaussian(200, 32), []
    for scale in (1, 0.5, 0.1, 0.03, 0.01, 0.003, 0.001, 0.001, 0.001, 0.001):
        checks.append(measure_collapse(scale * features + torch.ones(32)))
        if collapse_reason(checks) is not None:
            break
    assert 4 <= len(checks) < 10
    assert "collaps" in str(what(checks))


def test_deviation_of_images_by_hand() -> None:
    """Two images that differ by 0.5 in half of their values are 0.25 from their mean there, and 0 elsewhere."""
    images = torch.zeros(2, 3, 4, 4)
    images[1, :, :2] = 0.5
    assert image_deviation(images) == pytest.approx(0.125)
    assert image_deviation(images[1:].expand(5, -1, -1, -1)) == 0


def test_advice_for_equal_images_is_to_look_at_them_first() -> None:
    assert advice_for_similar_images(0.1) is None
    assert advice_for_similar_images(0.0) == "All images are the same: check them first"
    advice = advice_for_similar_images(0.004)
    assert advice is not None
    assert advice.startswith("The images are nearly the same, 0.4% of the pixel range from their mean")


def test_advice_names_what_helps_the_method() -> None:
    collapsed = history("effective_rank", 1.0, 1.0, 1.0)
    general, of_a_method = collapse_reason(collapsed), collapse_reason(collapsed, "raise --dino.momentum")
    assert general is not None
    assert general.hint == "Lower --optim.lr, or lengthen --optim.warmup"
    assert of_a_method is not None
    assert of_a_method.hint == "Lower --optim.lr, lengthen --optim.warmup, or raise --dino.momentum"


def test_advice_for_a_constant_teacher_is_a_slower_one_or_balancing() -> None:
    entropy = math.log(16) / 2
    check = replace(HEALTHY, teacher_entropy=entropy, teacher_marginal_entropy=entropy, num_outputs=16)
    collapse = collapse_reason([check, check, check], "raise --dino.momentum")
    assert collapse is not None
    assert collapse.hint == "Raise --dino.momentum, use --dino.balance sinkhorn, or lower --optim.lr"
