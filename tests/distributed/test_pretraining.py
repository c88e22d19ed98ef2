"""Pretraining on two ranks: the losses of one process, checkpoints that move between DDP, FSDP and one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.pretrain_runs import CENTER, METHODS
from support.processes import HANG_SECONDS
from support.rank_jobs import Job, Outcomes, SingleProcess, assert_same_training, errors, run_jobs
from support.training import final_weights, metrics_without_timing
from vitral import weights
from vitral.recipes.schema import read_recipe
from vitral.runs.run import Run
from vitral.training.pretraining.continuation import read_continued_method

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_SECONDS)]
UNEVEN = {"batch_size": 9, "optim.name": "muon"}  # 4 and 5 images
KINDS: dict[str, dict[str, Any]] = {  # overrides by the name of a run
    **{method: {"pretrain.method": method} for method in METHODS},
    "center": CENTER,
    **{f"{method}-uneven": {"pretrain.method": method, **UNEVEN} for method in METHODS},
}
JOBS: list[Job] = [
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


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return run_jobs(JOBS, folder)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_the_losses_of_one_process(
    folder: Path, outcomes: Outcomes, single_process: SingleProcess, name: str, mode: str
) -> None:
    assert errors(outcomes, f"{name}-{mode}") == [None, None]
    assert_same_training(Run(folder / f"{name}-{mode}"), single_process.train(name, KINDS[name]))


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_resume_on_two_ranks_is_bit_exact(folder: Path, outcomes: Outcomes, mode: str) -> None:
    assert "after step 5 of 9" in errors(outcomes, f"center-{mode}-stopped")[0][0]
    assert errors(outcomes, f"center-{mode}-resumed") == [None, None]
    run, reference = Run(folder / f"center-{mode}-resumed"), Run(folder / f"center-{mode}")
    assert identical(final_weights(run), final_weights(reference))
    assert metrics_without_timing(run) == metrics_without_timing(reference)


@pytest.mark.parametrize("name", ["fsdp-then-ddp", "ddp-then-single"])
def test_checkpoints_move_between_kinds_of_parallelism(
    folder: Path, outcomes: Outcomes, single_process: SingleProcess, name: str
) -> None:
    assert errors(outcomes, name) == [None, None]
    rows = metrics_without_timing(Run(folder / name))
    expected = metrics_without_timing(single_process.train("center", CENTER))
    assert all(row == pytest.approx(other, rel=1e-3) for row, other in zip(rows, expected, strict=True))


def test_run_of_fsdp_is_continued_like_one_of_ddp(folder: Path, outcomes: Outcomes) -> None:
    """Another run starts with its heads, its teacher and the moments of its optimizer."""
    continued = {}
    for mode in ("ddp", "fsdp"):
        assert errors(outcomes, f"center-{mode}") == [None, None]
        run = Run(folder / f"center-{mode}")
        source = weights.read(run.path)
        recipe = read_recipe(run.recipe_file).with_overrides({"init_from": str(run)})
        continued[mode] = read_continued_method(recipe, source.preprocessing, source, source.state)
    ddp, fsdp = continued["ddp"].state, continued["fsdp"].state
    assert ddp is not None
    assert fsdp is not None
    assert {name: tensor.shape for name, tensor in fsdp.items()} == {name: ddp[name].shape for name in ddp}
    torch.testing.assert_close(
        fsdp["student.prototypes.weight"], ddp["student.prototypes.weight"], rtol=1e-3, atol=1e-4
    )
    assert continued["fsdp"].optimizers is not None
    assert "the optimizer continues with its moments" in continued["fsdp"].notes
