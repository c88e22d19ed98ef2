"""Trainings that tests/distributed runs on two ranks: the jobs of jobs.json, one after the other.

A job is {"name": ..., "overrides": {...}, "stop_at": step, "resume_from": run to copy first, "single": on rank 0 only}.
Overrides that name a method pretrain without labels.
Each rank writes the outcomes to outcomes-<rank>.json.
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
from support.pretrain_runs import PRETRAIN_RECIPE, preprocessing_for, unlabelled_textures
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.device.select import select_hardware
from vitral.distributed.world import SINGLE_PROCESS, init_distributed
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.pretrainer import PretrainTrainer
from vitral.training.trainer import Trainer
from vitral.utils.atomic import atomic_write

RECIPE = Recipe(
    name="tiny",
    data=DataConfig(name="textures"),
    model=ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=4, width=16, depth=2, heads=2),
    optim=OptimConfig(lr=1e-2),
    epochs=3,
    batch_size=16,
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
    source="generated",
    fingerprint="0123456789abcdef",
    load_test=lambda: textures(40, seed=3),
)
MEAN, STD = channel_stats(DATASET.train.images)
PREPROCESSING = Preprocessing(image_size=(8, 8), channels=1, mean=MEAN, std=STD)
# Without dropout, whose masks differ between ranks.
PRETRAINING = PRETRAIN_RECIPE.with_overrides({"model.dropout": 0.0, "model.drop_path": 0.0})


class InterruptAt(Callback):
    """Sends SIGTERM to this process after a step. Only one rank does; the others must learn of it."""

    def __init__(self, step: int | None) -> None:
        self.step, self.completed = step, 0

    def on_step(self, *_: Any) -> None:
        self.completed += 1
        if self.completed == self.step:
            signal.raise_signal(signal.SIGTERM)


def train(
    folder: Path,
    name: str,
    overrides: dict[str, Any],
    stop_at: int | None = None,
    resume_from: str | None = None,
    single: bool = False,
) -> dict[str, Any]:
    """Train `RECIPE` or `PRETRAINING` with overrides in folder/name; returns {"error": [what, hint] or None}."""
    trainer_class, recipe, dataset, preprocessing = Trainer, RECIPE, DATASET, PREPROCESSING
    if "pretrain.method" in overrides:
        trainer_class, recipe, dataset = PretrainTrainer, PRETRAINING, unlabelled_textures()
        preprocessing = preprocessing_for(dataset, recipe)
    recipe = recipe.with_overrides(overrides)
    hardware = select_hardware(device="cpu", precision=recipe.precision, compile="no")
    world = hardware.world
    if resume_from is not None:
        world.broadcast_from_rank0(lambda: shutil.copytree(folder / resume_from, folder / name))
    if single:
        if not world.is_rank0:
            return {"error": None}
        world = SINGLE_PROCESS
        hardware = replace(hardware, world=world)
    run = Run(folder / name)
    if resume_from is None:
        world.broadcast_from_rank0(lambda: Run.create(folder, name, folder / name).path)
    world.broadcast_from_rank0(lambda: atomic_write(run.recipe_file, recipe.to_toml()))
    interrupt = InterruptAt(stop_at if world.rank == world.size - 1 else None)
    try:
        trainer_class(recipe, dataset, preprocessing, run, hardware, callbacks=[interrupt]).fit()
    except VitralError as error:
        return {"error": [error.what, error.hint]}
    return {"error": None}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    hardware = select_hardware(device="cpu")
    init_distributed(hardware.world, hardware.device)
    outcomes = [train(folder, **job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / f"outcomes-{hardware.world.rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
