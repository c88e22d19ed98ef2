"""Choose the trainer of a run."""

from __future__ import annotations

from collections.abc import Sequence

from vitral.data.probe_set import ProbeSet
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.distillation.trainer import DistillTrainer
from vitral.training.pretraining.trainer import PretrainTrainer
from vitral.training.setup import TrainingSetup
from vitral.training.timing import TimeBudget
from vitral.training.trainer import Trainer


def make_trainer(
    setup: TrainingSetup,
    run: Run,
    hardware: Hardware,
    *,
    parallel: ParallelPlan | None = None,
    callbacks: Sequence[Callback] = (),
    time_budget: TimeBudget | None = None,
    probe_set: ProbeSet | None = None,
) -> Trainer:
    """The trainer for a setup: with labels or, for a pretraining recipe, without. `probe_set` is for pretraining."""
    trainer_class: type[Trainer] = Trainer
    if setup.recipe.pretrain is not None:
        trainer_class = DistillTrainer if setup.recipe.pretrain.method == "distill" else PretrainTrainer
    trainer = trainer_class(
        setup.recipe,
        setup.dataset,
        setup.preprocessing,
        run,
        hardware,
        parallel=parallel,
        callbacks=callbacks,
        initial_weights=setup.initial_weights,
        base=setup.base,
        time_budget=time_budget,
        teacher=setup.teacher,
    )
    if isinstance(trainer, PretrainTrainer):
        trainer.probe_set = probe_set
        trainer.method_state, trainer.optimizer_states = setup.method_state, setup.optimizer_states
    return trainer
