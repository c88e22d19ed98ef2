"""LeJEPA's loss against lightly's, and the Epps-Pulley statistic against loops and known expectations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from support.lightly_losses import SIGReg, lejepa_invariance_loss
from support.pretraining import TINY, draw_batch, random_images, tiny_method
from vitral.distributed.world import SINGLE_PROCESS
from vitral.ssl.lejepa import MAX_FREQUENCY, NUM_POINTS, LeJEPA, LeJEPAConfig, sigreg

POINTS = torch.linspace(0, MAX_FREQUENCY, NUM_POINTS)
NORMAL = torch.exp(-POINTS.square() / 2)
EXPECTED = math.sqrt(2 * math.pi) - math.sqrt(2 * math.pi / 3)  # of standard normal samples: 1.059


def statistic(embeddings_BVK: Tensor, num_directions: int = 64, seed: int = 0) -> float:
    directions = torch.randn(embeddings_BVK.shape[2], num_directions, generator=Generator().manual_seed(seed))
    return float(sigreg(embeddings_BVK, F.normalize(directions, dim=0), POINTS, NORMAL, SINGLE_PROCESS))


def normal_samples(B: int, V: int = 1, K: int = 8, seed: int = 3) -> Tensor:
    return torch.randn(B, V, K, generator=Generator().manual_seed(seed))


def test_sigreg_equals_a_double_loop() -> None:
    rng = np.random.default_rng(0)
    embeddings, directions = rng.normal(size=(5, 2, 3)), rng.normal(size=(3, 4))
    directions /= np.linalg.norm(directions, axis=0)
    t = np.linspace(-MAX_FREQUENCY, MAX_FREQUENCY, 2 * NUM_POINTS - 1)
    values = []
    for view in range(2):
        for direction in range(4):
            phi = sum(np.exp(1j * t * (embeddings[b, view] @ directions[:, direction])) for b in range(5)) / 5
            weighted = np.abs(phi - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)
            values.append(5 * np.trapezoid(weighted, t))
    tensors = torch.tensor(embeddings).float(), torch.tensor(directions).float()
    assert float(sigreg(*tensors, POINTS, NORMAL, SINGLE_PROCESS)) == pytest.approx(np.mean(values), rel=1e-5)


def test_sigreg_equals_that_of_lightly() -> None:
    embeddings, reference = normal_samples(12, V=3), SIGReg(knots=NUM_POINTS, t_max=MAX_FREQUENCY, num_vectors=16)
    torch.manual_seed(4)
    expected = reference(embeddings.transpose(0, 1))
    torch.manual_seed(4)  # lightly draws its directions itself
    actual = sigreg(embeddings, F.normalize(torch.randn(8, 16), dim=0), POINTS, NORMAL, SINGLE_PROCESS)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("B", [64, 1024])
def test_standard_normal_embeddings_have_the_expected_statistic_whatever_the_batch_size(B: int) -> None:
    assert statistic(normal_samples(B, V=128, K=2), num_directions=4) == pytest.approx(EXPECTED, rel=0.1)


@pytest.mark.parametrize(
    "distort",
    [
        lambda z: torch.zeros_like(z),
        lambda z: z[:1].expand_as(z),
        lambda z: 3 * z,
        lambda z: z / 3,
        lambda z: z + 1,
        lambda z: z[:, :, :1].expand_as(z),  # all dimensions equal
        lambda z: torch.sign(z) * torch.eye(8)[0],
    ],
    ids=["collapsed to zero", "collapsed", "too large", "too small", "shifted", "one-dimensional", "two points"],
)
def test_embeddings_that_are_not_isotropic_gaussian_have_a_large_statistic(distort: Any) -> None:
    assert statistic(distort(normal_samples(1024))) > 10 * EXPECTED


def test_uniform_embeddings_have_a_larger_statistic_than_normal_ones() -> None:
    uniform = (torch.rand(4096, 1, 2, generator=Generator().manual_seed(5)) - 0.5) * math.sqrt(12)
    assert statistic(uniform) > 3 * EXPECTED


def test_the_statistic_is_least_at_unit_scale() -> None:
    scales = torch.tensor([0.5, 0.8, 1.0, 1.25, 2.0])
    values = [statistic(scale * normal_samples(2048)) for scale in scales]
    assert np.argmin(values) == 2


@pytest.mark.parametrize("local_views", [0, 2])
def test_the_loss_is_the_weighted_sum_of_lightlys_terms(local_views: int) -> None:
    method = tiny_method("lejepa", options={"weight": 0.3})
    method.views = replace(TINY.views, local_views=local_views)
    assert isinstance(method, LeJEPA)
    batch = draw_batch(method, random_images())
    loss, score = method(*batch)
    embeddings_VBK = torch.cat([method.embed(views) for views in batch if views.shape[1]], dim=1).transpose(0, 1)
    invariance = lejepa_invariance_loss(all_proj=embeddings_VBK, global_proj=embeddings_VBK[:2])
    gaussianity = sigreg(
        embeddings_VBK.transpose(0, 1), F.normalize(method.directions_KM, dim=0), POINTS, NORMAL, SINGLE_PROCESS
    )
    torch.testing.assert_close(loss / 6, 0.7 * invariance + 0.3 * gaussianity)
    torch.testing.assert_close(score / 6, invariance.detach())
    assert not score.requires_grad


def test_directions_are_drawn_anew_for_every_batch_from_the_generator() -> None:
    method, rng = tiny_method("lejepa"), Generator().manual_seed(0)
    assert isinstance(method, LeJEPA)
    method.make_batch(random_images(), rng)
    first = method.directions_KM.clone()
    method.make_batch(random_images(), rng)
    assert not torch.equal(method.directions_KM, first)
    method.make_batch(random_images(), rng.manual_seed(0))
    assert torch.equal(method.directions_KM, first)


def test_the_loss_is_computed_in_fp32_under_autocast() -> None:
    embeddings = normal_samples(256, V=2)
    expected = statistic(embeddings)
    with torch.autocast("cpu", torch.bfloat16):
        assert statistic(embeddings) == expected


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 0.0), ("weight", 1.0), ("directions", 0), ("hidden_width", 0), ("width", 0)]
)
def test_invalid_options_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^lejepa\.{name} must be .*, got {value}$"):
        LeJEPAConfig(**{name: value})
