"""Distillation on two ranks: the losses of one process, and exact resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.distributed_jobs import train
from support.processes import HANG_SECONDS, run_ranks
from support.training import final_weights, metrics_without_timing
from vitral.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_SECONDS)]
SCRIPT = Path(__file__).parents[1] / "support" / "distributed_jobs.py"
FEATURES: dict[str, Any] = {"pretrain.method": "distill", "pretrain.views.global_views": 1, "optim.lr": 1e-2}
CENTRAL = {**FEATURES, "pretrain.distill.augment": False}
KINDS: dict[str, dict[str, Any]] = {  # overrides by the name of a run
    "features": FEATURES,
    "uneven": {**FEATURES, "batch_size": 9},
    "cached": CENTRAL,
    "soft": {"distill.teacher": "tiny", "distill.kind": "soft"},
    "token": {"distill.teacher": "tiny", "distill.kind": "hard", "variant": "distilled"},
}
JOBS: list[dict[str, Any]] = [
    *(
        {"name": f"{name}-{mode}", "overrides": {**overrides, "parallel": mode}}
        for name, overrides in KINDS.items()
        for mode in ("ddp", "fsdp")
    ),
    {"name": "stopped", "overrides": {**CENTRAL, "parallel": "ddp"}, "stop_at": 4},
    {"name": "resumed", "overrides": {**CENTRAL, "parallel": "ddp"}, "resume_from": "stopped"},
]
TrainSingle = Callable[[str], Run]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of the run folders of all jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.json").write_text(json.dumps(JOBS))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VITRAL_HOME", str(folder / "cache"))
        run_ranks(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Any]]:
    """The errors of both ranks, by the name of the job."""
    by_rank = [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in (0, 1)]
    return {str(job["name"]): [rank[i]["error"] for rank in by_rank] for i, job in enumerate(JOBS)}


@pytest.fixture(scope="module")
def train_single(tmp_path_factory: pytest.TempPathFactory) -> TrainSingle:
    """Train one of `KINDS` in this process; each is trained once."""
    parent = tmp_path_factory.mktemp("single")

    def run(name: str) -> Run:
        if not (parent / name).exists():
            assert train(parent, name, KINDS[name])["error"] is None
        return Run(parent / name)

    return run


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_losses_of_one_process(
    folder: Path, outcomes: dict[str, list[Any]], train_single: TrainSingle, name: str, mode: str
) -> None:
    assert outcomes[f"{name}-{mode}"] == [None, None]
    run, reference = Run(folder / f"{name}-{mode}"), train_single(name)
    rows, expected = metrics_without_timing(run), metrics_without_timing(reference)
    assert len(rows) == 3
    assert all(row == pytest.approx(other, rel=1e-3) for row, other in zip(rows, expected, strict=True))
    for key, tensor in final_weights(reference).items():
        if tensor.ndim == 2:  # AdamW amplifies rounding in biases whose gradient is zero
            torch.testing.assert_close(final_weights(run)[key], tensor, rtol=1e-2, atol=5e-3)


def test_resume_on_two_ranks_is_bit_exact(folder: Path, outcomes: dict[str, list[Any]]) -> None:
    assert "after step 5 of 9" in outcomes["stopped"][0][0]
    assert outcomes["resumed"] == [None, None]
    run, reference = Run(folder / "resumed"), Run(folder / "cached-ddp")
    assert identical(final_weights(run), final_weights(reference))
    assert metrics_without_timing(run) == metrics_without_timing(reference)
