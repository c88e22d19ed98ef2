from __future__ import annotations

import torch

from vitral.evaluation.feature_classifiers import fit_linear_head, fit_logistic_regression, standardise


def test_the_head_on_raw_features_equals_a_regression_on_standardised_ones() -> None:
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    features = 5 + 0.1 * torch.randn(60, 6) * torch.tensor([1.0, 10, 0.1, 1, 0, 1]) + 0.1 * labels[:, None]
    weight, bias = fit_linear_head((features, labels), 3)
    logits = features @ weight.T + bias
    (x,) = standardise(features)
    fits = [fit_logistic_regression(x, labels, 3, 10 ** (half / 2)) for half in range(-8, 3)]
    assert any(torch.allclose(x @ fit[:-1] + fit[-1], logits, atol=1e-3) for fit in fits)
