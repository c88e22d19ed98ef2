"""The automatic batch size, and the error when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.common import Command, Fit
from vitral.device.select import Hardware, select_hardware
from vitral.errors import VitralError
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import Run
from vitral.training.hardware import parallel_plan
from vitral.training.out_of_memory import out_of_memory_error
from vitral.training.setup import setup_training
from vitral.training.trials.batch_size import measure_sizes, resolve_batch_size, step_peak_bytes
from vitral.training.trials.trainer import trial_trainer

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def memory(size: int, fixed: int = 1000, per_image: int = 100, available: int = 50_000) -> int | None:
    """Peak memory of a model, or None if it exceeds what is available."""
    peak = fixed + per_image * size
    return peak if peak <= available else None


@pytest.mark.parametrize(
    ("start", "maximum", "budget", "largest"),
    [
        (32, 10_000, 40_000, 256),  # 512 would need 52,200
        (32, 128, 40_000, 128),  # more would leave too few steps per epoch
        (32, 100, 40_000, 64),
        (1024, 10_000, 40_000, 256),  # the recipe's batch size does not fit
        (48, 10_000, 6_000, 48),
        (32, 10_000, 1_100, 1),
    ],
)
def test_the_largest_size_within_the_budget_is_found(start: int, maximum: int, budget: int, largest: int) -> None:
    assert max(measure_sizes(memory, start, maximum, budget)) == largest


def test_no_size_fits_if_the_model_alone_is_too_large() -> None:
    assert measure_sizes(memory, 32, 10_000, 500) == {}


def test_auto_keeps_the_recipes_batch_size_for_a_cpu(recipe: Recipe) -> None:
    auto = recipe.with_overrides({"batch_size": "auto"})
    assert (auto.batch_size, auto.auto_batch_size) == (16, True)
    assert not auto.with_overrides({"batch_size": 8}).auto_batch_size
    with pytest.raises(VitralError, match="batch_size must be int"):
        recipe.with_overrides({"batch_size": "large"})


def test_a_recipe_file_may_say_auto(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "auto.toml"
    lines = [line for line in recipe.to_toml().splitlines() if not line.startswith("auto_batch_size")]
    text = "\n".join(lines).replace("batch_size = 16", 'batch_size = "auto"')
    file.write_text(text, encoding="utf-8")
    assert read_recipe(file).auto_batch_size


def test_training_on_a_cpu_records_the_number(command: Command, tmp_path: Path, no_figures: None) -> None:
    words = ("train", "digits", "--epochs", 1, "--model.depth", 1, "--model.width", 16, "--device", "cpu")
    code, out, _ = command(*words, "--batch-size", "auto", "--out", tmp_path / "run")
    assert code == 0
    assert "Batch size 64: the recipe's; it is not measured on a CPU" in out
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert (recipe.batch_size, recipe.auto_batch_size) == (64, False)


def test_the_flag_accepts_a_number_or_auto(command: Command) -> None:
    assert command("train", "digits", "--batch-size", "big")[2].startswith(
        "error: --batch-size: expected an integer or auto, got 'big'"
    )
    assert command("train", "digits", "--batch-size", "none")[0] == 2


def test_running_out_of_memory_names_a_smaller_batch_and_gradient_accumulation(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("vitral.training.step.StepRunner.run", fail)
    with pytest.raises(VitralError, match="out of memory with batch size 16") as error:
        train_tiny("run")
    assert "--resume" in error.value.hint
    assert "--grad-accum 2" in error.value.hint
    assert "--batch-size 8" in error.value.hint


def test_other_errors_are_not_taken_for_a_lack_of_memory(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr("vitral.training.step.StepRunner.run", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        train_tiny("run")


def test_a_batch_that_cannot_be_divided_further_suggests_a_smaller_model(
    recipe: Recipe, cpu: Hardware, tmp_path: Path
) -> None:
    error = out_of_memory_error(replace(recipe, batch_size=1), cpu, Run(tmp_path))
    assert "--activation-checkpointing" in error.hint


def test_losses_that_compare_images_are_not_split_to_save_memory(cpu: Hardware, tmp_path: Path) -> None:
    recipe = get_recipe("pretrain")
    hint = out_of_memory_error(recipe, cpu, Run(tmp_path)).hint
    assert hint.startswith(f"Keep the result with less memory: vitral train --resume {tmp_path} --activation-check")
    assert "--grad-accum" not in hint
    assert "--batch-size 128" in out_of_memory_error(replace(recipe, activation_checkpointing=True), cpu).hint
    assert "--grad-accum 2" in out_of_memory_error(recipe.with_overrides({"pretrain.method": "mae"}), cpu).hint


@requires_gpu
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # of torch.compile
def test_the_measured_batch_size_needs_no_more_than_the_budget() -> None:
    """digits is small, so that the number of steps per epoch is the limit; a lower budget makes memory the limit."""
    recipe = get_recipe("digits").with_overrides({"batch_size": "auto", "device": "cuda"})
    setup, hardware = setup_training(recipe), select_hardware(device="cuda")
    resolved, message = resolve_batch_size(setup, hardware, parallel_plan(recipe, hardware))
    assert message is not None
    assert resolved.recipe.batch_size == 64  # 1,294 images: 128 would leave ten steps
    trainer = trial_trainer(resolved, hardware)
    peaks = {size: step_peak_bytes(trainer, size) for size in (64, 256, 1024)}
    assert 0 < (peaks[64] or 0) < (peaks[256] or 0) < (peaks[1024] or 0)
    assert step_peak_bytes(trainer, 50_000_000) is None  # more than any GPU holds
    assert step_peak_bytes(trainer, 64) is not None  # and the trainer still works
