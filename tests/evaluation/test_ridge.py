"""Ridge regression: the solution of the normal equations, and exact leave-one-out predictions."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import Ridge

from vitral.evaluation.ridge import PENALTIES, fit_ridge


def noisy_linear_data(N: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(N + D)
    features = 3 + 2 * torch.randn(N, D, generator=rng)
    targets = features[:, :2] @ torch.tensor([[1.0, 0.0, 2.0], [0.0, -1.0, 1.0]])
    return features, targets + 0.5 * torch.randn(N, 3, generator=rng)


@pytest.mark.parametrize("shape", [(40, 6), (12, 30)], ids=["more images than features", "fewer images than features"])
def test_left_out_predictions_are_those_of_fits_without_the_image(shape: tuple[int, int]) -> None:
    features, targets = noisy_linear_data(*shape)
    fit = fit_ridge(features, targets)
    scale = (features.double() - features.double().mean(dim=0)).square().mean().sqrt()
    reference = Ridge(alpha=fit.penalty * scale.item() ** 2)  # the penalty is that of scaled features
    predicted = reference.fit(features.double(), targets.double()).predict(features.double())
    assert torch.allclose(features.double() @ fit.weight_KD.T + fit.bias_K, torch.as_tensor(predicted), atol=1e-6)
    for index in range(0, len(features), 5):
        others = torch.arange(len(features)) != index
        reference.fit(features[others].double(), targets[others].double())
        left_out = torch.as_tensor(reference.predict(features[index : index + 1].double()))[0]
        assert torch.allclose(fit.left_out_NK[index], left_out, atol=1e-6)


def test_the_penalty_has_the_smallest_left_out_error() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(60, 40, generator=rng)
    noise, signal = torch.randn(60, 1, generator=rng), features[:, :1]
    assert fit_ridge(features, noise).penalty == PENALTIES[-1]  # nothing to learn: as little as possible is fitted
    assert fit_ridge(features, signal).penalty == PENALTIES[0]


def test_features_without_variance_predict_the_mean() -> None:
    targets = torch.tensor([[1.0], [2.0], [6.0]])
    fit = fit_ridge(torch.ones(3, 4), targets)
    assert not fit.weight_KD.any()
    assert fit.bias_K.tolist() == [3.0]
    assert torch.allclose(fit.left_out_NK.flatten(), torch.tensor([4.0, 3.5, 1.5]).double())
