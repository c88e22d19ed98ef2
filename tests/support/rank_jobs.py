"""Run the trainings of distributed_jobs.py on two ranks, and in one process as their reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.distributed_jobs import train
from support.processes import run_ranks
from support.training import final_weights, metrics_without_timing
from vitral.runs.run import Run

SCRIPT = Path(__file__).with_name("distributed_jobs.py")
Job = dict[str, Any]
Outcomes = dict[str, list[dict[str, Any]]]


def run_jobs(jobs: Sequence[Job], folder: Path) -> Outcomes:
    """Train on two ranks, in run folders under `folder`; returns the outcomes of both ranks by the name of the job."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(SCRIPT, folder)
    by_rank = [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in (0, 1)]
    return {job["name"]: [rank_outcomes[i] for rank_outcomes in by_rank] for i, job in enumerate(jobs)}


def errors(outcomes: Outcomes, name: str) -> list[Any]:
    return [outcome["error"] for outcome in outcomes[name]]


class SingleProcess:
    """Trains in this process; each name is trained once."""

    def __init__(self, parent: Path) -> None:
        self.parent, self.outcomes = parent, dict[str, dict[str, Any]]()

    def train(self, name: str, overrides: dict[str, Any], **options: Any) -> Run:
        if name not in self.outcomes:
            self.outcomes[name] = train(self.parent, name, overrides, **options)
            assert self.outcomes[name]["error"] is None
        return Run(self.parent / name)


def assert_same_training(run: Run, reference: Run) -> None:
    """Metrics of three epochs and final weights are the same up to rounding."""
    rows, expected = metrics_without_timing(run), metrics_without_timing(reference)
    assert len(rows) == 3
    assert all(row == pytest.approx(other, rel=1e-3) for row, other in zip(rows, expected, strict=True))
    weights = final_weights(run)
    for name, tensor in final_weights(reference).items():
        if tensor.ndim == 2:  # AdamW amplifies rounding in biases whose gradient is zero, and Muon computes in bf16
            torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=5e-3)
