"""Pretraining on two ranks: the losses of one process, checkpoints that move between DDP, FSDP and one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.distributed_jobs import train
from support.pretrain_runs import CENTER, METHODS
from support.processes import HANG_SECONDS, run_ranks
from support.training import final_weights
from vitral.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_SECONDS)]
SCRIPT = Path(__file__).parents[1] / "support" / "distributed_jobs.py"
UNEVEN = {"batch_size": 9, "optim.name": "muon"}  # 4 and 5 images
KINDS: dict[str, dict[str, Any]] = {  # overrides by the name of a run
    **{method: {"pretrain.method": method} for method in METHODS},
    "center": CENTER,
    **{f"{method}-uneven": {"pretrain.method": method, **UNEVEN} for method in METHODS},
}
JOBS: list[dict[str, Any]] = [
    *(
        {"name": f"{name}-{mode}", "overrides": {**overrides, "parallel": mode}}
        for name, overrides in KINDS.items()
        for mode in ("ddp", "fsdp")
    ),
    {"name": "center-ddp-stopped", "overrides": {**CENTER, "parallel": "ddp"}, "stop_at": 4},
    {"name": "center-fsdp-stopped", "overrides": {**CENTER, "parallel": "fsdp"}, "stop_at": 4},
    {"name": "center-ddp-resumed", "overrides": {**CENTER, "parallel": "ddp"}, "resume_from": "center-ddp-stopped"},
    {"name": "center-fsdp-resumed", "overrides": {**CENTER, "parallel": "fsdp"}, "resume_from": "center-fsdp-stopped"},
    {"name": "fsdp-then-ddp", "overrides": {**CENTER, "parallel": "ddp"}, "resume_from": "center-fsdp-stopped"},
    {"name": "ddp-then-single", "overrides": CENTER, "resume_from": "center-ddp-stopped", "single": True},
]
TrainSingle = Callable[[str], Run]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of the run folders of all jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.json").write_text(json.dumps(JOBS))
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
            train(parent, name, KINDS[name])
        return Run(parent / name)

    return run


def metric_rows(run: Run) -> list[dict[str, float]]:
    timing = ("seconds", "training_seconds", "images_per_second")
    return [{name: value for name, value in row.items() if name not in timing} for row in run.load_metrics()]


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_losses_of_one_process(
    folder: Path, outcomes: dict[str, list[Any]], train_single: TrainSingle, name: str, mode: str
) -> None:
    assert outcomes[f"{name}-{mode}"] == [None, None]
    run, reference = Run(folder / f"{name}-{mode}"), train_single(name)
    rows, expected = metric_rows(run), metric_rows(reference)
    assert len(rows) == 3
    assert all(row == pytest.approx(other, rel=1e-3) for row, other in zip(rows, expected, strict=True))
    for key, tensor in final_weights(reference).items():
        if tensor.ndim == 2:  # AdamW amplifies rounding in biases whose gradient is zero, and Muon computes in bf16
            torch.testing.assert_close(final_weights(run)[key], tensor, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_resume_on_two_ranks_is_bit_exact(folder: Path, outcomes: dict[str, list[Any]], mode: str) -> None:
    assert "after step 5 of 9" in outcomes[f"center-{mode}-stopped"][0][0]
    assert outcomes[f"center-{mode}-resumed"] == [None, None]
    run, reference = Run(folder / f"center-{mode}-resumed"), Run(folder / f"center-{mode}")
    assert identical(final_weights(run), final_weights(reference))
    assert metric_rows(run) == metric_rows(reference)


@pytest.mark.parametrize("name", ["fsdp-then-ddp", "ddp-then-single"])
def test_checkpoints_move_between_kinds_of_parallelism(
    folder: Path, outcomes: dict[str, list[Any]], train_single: TrainSingle, name: str
) -> None:
    assert outcomes[name] == [None, None]
    rows, expected = metric_rows(Run(folder / name)), metric_rows(train_single("center"))
    assert all(row == pytest.approx(other, rel=1e-3) for row, other in zip(rows, expected, strict=True))
