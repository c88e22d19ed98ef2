"""A trainer that writes nothing, to measure speed, memory or learning rates before a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.recipes.options import HeadInit
from vitral.runs.run import Run
from vitral.training.setup import TrainingSetup
from vitral.training.trainer import Trainer
from vitral.training.trainer_factory import make_trainer


def trial_trainer(
    setup: TrainingSetup, hardware: Hardware, parallel: ParallelPlan | None = None, head_init: HeadInit = "zeros"
) -> Trainer:
    """A trainer in the state before the first step. The run seeds its own state, so trials do not change its result.

    Speed and memory do not depend on the values of the head, so it is not fitted unless `head_init` says so.
    """
    recipe = replace(setup.recipe, tensorboard=False, wandb=False, mlflow=False, head_init=head_init)
    trainer = make_trainer(replace(setup, recipe=recipe), Run(Path(os.devnull)), hardware, parallel=parallel)
    trainer.setup()
    return trainer


def endless_batches(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches, epoch after epoch."""
    epoch = 0
    while True:
        yield from trainer.loader.epoch(epoch)
        epoch += 1
