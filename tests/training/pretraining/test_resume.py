"""Interrupted pretraining continues bit for bit: weights, teacher, centre, optimizer and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from support.common import Fit, identical
from support.pretrain_runs import CENTER, METHODS, flatten_state
from support.training import final_weights, interrupt_and_resume, load_newest_checkpoint, metrics_without_timing
from vitral.runs.run import Run


def assert_same_run(run: Run, reference: Run) -> None:
    assert identical(final_weights(run), final_weights(reference))
    assert metrics_without_timing(run) == metrics_without_timing(reference)
    expected, actual = load_newest_checkpoint(reference), load_newest_checkpoint(run)
    for part in ("model", "optimizers"):
        assert identical(flatten_state(actual[part]), flatten_state(expected[part]))
    assert actual["best"] == expected["best"]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dino", "lejepa"))) for name in METHODS]
)
def test_resume_is_bit_exact_after_sigint(pretrain_tiny: Fit, method: str) -> None:
    overrides = {"pretrain.method": method}
    reference = pretrain_tiny("reference", **overrides)
    # In the middle of the first epoch, after its last step but before its features are measured, and after the run.
    assert_same_run(interrupt_and_resume(pretrain_tiny, "resumed", [2, 1, 6], **overrides), reference)


@pytest.mark.parametrize(
    "overrides",
    [
        CENTER | {"optim.name": "muon"},
        pytest.param(
            {"pretrain.method": "dino", "grad_accum": 2, "activation_checkpointing": True, "on_nan": "rollback"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pretrain.method": "moco", "optim.name": "sgd", "optim.layer_decay": 0.7}, marks=pytest.mark.slow
        ),
    ],
    ids=["centre and Muon", "accumulation and rollback", "SGD"],
)
def test_resume_is_bit_exact_with_other_options(pretrain_tiny: Fit, overrides: dict[str, Any]) -> None:
    reference = pretrain_tiny("reference", **overrides)
    assert_same_run(interrupt_and_resume(pretrain_tiny, "resumed", [4], **overrides), reference)


def test_the_checkpoint_holds_heads_teacher_and_centre(pretrain_tiny: Fit) -> None:
    saved = load_newest_checkpoint(pretrain_tiny(**CENTER))["model"]
    assert {name.split(".")[0] for name in saved} == {"student", "teacher", "centers_2K"}
    for branch in ("student", "teacher"):
        assert {f"{branch}.mask_token", f"{branch}.prototypes.weight", f"{branch}.head.0.weight"} <= saved.keys()
    assert saved["centers_2K"].abs().sum() > 0


@pytest.mark.slow
def test_resume_is_bit_exact_after_every_step(pretrain_tiny: Fit) -> None:
    """As if the process had been killed right after the checkpoint of a step was written."""
    reference = pretrain_tiny("reference", **CENTER)
    run = pretrain_tiny("run", **CENTER, checkpoint_minutes=0.0, keep_checkpoints=99)
    assert_same_run(run, reference)
    for step in range(8, 0, -1):
        for path in run.checkpoint_dir.glob("step-*.pt"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        (run.model_dir / "config.json").unlink()
        assert_same_run(pretrain_tiny("run", **CENTER, checkpoint_minutes=0.0, keep_checkpoints=99), reference)
