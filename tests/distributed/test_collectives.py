"""Gathers of shards and reductions of gradients on three ranks, of sizes that they do not divide."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import HANG_SECONDS, run_ranks

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.timeout(2 * HANG_SECONDS)


@pytest.mark.slow
def test_gathered_tensors_and_averaged_gradients_are_complete() -> None:
    run_ranks(SUPPORT / "collective_checks.py", world_size=3)


@pytest.mark.slow
def test_gathered_weights_of_the_fused_encoder_are_those_of_an_unsharded_one() -> None:
    pytest.importorskip("triton")
    run_ranks(SUPPORT / "sharded_weights_checks.py", world_size=3)


@pytest.mark.slow
def test_ranks_agree_if_a_kernel_or_the_capture_of_a_collective_fails_on_one_of_them() -> None:
    pytest.importorskip("triton")
    run_ranks(SUPPORT / "agreement_checks.py")
