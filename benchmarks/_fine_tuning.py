"""One fine-tuning run of a benchmark, and its predictions of images that it was not trained on."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from vitral.data.datasets import Split
from vitral.device.select import select_hardware
from vitral.inference.forward import compute_logits
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training.hardware import training_hardware
from vitral.training.setup import TrainingSetup
from vitral.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    logits_NK: Tensor  # of the test images, in fp32 on the CPU
    seconds: float  # of the training
    steps_per_epoch: int


def fine_tune(setup: TrainingSetup, test: Split, seed: int) -> FineTuned:
    """Train once with this seed and predict the test images."""
    recipe = replace(setup.recipe, seed=seed, checkpoint_epochs=0)
    with tempfile.TemporaryDirectory() as folder:
        training = Run.create(Path(folder), "run", Path(folder) / "run")
        hardware = training_hardware(replace(setup, recipe=recipe))
        trainer = Trainer(
            recipe, setup.dataset, setup.preprocessing, training, hardware, initial_weights=setup.initial_weights,
            teacher=setup.teacher,
        )  # fmt: skip
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
        model, _ = load_model(training.path)
    model.accepts_any_grid = setup.preprocessing.resize == "native"
    fp32 = select_hardware(device=recipe.device, precision="fp32", compile="no")
    logits = compute_logits(model.to(fp32.device), test.images, setup.preprocessing, fp32)
    return FineTuned(logits_NK=logits.cpu(), seconds=seconds, steps_per_epoch=trainer.loader.steps_per_epoch)
