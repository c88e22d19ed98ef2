"""The precision of a training run on a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.common import FakeMachine
from vitral.api.runs import Launch, OpenedRun
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import SINGLE_PROCESS
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.ssl.config import PretrainConfig
from vitral.training.hardware import training_hardware
from vitral.training.setup import TrainingSetup

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def wide_setup(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, fake_machine: FakeMachine
) -> TrainingSetup:
    fake_machine(gpu=True)
    model = replace(recipe.model, width=768, heads=12, mlp_width=3072)
    recipe = replace(recipe, device="gpu", precision="auto", compile="auto", model=model, batch_size=10_000)
    return TrainingSetup(
        recipe=recipe,
        dataset=dataset,
        loaded_dataset=dataset,
        preprocessing=preprocessing,
        initial_weights=None,
        notes=(),
    )


def test_training_all_weights_uses_fp8(wide_setup: TrainingSetup) -> None:
    assert training_hardware(wide_setup).fp8_is_auto
    fine_tuning = replace(wide_setup, recipe=replace(wide_setup.recipe, init_from="b16.safetensors"))
    assert training_hardware(fine_tuning).fp8_is_auto


@pytest.mark.parametrize("changes", [{"batch_size": 32}, {"grad_accum": 100}], ids=str)
def test_few_tokens_per_step_use_bf16(wide_setup: TrainingSetup, changes: dict[str, Any]) -> None:
    hardware = training_hardware(replace(wide_setup, recipe=replace(wide_setup.recipe, **changes)))
    assert (hardware.precision, hardware.fp8) == ("bf16", False)


def test_training_a_part_of_the_weights_and_pretraining_use_bf16(wide_setup: TrainingSetup) -> None:
    """The learning curves of the former in FP8 were not measured; FP8 kernels support training with labels only."""
    fine_tuning = replace(wide_setup.recipe, init_from="b16.safetensors")
    pretraining = replace(wide_setup.recipe, pretrain=PretrainConfig())
    continued = replace(fine_tuning, pretrain=PretrainConfig())
    for recipe in (replace(fine_tuning, tune="head"), pretraining, continued):
        hardware = training_hardware(replace(wide_setup, recipe=recipe))
        assert (hardware.precision, hardware.fp8) == ("bf16", False)


@pytest.mark.parametrize("measured", [32, 10_000])
def test_fp8_depends_on_the_measured_batch_size(
    wide_setup: TrainingSetup, monkeypatch: pytest.MonkeyPatch, measured: int
) -> None:
    def resolve(setup: TrainingSetup, *_: object) -> tuple[TrainingSetup, str]:
        return replace(setup, recipe=replace(setup.recipe, batch_size=measured)), "measured"

    monkeypatch.setattr("vitral.api.runs.resolve_batch_size", resolve)
    monkeypatch.setattr("vitral.api.runs.create_or_update_run", lambda *_: Run(Path("run")))
    before = replace(wide_setup, recipe=replace(wide_setup.recipe, batch_size=10_032 - measured))
    opened = OpenedRun(SINGLE_PROCESS, Console(quiet=True), before.recipe, None)
    with Launch(out=None, resume=None, quiet=True, callbacks=(), overrides={}).prepare(opened, before) as prepared:
        assert prepared.hardware.fp8 == (measured == 10_000)


def test_a_run_that_started_in_bf16_stays_in_bf16(wide_setup: TrainingSetup) -> None:
    assert not training_hardware(wide_setup, continues_fp8=False).fp8
