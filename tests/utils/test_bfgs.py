"""BFGS against torch.optim.LBFGS and known minima."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.utils.bfgs import minimize


def test_the_minimum_of_a_quadratic_function_is_exact() -> None:
    rng = torch.Generator().manual_seed(0)
    root = torch.randn(20, 20, generator=rng, dtype=torch.float64)
    matrix, target = root @ root.T + torch.eye(20), torch.randn(20, generator=rng, dtype=torch.float64)
    minimum = minimize(lambda x: 0.5 * (x - target) @ matrix @ (x - target) + 3, torch.zeros(20, dtype=torch.float64))
    assert torch.allclose(minimum, target, atol=1e-7)


def test_rosenbrocks_valley_is_followed_to_its_end() -> None:
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    minimum = minimize(lambda x: 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2, start)
    assert torch.allclose(minimum, torch.ones(2, dtype=torch.float64), atol=1e-6)


def test_logistic_regression_agrees_with_torch() -> None:
    rng = torch.Generator().manual_seed(1)
    features = torch.randn(100, 8, generator=rng, dtype=torch.float64)
    labels = (features[:, :3] + torch.randn(100, 3, generator=rng, dtype=torch.float64)).argmax(dim=1)

    def loss(weights: Tensor) -> Tensor:
        return F.cross_entropy(features @ weights.view(8, 3), labels) + 1e-3 * weights.square().sum()

    expected = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [expected], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(expected)
        value.backward()
        return value

    optimizer.step(closure)
    assert torch.allclose(minimize(loss, torch.zeros(24, dtype=torch.float64)), expected, atol=1e-6)


def test_a_function_that_is_not_finite_everywhere_stays_finite() -> None:
    minimum = minimize(lambda x: x[0] - x[0].log(), torch.tensor([0.1], dtype=torch.float64))
    assert torch.allclose(minimum, torch.ones(1, dtype=torch.float64), atol=1e-6)
    start = torch.tensor([float("nan")], dtype=torch.float64)
    assert minimize(lambda x: x[0], start).isnan().all()
