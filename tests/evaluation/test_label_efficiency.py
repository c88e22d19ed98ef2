"""The verdict of a comparison of initial weights: it says what the intervals say, and nothing more."""

from __future__ import annotations

import json

import pytest

from support.label_efficiency import HELPED, NEIGHBOURS, ONE_SEED, UNCLEAR, WORSE, correct, make_result, make_test_row
from vitral.evaluation.label_efficiency import labels_text, make_row, points, summarise

SUBJECT = "Pretraining on your 20,000 images"


def test_it_helped() -> None:
    assert HELPED.outcome == "better"
    summary = summarise([HELPED], SUBJECT, 50_000)
    low, high = HELPED.difference.low, HELPED.difference.high
    assert low is not None
    assert high is not None
    assert summary == (
        "Pretraining on your 20,000 images raised accuracy with 1% of the labels from 41.0% to 63.0% "
        f"(95% CI of the difference: +{100 * low:.1f} to +{100 * high:.1f} points)."
    )
    assert 0 < low < 0.22 < high


def test_it_did_not_help() -> None:
    summary = summarise([UNCLEAR], SUBJECT, 50_000)
    assert UNCLEAR.outcome == "unclear"
    assert summary.startswith(
        "Pretraining on your 20,000 images did not measurably help: accuracy with 10% of the labels went from 71.0% "
        "to 71.3% (95% CI of the difference: -"
    )
    assert summary.endswith("points, which includes zero).")


def test_it_made_it_worse() -> None:
    summary = summarise([WORSE], SUBJECT, 50_000)
    assert WORSE.outcome == "worse"
    assert "lowered accuracy with all labels from 95.1% to 90.1% (95% CI of the difference: -" in summary
    assert "raised" not in summary


def test_a_large_gain_that_is_not_certain_is_not_called_help() -> None:
    uncertain = make_test_row(0.01, (400, 500, 300), (600, 350, 700))
    assert uncertain.difference.value > 0.1
    assert "did not measurably help" in summarise([uncertain], SUBJECT, 50_000)


def test_the_sentence_is_about_the_fewest_labels_and_mentions_other_outcomes() -> None:
    summary = summarise([WORSE, UNCLEAR, HELPED], SUBJECT, 50_000)
    first, second = summary.split(". ", maxsplit=1)
    assert "raised accuracy with 1% of the labels" in first
    assert "With 10% of the labels it did not measurably change accuracy: 71.0% to 71.3%" in second
    assert "with all labels it lowered accuracy: 95.1% to 90.1%" in second
    assert summarise([HELPED, make_test_row(1.0, (900, 901, 902), (950, 951, 952))], SUBJECT, 50_000).count(". ") == 0


def test_one_seed_gives_no_verdict() -> None:
    assert ONE_SEED.outcome == "unknown"
    summary = summarise([ONE_SEED], SUBJECT, 50_000)
    assert "cannot be judged from one seed" in summary
    assert "raised" not in summary


def test_without_fine_tuning_the_linear_classifier_decides() -> None:
    assert NEIGHBOURS.outcome == "better"
    linear = make_test_row(0.01, (400, 410, 420), (400, 411, 420), "linear")
    assert "did not measurably help" in summarise([NEIGHBOURS, linear], SUBJECT, 50_000)


def test_a_fraction_that_every_class_exceeds_is_named_by_its_images() -> None:
    exceeded = make_row("fine-tuning", 0.01, 10, correct(1, 2), correct(2, 3))
    assert labels_text(exceeded, 100) == "10 labels (10% of all)"
    assert labels_text(exceeded, 1000) == "1% of the labels"
    assert labels_text(WORSE, 50_000) == "all labels"


@pytest.mark.parametrize(("value", "text"), [(0.123, "+12.3"), (-0.0301, "-3.0"), (0.0, "0.0"), (-0.0001, "0.0")])
def test_differences_are_in_points_with_a_sign(value: float, text: str) -> None:
    assert points(value) == text


def test_a_result_can_be_written_as_json() -> None:
    values = json.loads(json.dumps(make_result(HELPED, ONE_SEED).as_dict()))
    assert values["rows"][0]["outcome"] == "better"
    assert values["rows"][0]["before_accuracies"] == [0.4, 0.41, 0.42]
    assert values["rows"][0]["difference"]["value"] == pytest.approx(0.22)
    assert "low" not in values["rows"][1]["difference"]  # one seed: unknown
