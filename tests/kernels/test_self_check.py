"""Comparison of kernels with their reference."""

from __future__ import annotations

import torch

from vitral.kernels.self_check import max_relative_error, self_check_failure


def test_max_relative_error_is_infinite_for_values_that_are_not_finite_and_for_zero_references() -> None:
    ones, with_nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert max_relative_error([ones, ones], [ones, ones]) == 0
    assert max_relative_error([ones, with_nan], [ones, ones]) == float("inf")
    assert max_relative_error([ones, ones], [ones, torch.zeros(3)]) == float("inf")


def test_self_check_failure_reports_large_errors_and_exceptions() -> None:
    def fails() -> float:
        raise RuntimeError("out of shared memory\nand a traceback")

    assert self_check_failure(lambda: 0.1, 0.2) is None
    assert "30%" in str(self_check_failure(lambda: 0.3, 0.2))
    assert str(self_check_failure(fails, 0.2)).endswith("out of shared memory")
