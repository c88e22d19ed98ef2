"""Train and evaluate one model (part) of a comparison in its own folder.

No model of a comparison is trained on the evaluation images.

out/PART/                   run folder of the part
out/PART/evaluation.json    which evaluation images were classified correctly; a part that has it is not repeated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.datasets import Dataset, Split
from vitral.device.select import select_hardware
from vitral.errors import VitralError
from vitral.inference.forward import compute_logits
from vitral.models.vit import ViT
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.hardware import training_hardware
from vitral.training.setup import TrainingSetup
from vitral.training.trainer import Trainer
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json


@dataclass(frozen=True, kw_only=True)
class EvaluationSplit:
    """A training setup whose evaluation images are held out."""

    setup: TrainingSetup
    dataset: Dataset  # without the evaluation images
    evaluation: Split
    description: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PartResult:
    correct: np.ndarray[Any, Any]  # (M,) booleans, one per evaluation image
    seconds: float


def write_settings(file: Path, settings: Mapping[str, Any], hint: str = "Choose another --out") -> None:
    """Write the settings of a comparison into its folder, or check that an existing file has the same ones.

    `hint`: what to do about a folder that cannot be used.
    """
    out = file.parent
    try:
        if file.is_file() and read_json(file) != settings:
            raise VitralError(f"{out} holds a comparison with other settings", hint)
        if not file.is_file():
            Run.check_available(out)
            out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise VitralError(f"cannot use {out}: {error}", hint) from error
    atomic_write(file, dump_json(settings, indent=2) + "\n")


def train_part(split: EvaluationSplit, folder: Path, seed: int, callbacks: Sequence[Callback]) -> tuple[ViT, float]:
    """Train in a run folder, resuming an interrupted run; returns the model and its training time in seconds."""
    setup = split.setup
    recipe = replace(setup.recipe, seed=seed)
    run = Run(folder)
    if not run.recipe_file.is_file():
        run = Run.create(folder.parent, folder.name, folder)
        atomic_write(run.recipe_file, recipe.to_toml())
    hardware = training_hardware(replace(setup, recipe=recipe, dataset=split.dataset))
    trainer = Trainer(
        recipe,
        split.dataset,
        setup.preprocessing,
        run,
        hardware,
        callbacks=callbacks,
        initial_weights=setup.initial_weights,
        base=setup.base,
        teacher=setup.teacher,
    )
    with run.lock(), trainer.callbacks.ending():
        trainer.fit()
    return load_model(folder)[0], float(run.load_metrics()[-1]["seconds"])


def evaluate_part(model: ViT, split: EvaluationSplit, folder: Path, seconds: float) -> PartResult:
    hardware = select_hardware(device=split.setup.recipe.device, precision="fp32", compile="no")
    model = model.to(hardware.device).eval()
    logits = compute_logits(model, split.evaluation.images, split.setup.preprocessing, hardware)
    correct = (logits.argmax(dim=1).cpu() == split.evaluation.labels).numpy()
    values = {
        "seconds": round(seconds, 2),
        "data": split.dataset.fingerprint,
        "correct": correct.astype(int).tolist(),
    }
    atomic_write(folder / "evaluation.json", dump_json(values) + "\n")
    return PartResult(correct=correct, seconds=seconds)


def read_result(folder: Path, split: EvaluationSplit) -> PartResult | None:
    """The result of a finished part; None if there is none or the data has changed since."""
    try:
        values = read_json(folder / "evaluation.json")
        correct = np.array(values["correct"], dtype=bool)
        is_current = values["data"] == split.dataset.fingerprint and len(correct) == len(split.evaluation)
        return PartResult(correct=correct, seconds=float(values["seconds"])) if is_current else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
