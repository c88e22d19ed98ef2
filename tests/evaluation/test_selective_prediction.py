"""Risk-coverage curve and confidence thresholds against hand computation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.logits import calibrated_logits
from vitral.errors import VitralError
from vitral.evaluation.selective_prediction import evaluate_threshold, find_threshold, risk_coverage


def aurc_by_definition(confidence: list[float], correct: list[int]) -> float:
    order = sorted(range(len(correct)), key=lambda i: -confidence[i])
    risks = [sum(1 - correct[j] for j in order[: i + 1]) / (i + 1) for i in range(len(order))]
    return sum(risks) / len(risks)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 1)), min_size=1, max_size=60, unique_by=lambda x: x[0]))
def test_aurc_agrees_with_its_definition(rows: list[tuple[int, int]]) -> None:
    confidence, correct = [float(c) for c, _ in rows], [r for _, r in rows]
    result = risk_coverage(torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct))
    assert result.aurc == pytest.approx(aurc_by_definition(confidence, correct))
    assert result.optimal_aurc <= result.aurc + 1e-12
    assert result.coverage[-1] == 1
    assert result.risk[-1] == pytest.approx(1 - sum(correct) / len(correct))


def test_the_order_of_equal_confidences_does_not_matter() -> None:
    confidence = torch.full((10,), 0.5, dtype=torch.float64)
    correct = torch.tensor([1] * 7 + [0] * 3)
    assert risk_coverage(confidence, correct).aurc == pytest.approx(0.3)
    assert risk_coverage(confidence, correct.flip(0)).aurc == pytest.approx(0.3)


def test_the_threshold_is_the_lowest_that_meets_the_error_rate() -> None:
    logits, labels = calibrated_logits(3000, 5, seed=4)
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    correct = predicted == labels
    threshold = find_threshold(confidence, correct, 0.05)
    assert threshold is not None
    assert (~correct[confidence >= threshold]).float().mean() <= 0.05
    next_lower = confidence[confidence < threshold].max()
    assert (~correct[confidence >= next_lower]).float().mean() > 0.05


def test_the_threshold_holds_on_new_images() -> None:
    (confidence, correct), (new_confidence, new_correct) = (
        (p.amax(dim=1), p.argmax(dim=1) == labels)
        for p, labels in ((x.softmax(dim=1), y) for x, y in (calibrated_logits(3000, 5, seed) for seed in (4, 5)))
    )
    result = evaluate_threshold(0.05, (confidence, correct), (new_confidence, new_correct))
    assert result.error_rate is not None
    assert result.coverage is not None
    assert result.confidence is not None
    assert result.error_rate.low < 0.05 < result.error_rate.high + 0.02
    assert result.coverage.value == pytest.approx((new_confidence >= result.confidence).double().mean().item())


def test_an_unreachable_error_rate_has_no_threshold() -> None:
    wrong = torch.zeros(20, dtype=torch.bool)
    confidence = torch.linspace(0.5, 1, 20, dtype=torch.float64)
    result = evaluate_threshold(0.01, (confidence, wrong), (confidence, wrong))
    assert (result.confidence, result.coverage, result.error_rate) == (None, None, None)


def test_an_error_rate_outside_0_and_1_is_refused() -> None:
    with pytest.raises(VitralError, match=r"between 0 and 1, got 2\.0"):
        find_threshold(torch.ones(3), torch.ones(3, dtype=torch.bool), 2.0)
