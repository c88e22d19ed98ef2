"""Fused kernels on two ranks, in Triton's interpreter: the weights of one process with the same kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.processes import HANG_SECONDS
from support.rank_jobs import Job, Outcomes, SingleProcess, run_jobs
from support.triton_interpreter import requires_interpreter
from vitral.runs.model_io import load_weights
from vitral.runs.run import Run

pytestmark = [
    requires_interpreter,
    pytest.mark.slow,
    pytest.mark.timeout(2 * HANG_SECONDS),
    pytest.mark.usefixtures("outcomes"),
]
SIZE = {"epochs": 1, "batch_size": 8}  # 3 steps
KINDS: dict[str, dict[str, Any]] = {  # overrides by the name of a run
    "default": {},  # AdamW, clipping, EMA
    "muon-uneven": {"optim.name": "muon", "batch_size": 9},  # 4 and 5 images
    "frozen": {"tune": "last-1"},
    "accumulated": {"grad_accum": 2},
}
DDP, FSDP = {"parallel": "ddp"}, {"parallel": "fsdp"}
FP8: dict[str, Any] = {
    "kernels": "fp8",
    "num_images": 64,
}  # 80 tokens per rank: FP8 weight gradients need a multiple of 16
JOBS: list[Job] = [
    *(
        {"name": f"{name}-{mode}", "overrides": {**overrides, "parallel": mode}}
        for name, overrides in KINDS.items()
        for mode in ("ddp", "fsdp")
    ),
    {"name": "fp8-ddp", "overrides": DDP | {"batch_size": 32}, **FP8},
    {"name": "fp8-fsdp", "overrides": FSDP | {"batch_size": 32}, **FP8},
    {"name": "bf16-reduction-ddp", "overrides": DDP | {"reduce_dtype": "bf16"}},
    {"name": "bf16-reduction-fsdp", "overrides": FSDP | {"reduce_dtype": "bf16"}},
    {"name": "stopped-fsdp", "overrides": FSDP, "stop_at": 1},
    {"name": "resumed-fsdp", "overrides": FSDP, "resume_from": "stopped-fsdp"},
    {"name": "resumed-ddp", "overrides": DDP, "resume_from": "stopped-fsdp"},
]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    jobs = [{"kernels": "bf16", "num_images": 24, **job, "overrides": SIZE | job["overrides"]} for job in JOBS]
    return run_jobs(jobs, folder)


def reference_weights(
    single_process: SingleProcess, name: str, kernels: str = "bf16", num_images: int = 24, **overrides: Any
) -> dict[str, Tensor]:
    """The final weights of one process with the same kernels."""
    run = single_process.train(name, SIZE | overrides, kernels=kernels, num_images=num_images)
    assert "forward" in single_process.outcomes[name]["overrides"]
    return final_weights(run.path)


def final_weights(run: Path) -> dict[str, Tensor]:
    return load_weights(Run(run).checkpoint_dir / "best.safetensors")


def relative_difference(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert weights.keys() == reference.keys()
    difference = sum(float((weights[name] - tensor).square().sum()) for name, tensor in reference.items())
    return float((difference / sum(float(tensor.square().sum()) for tensor in reference.values())) ** 0.5)


def test_every_job_ran_with_the_fused_forward_pass_on_both_ranks(outcomes: Outcomes) -> None:
    for name, ranks in outcomes.items():
        for outcome in ranks:
            assert name.startswith("stopped") or outcome["error"] is None, (name, outcome["error"])
            assert "forward" in outcome["overrides"], name


def test_ddp_is_bit_for_bit_one_process_that_accumulates_the_same_halves(
    folder: Path, single_process: SingleProcess
) -> None:
    weights = final_weights(folder / "default-ddp")
    reference = reference_weights(single_process, "halves", grad_accum=2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_weights_of_one_process(
    folder: Path, single_process: SingleProcess, name: str, mode: str
) -> None:
    """Up to rounding of bf16 GEMMs, which depends on the number of rows; steps are about 1e-2 long."""
    reference = reference_weights(single_process, name, **KINDS[name])
    assert relative_difference(final_weights(folder / f"{name}-{mode}"), reference) < 2e-3


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_fp8_on_two_ranks_has_the_scales_of_one_process(folder: Path, single_process: SingleProcess, mode: str) -> None:
    reference = reference_weights(single_process, "fp8", **FP8, grad_accum=2, batch_size=32)
    assert relative_difference(final_weights(folder / f"fp8-{mode}"), reference) < (1e-6 if mode == "ddp" else 5e-3)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_reduction_in_bf16_rounds_gradients_only(folder: Path, single_process: SingleProcess, mode: str) -> None:
    reference = reference_weights(single_process, "halves", grad_accum=2)
    difference = relative_difference(final_weights(folder / f"bf16-reduction-{mode}"), reference)
    assert 0 < difference < 1e-2


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_resumed_run_has_the_weights_of_an_uninterrupted_one(folder: Path, mode: str) -> None:
    resumed, uninterrupted = (final_weights(folder / f"{name}-{mode}") for name in ("resumed", "default"))
    assert relative_difference(resumed, uninterrupted) < (1e-9 if mode == "fsdp" else 1e-5)
