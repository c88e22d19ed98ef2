"""Distillation on two ranks: the losses of one process, and exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.common import identical
from support.processes import HANG_SECONDS
from support.rank_jobs import Job, Outcomes, SingleProcess, assert_same_training, errors, run_jobs
from support.training import final_weights, metrics_without_timing
from vitral.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_SECONDS)]
FEATURES: dict[str, Any] = {"pretrain.method": "distill", "pretrain.views.global_views": 1, "optim.lr": 1e-2}
CENTRAL = {**FEATURES, "pretrain.distill.augment": False}
KINDS: dict[str, dict[str, Any]] = {  # overrides by the name of a run
    "features": FEATURES,
    "uneven": {**FEATURES, "batch_size": 9},
    "cached": CENTRAL,
    "soft": {"distill.teacher": "tiny", "distill.kind": "soft"},
    "token": {"distill.teacher": "tiny", "distill.kind": "hard", "variant": "distilled"},
}
JOBS: list[Job] = [
    *(
        {"name": f"{name}-{mode}", "overrides": {**overrides, "parallel": mode}}
        for name, overrides in KINDS.items()
        for mode in ("ddp", "fsdp")
    ),
    {"name": "stopped", "overrides": {**CENTRAL, "parallel": "ddp"}, "stop_at": 4},
    {"name": "resumed", "overrides": {**CENTRAL, "parallel": "ddp"}, "resume_from": "stopped"},
]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VITRAL_HOME", str(folder / "cache"))
        return run_jobs(JOBS, folder)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_losses_of_one_process(
    folder: Path, outcomes: Outcomes, single_process: SingleProcess, name: str, mode: str
) -> None:
    assert errors(outcomes, f"{name}-{mode}") == [None, None]
    assert_same_training(Run(folder / f"{name}-{mode}"), single_process.train(name, KINDS[name]))


def test_resume_on_two_ranks_is_bit_exact(folder: Path, outcomes: Outcomes) -> None:
    assert "after step 5 of 9" in errors(outcomes, "stopped")[0][0]
    assert errors(outcomes, "resumed") == [None, None]
    run, reference = Run(folder / "resumed"), Run(folder / "cached-ddp")
    assert identical(final_weights(run), final_weights(reference))
    assert metrics_without_timing(run) == metrics_without_timing(reference)
