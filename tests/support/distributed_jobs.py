"""Trainings that tests/distributed runs on two ranks: the jobs of jobs.json, one after the other.

A job is {"name": ..., "overrides": {...}, "stop_at": step, "resume_from": run to copy first, "single": on rank 0 only,
"kernels": fused kernels in Triton's interpreter, "num_images": fewer training images}.
Overrides that name a method pretrain without labels.
Each rank writes the outcomes to outcomes-<rank>.json.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import TINY_RECIPE, texture_dataset, textures
from support.models import randomize_weights
from support.pretrain_runs import PRETRAIN_RECIPE, preprocessing_for, unlabelled_textures
from support.triton_interpreter import emulate_fp8_gemms, fake_gpu
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.device.select import select_hardware
from vitral.distributed.world import SINGLE_PROCESS, init_distributed
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import Run
from vitral.ssl.teacher import Teacher
from vitral.training.callbacks import Callback
from vitral.training.distillation.trainer import DistillTrainer
from vitral.training.pretraining.trainer import PretrainTrainer
from vitral.training.trainer import Trainer
from vitral.utils.atomic import atomic_write

RECIPE = TINY_RECIPE.with_overrides({"epochs": 3, "ema": 0.2})
DATASET = texture_dataset(num_validation=41)
MEAN, STD = channel_stats(DATASET.train.images)
PREPROCESSING = Preprocessing(image_size=(8, 8), channels=1, mean=MEAN, std=STD)
# Without dropout, whose masks differ between ranks.
PRETRAINING = PRETRAIN_RECIPE.with_overrides({"model.dropout": 0.0, "model.drop_path": 0.0})


def make_teacher(student: ViTConfig, preprocessing: Preprocessing) -> Teacher:
    """A classifier with random weights for the images of the student."""
    vit = randomize_weights(ViT(replace(student, width=24, depth=1, heads=2)))
    return Teacher(vit, preprocessing, name="tiny", sha256="0" * 64)


def uses_teacher(overrides: dict[str, Any]) -> bool:
    return overrides.get("pretrain.method") == "distill" or "distill.teacher" in overrides


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
    kernels: str | None = None,
    num_images: int | None = None,
) -> dict[str, Any]:
    """Train `RECIPE` or `PRETRAINING` with overrides in folder/name.

    Returns {"error": [what, hint] or None, "overrides": what was computed with fused kernels}.
    """
    trainer_class: type[Trainer] = Trainer
    recipe, dataset, preprocessing = RECIPE, DATASET, PREPROCESSING
    if "pretrain.method" in overrides:
        trainer_class, recipe, dataset = PretrainTrainer, PRETRAINING, unlabelled_textures()
        preprocessing = preprocessing_for(dataset, recipe)
    if num_images is not None:
        dataset = replace(dataset, train=textures(num_images, seed=1), validation=textures(8, seed=2))
    if overrides.get("pretrain.method") == "distill":
        trainer_class, rows = DistillTrainer, torch.arange(len(dataset.train))
        dataset = replace(dataset, train=replace(dataset.train, labels=rows))
    teacher = make_teacher(recipe.model, preprocessing) if uses_teacher(overrides) else None
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
    if kernels is not None:
        hardware = fake_gpu(world=world, fp8=kernels == "fp8")
    run = Run(folder / name)
    if resume_from is None:
        world.broadcast_from_rank0(lambda: Run.create(folder, name, folder / name).path)
    world.broadcast_from_rank0(lambda: atomic_write(run.recipe_file, recipe.to_toml()))
    interrupt = InterruptAt(stop_at if world.rank == world.size - 1 else None)
    weights = None
    if recipe.head_init == "least_squares":  # of a checkpoint with a new head
        torch.manual_seed(1)
        weights = ViT(recipe.model).state_dict()
    options: dict[str, Any] = {"callbacks": [interrupt], "teacher": teacher, "initial_weights": weights}
    trainer, error = None, None
    try:
        with fused_kernels(kernels):
            trainer = trainer_class(recipe, dataset, preprocessing, run, hardware, **options)
            trainer.fit()
    except VitralError as failure:
        error = [failure.what, failure.hint]
    return {"error": error, "overrides": sorted(getattr(getattr(trainer, "backend", None), "overrides", ()))}


@contextmanager
def fused_kernels(kernels: str | None) -> Iterator[None]:
    """Run Triton kernels on the CPU: "bf16" or "fp8", the latter with emulated GEMMs, weight gradients included."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels is not None:
            patch.setattr("vitral.training.backend.can_run_triton", lambda _: True)
            patch.setattr("vitral.training.pretraining.backend.can_run_triton", lambda _: True)
        if kernels == "fp8":
            emulate_fp8_gemms(patch, torch.bfloat16)
            patch.setattr("vitral.kernels.encoder_checks.FP8_WGRAD_MIN_WIDTH", 16)
        yield


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    hardware = select_hardware(device="cpu")
    init_distributed(hardware.world, hardware.device)
    outcomes = [train(folder, **job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / f"outcomes-{hardware.world.rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
