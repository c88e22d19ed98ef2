"""The benchmarks of pretraining: toy runs on digits."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import _seeds
import all_labels
import pretraining
from vitral.recipes.schema import read_recipe

TINY = (
    "pretrain-small data.name=digits variant=plain model.image_size=[16,16] model.patch_size=4 model.width=16 "
    "model.depth=1 model.heads=2 model.mlp_width=32 batch_size=64 epochs=2 device=cpu threads=1 precision=fp32"
)


def test_options_of_the_output_belong_to_the_process_that_collects_the_rows() -> None:
    words = ["--seeds", "3", "--save", "--csv", "a.csv", "--json=b.json", "--variant", "x y", "--json", "c"]
    assert _seeds.without_output_options(words) == ["--seeds", "3", "--variant", "x y"]


@pytest.mark.slow
def test_a_variant_is_measured_on_several_seeds(tmp_path: Path, run_benchmark: Callable[..., str]) -> None:
    options = ("--variant", TINY, "--images", 128, "--seeds", 2, "--first-seed", 5)
    text = run_benchmark(pretraining, *options, "--csv", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == ["5", "6"]
    assert all(0 <= float(row["linear"]) <= 1 and row["steps"] == "4" for row in rows)
    assert "n = 2" in text


@pytest.mark.slow
def test_seeds_run_side_by_side_give_the_rows_of_one_process(tmp_path: Path) -> None:
    rows = []
    for processes in ("1", "2"):
        path = tmp_path / f"{processes}.json"
        options = ("--variant", TINY, "--images", "128", "--seeds", "2", "--processes", processes, "--json", str(path))
        subprocess.run([sys.executable, str(pretraining.__file__), *options], check=True)
        rows.append([(row["seed"], row["linear"], row["knn"]) for row in json.loads(path.read_text())["rows"]])
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is for a CPU")
def test_all_ideas_of_fine_tuning_run_on_a_toy(
    tmp_path: Path, run_benchmark: Callable[..., str], no_figures: None
) -> None:
    path = tmp_path / "out.json"
    text = run_benchmark(
        all_labels, "--toy", "--validation", 0.1, "--pretrain-epochs", 2, "--keep", tmp_path, "--json", path
    )
    rows = {row["idea"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == [all_labels.SCRATCH, *all_labels.IDEAS]
    assert all(row["training_s"] >= row["pretraining_s"] and 0 <= row["accuracy"] <= 1 for row in rows.values())
    recipes = [read_recipe(tmp_path / "seed-0" / name / "recipe.toml") for name in ("base", "resolution")]
    assert [recipe.model.image_size for recipe in recipes] == [(16, 16), (20, 20)]
    assert "from scratch" in text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is for a CPU")
def test_given_durations_determine_the_number_of_epochs(
    tmp_path: Path, run_benchmark: Callable[..., str], no_figures: None
) -> None:
    path = tmp_path / "out.json"
    options = ("--toy", "--idea", "base", "--idea", "short", "--pretrain-epochs", 4, "--durations", 20, 3, 2)
    run_benchmark(all_labels, *options, "--json", path)
    rows = {row["idea"]: row for row in json.loads(path.read_text())["rows"]}
    assert {idea: (row["pretraining_s"], row["epochs"]) for idea, row in rows.items()} == {
        "base": (12.0, 4),  # (20 s - 4 x 3 s) / 2 s
        "short": (6.0, 7),
    }
