"""Trainings that test_parallel.py starts with torchrun: those that a JSON file lists, one after the other.

One of them: {"name": …, "changes": {…}, "stop": step, "goes_on_with": the run to copy first, "alone": by one process}.
What came out is compared there.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support.common import textures
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing, measure
from vitral.device.hardware import choose
from vitral.distributed.world import ALONE
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import Data, Optim, Recipe
from vitral.runs.run import Run, write_atomically
from vitral.training.callbacks import Watch
from vitral.training.trainer import fit

RECIPE = Recipe(
    name="tiny",
    data=Data(name="textures"),
    model=ViTConfig(image_size=(8, 8), patch_size=4, channels=1, classes=4, width=16, depth=2, heads=2),
    optim=Optim(lr=1e-2),
    epochs=3,
    batch=16,
    ema=0.2,
    device="cpu",
    precision="fp32",
    compile="no",
)
DATASET = Dataset(
    name="textures",
    classes=("rows", "columns", "chequerboard", "plain"),
    train=textures(96, seed=1),
    validation=textures(41, seed=2),
    source="made by a test",
    fingerprint="0123456789abcdef",
    read_test=lambda: textures(40, seed=3),
)
MEAN, STD = measure(DATASET.train.images)
PREPROCESSING = Preprocessing(image_size=(8, 8), channels=1, mean=MEAN, std=STD)


class Stop(Watch):
    """Interrupts one process alone, before a step; the others must hear of it."""

    def __init__(self, at: int | None, mine: bool) -> None:
        self.at, self.mine, self.steps = at, mine, 0

    def step(self, *_: Any) -> None:
        self.steps += 1
        if self.mine and self.steps == self.at:
            signal.raise_signal(signal.SIGTERM)


def train(
    folder: Path,
    name: str,
    changes: dict[str, Any],
    stop: int | None = None,
    goes_on_with: str | None = None,
    alone: bool = False,
) -> dict[str, Any]:
    recipe = RECIPE.changed(changes)
    hardware = choose(device="cpu", precision=recipe.precision, compile="no")
    if goes_on_with is not None:
        hardware.world.tell(lambda: shutil.copytree(folder / goes_on_with, folder / name))
    if alone:
        if not hardware.world.first:
            return {"error": None}
        hardware = replace(hardware, world=ALONE)
    run = Run(folder / name)
    if not run.path.exists() or not run.recipe_file.exists():
        run = Run(hardware.world.tell(lambda: Run.create(folder, name, folder / name).path))
    hardware.world.tell(lambda: write_atomically(run.recipe_file, recipe.to_toml()))
    dataset = replace(DATASET, train=textures(changes.get("images", 96), seed=1))
    try:
        fit(recipe, dataset, PREPROCESSING, run, hardware, Stop(stop, hardware.world.rank == hardware.world.size - 1))
    except VitralError as error:
        return {"error": [error.what, error.hint]}
    return {"error": None}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank = choose(device="cpu").world.rank
    answers = [train(folder, **asked) for asked in json.loads((folder / "asked.json").read_text())]
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
