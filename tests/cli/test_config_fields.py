"""Comments of dataclass fields, read from the source."""

from __future__ import annotations

from vitral.cli.config_fields import field_comments


def test_comments_of_a_dataclass_without_those_of_its_base():
    comments = field_comments("vitral.evaluation.report", "EvaluationReport")
    assert comments["uncalibrated"] == "softmax(logits)"
    assert comments["headline"] == ""
    assert "top1_low" not in comments  # a field of Metrics


def test_comments_of_a_named_tuple():
    assert field_comments("vitral.api.pretraining", "PretrainResult")["run"] == "the run folder"
