"""speed_records: variants, statistics, budget, and a toy run without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import speed_records
from speed_records import Variant
from vitral.errors import VitralError


def make_run(accuracy: float, training_s: float = 8.0, wall_clock_s: float = 10.0) -> dict[str, Any]:
    constants = ("training_by_median_epoch_s", "ms_per_step", "train_loss", "train_accuracy")
    return {
        "test_accuracy": accuracy,
        "test_accuracy_without_tta": accuracy - 0.01,
        "training_s": training_s,
        "wall_clock_s": wall_clock_s,
        "steps": 9,
        "messages": "",
        **dict.fromkeys(constants, 1.0),
    }


def make_args(**changes: Any) -> argparse.Namespace:
    defaults = {"seeds": 3, "first_seed": 5, "target": None, "budget": float("inf"), "keep": None}
    return argparse.Namespace(**defaults | {"csv": None, "json": None, "save": False} | changes)


def test_variants_are_parsed_like_command_line_flags() -> None:
    changes = "epochs=16 model.conv.widths=32,128,256 optim.lr=6e-3 model.qk_norm=true augment.flip=false init_schemes="
    recipe: Any = Variant("cifar10-94", tuple(changes.split())).resolve()
    assert (recipe.epochs, recipe.model.conv.widths, recipe.optim.lr) == (16, (32, 128, 256), 6e-3)
    assert (recipe.model.qk_norm, recipe.augment.flip, recipe.init_schemes) == (True, False, ())
    assert recipe.augment.mix_prob == 0.4  # unchanged


def test_misspelt_fields_are_refused_with_a_suggestion() -> None:
    with pytest.raises(VitralError) as error:
        Variant("cifar10-94", ("optim.lrr=1",)).resolve()
    assert "optim.lr" in f"{error.value.what} {error.value.hint}"


@pytest.mark.parametrize(
    ("recipe", "requested", "target"),
    [("cifar10-94", None, 0.94), ("cifar10-94", 94.5, 0.945), ("cifar10-patch", None, None), ("deit-384", None, None)],
)
def test_the_target_is_requested_or_part_of_the_name(
    recipe: str, requested: float | None, target: float | None
) -> None:
    assert Variant(recipe).target(requested) == target


def test_summaries_separate_the_wall_clock_of_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter([make_run(0.93, 8.0, 40.0), make_run(0.95, 9.0, 10.0), make_run(0.96, 10.0, 12.0), make_run(0.9)])

    def train(recipe: Any, folder: Path) -> dict[str, Any]:
        if recipe.epochs == 3:
            raise RuntimeError("out of memory\nand a traceback")
        (folder / "model").mkdir(parents=True)
        (folder / "seed").write_text(str(recipe.seed))
        return next(results)

    monkeypatch.setattr(speed_records, "train_and_evaluate", train)
    keep = tmp_path / "keep"
    keep.mkdir()
    variants = [Variant("cifar10-94", (change,)) for change in ("epochs=3", "model.heads=5", "epochs=2")]
    speed_records.measure(variants, make_args(json=tmp_path / "out.json", keep=keep))
    content = json.loads((tmp_path / "out.json").read_text())
    out_of_memory, invalid, *finished = content["rows"]
    assert out_of_memory["failed"] == "RuntimeError: out of memory"
    assert "heads" in invalid["failed"]
    assert [(run["seed"], run["first"]) for run in finished] == [(5, "process"), (6, ""), (7, "")]
    summary = content["summary"]["cifar10-94 epochs=2"]
    assert summary["n"] == 3
    assert summary["test_accuracy"]["mean"] == pytest.approx(0.9466667, rel=1e-4)
    assert summary["test_accuracy"]["std"] == pytest.approx(0.0152753, rel=1e-4)
    assert summary["test_accuracy"]["sem"] == pytest.approx(0.0088192, rel=1e-4)
    assert summary["reached"]
    assert summary["wall_clock_s"]["mean"] == pytest.approx(11.0)
    assert summary["first_wall_clock_s"] == 40.0
    (kept,) = keep.iterdir()
    assert kept.name == "cifar10-94_epochs=2"
    assert (kept / "seed").read_text() == "7"  # the best run
    text = capsys.readouterr().out
    assert "94.67% ± 0.88 (std 1.53)" in text
    assert "cifar10-94 epochs=3: no finished run" in text


def test_compiled_code_is_reset_when_the_shape_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    monkeypatch.setattr(speed_records, "train_and_evaluate", lambda recipe, folder: make_run(0.93))
    __import__("torch._dynamo")
    changes = "epochs=2", "optim.lr=1e-3", "batch_size=512", "model.heads=5", "model.conv.widths=8,16,32"
    variants = [Variant("cifar10-94", (change,)) for change in changes]
    speed_records.measure(variants, make_args(seeds=1, json=tmp_path / "out.json"))
    runs = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [run["first"] for run in runs if "failed" not in run] == ["process", "", "shape", "shape"]
    assert len(resets) == 4  # one per shape, including the invalid one


def test_runs_that_exceed_the_budget_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("speed_records.time.perf_counter", lambda: now[0])

    def train(recipe: Any, folder: Path) -> dict[str, Any]:
        now[0] += 10.0
        return make_run(0.93)

    monkeypatch.setattr(speed_records, "train_and_evaluate", train)
    speed_records.measure([Variant("cifar10-94")], make_args(seeds=9, budget=35.0))
    text = capsys.readouterr().out
    assert "n = 3" in text
    assert "6 runs skipped: they would not have finished within 35 s" in text
    assert "target 94%: NOT reached" in text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the full benchmark on a GPU")
def test_a_toy_runs_without_a_gpu(tmp_path: Path, run_benchmark: Callable[..., str]) -> None:
    variants = ["--variant", "digits epochs=1 model.depth=1 tta=six", "--variant", "digits epochs=0"]
    text = run_benchmark(speed_records, *variants, "--seeds", 2, "--json", tmp_path / "out.json")
    assert "needs a GPU" in text
    first, second, failed = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert first["test_accuracy"] != second["test_accuracy"]  # another seed
    assert first["train_loss"] < 2.3026  # better than a uniform prediction
    assert first["steps"] == 20
    assert 0 < first["training_s"] <= first["wall_clock_s"]
    assert "epochs must be at least 1" in failed["failed"]
