"""What training with and without labels does around the Trainer.

launch = Launch(out=..., resume=..., ...)         arguments that `train`, `pretrain` and `distill` share
opened = launch.open(recipe)                      joins the process group, finds the run to continue
with launch.prepare(opened, setup) as prepared:   selects the hardware, creates the run folder
    with prepared.fit(progress) as trainer:       trains
        ...                                       what completes the run
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vitral.data.probe_set import ProbeSet
from vitral.device.select import DeviceOption, Hardware, select_hardware
from vitral.device.threads import thread_count
from vitral.distributed.parallel import ParallelPlan
from vitral.distributed.world import World, init_distributed
from vitral.errors import VitralError
from vitral.evaluation.leaks import fingerprint_training_images, save_training_images
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import Run, resume_command
from vitral.training.callbacks import Callback
from vitral.training.hardware import parallel_plan, training_hardware, with_threads
from vitral.training.progress import ProgressTable
from vitral.training.provenance import (
    check_resumable,
    create_or_update_run,
    open_unfinished_run,
    recorded_threads,
    started_in_fp8,
)
from vitral.training.setup import TrainingSetup
from vitral.training.timing import TimeBudget
from vitral.training.trainer import Trainer
from vitral.training.trainer_factory import make_trainer
from vitral.training.trials.batch_size import resolve_batch_size
from vitral.training.trials.time_limit import fit_to_time_limit


class OpenedRun(NamedTuple):
    """A new run without a folder yet, or the folder of the run to continue."""

    world: World
    console: Console
    recipe: Recipe
    run: Run | None  # None for a new run


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The arguments that `train`, `pretrain` and `distill` share."""

    out: str | Path | None
    resume: str | Path | None
    quiet: bool
    callbacks: Sequence[Callback]
    overrides: dict[str, Any]
    started: float = field(default_factory=time.perf_counter)  # when the time limit begins

    def recorded_recipe(self, *arguments: object, kept: str) -> Recipe:
        """The recipe of the run to resume, without overrides.

        Raises VitralError if any of `arguments` is given, or a field is overridden that determines the result.
        """
        assert self.resume is not None
        if any((self.out, *arguments)):
            raise VitralError(f"a resumed run keeps its {kept}", "Pass only the run folder")
        check_resumable(self.overrides)
        return read_recipe(Run.open(self.resume).recipe_file)

    def open(self, recipe: Recipe) -> OpenedRun:
        """Join the process group and find the run to continue: that of `resume`, or an interrupted one of torchrun."""
        world = join_process_group(recipe.device)
        console = Console(quiet=self.quiet or not world.is_rank0, highlight=False)
        unfinished = open_unfinished_run(world, self.resume, self.out, self.overrides)
        run, recipe = unfinished if unfinished is not None else (None, recipe)
        return OpenedRun(world, console, recipe, run)

    @contextmanager
    def prepare(self, opened: OpenedRun, setup: TrainingSetup) -> Iterator[PreparedRun]:
        """Select hardware, batch size and epochs, and create the run folder or check that its data is unchanged.

        CPU threads are set inside the with statement.
        """
        run = opened.run
        continues_fp8 = run is None or started_in_fp8(run)
        hardware, threads = with_threads(setup, training_hardware(setup, continues_fp8), recorded_threads(run))
        parallel = parallel_plan(setup.recipe, hardware)
        with thread_count(threads):
            setup, batch_note = resolve_batch_size(setup, hardware, parallel)
            if hardware.is_gpu:  # FP8 is selected by the batch size
                hardware, _ = with_threads(setup, training_hardware(setup, continues_fp8))
            setup, budget, time_note = fit_to_time_limit(setup, hardware, parallel, self.started, is_new=run is None)
            for note in filter(None, (batch_note, time_note)):
                opened.console.print(note, soft_wrap=True)
            run = create_or_update_run(opened.world, run, setup, hardware, parallel, self.out)
            yield PreparedRun(run, setup, hardware, parallel, budget, opened.console, self.callbacks)


class PreparedRun(NamedTuple):
    """A run folder and everything that its training needs."""

    run: Run
    setup: TrainingSetup
    hardware: Hardware
    parallel: ParallelPlan
    time_budget: TimeBudget | None
    console: Console
    callbacks: Sequence[Callback]

    @contextmanager
    def fit(
        self, progress: ProgressTable, *callbacks: Callback, probe_set: ProbeSet | None = None
    ) -> Iterator[Trainer]:
        """Train, or continue. The body of the with statement completes the run; its folder is locked until the end."""
        run, world = self.run, self.hardware.world
        trainer = make_trainer(
            self.setup,
            run,
            self.hardware,
            parallel=self.parallel,
            callbacks=[progress, *callbacks, *self.callbacks],
            time_budget=self.time_budget,
            probe_set=probe_set,
        )
        with world.rank_failure_guard(resume_command(run.path)), run_lock(run, world), trainer.callbacks.ending():
            with progress:
                trainer.fit()
            yield trainer


def join_process_group(device: DeviceOption) -> World:
    """Join the other processes of a distributed run, if there are any."""
    hardware = select_hardware(device=device)
    init_distributed(hardware.world, hardware.device)
    return hardware.world


@contextmanager
def run_lock(run: Run, world: World) -> Iterator[None]:
    """Lock the run folder on rank 0; if that fails, all ranks fail."""
    with ExitStack() as stack:
        world.broadcast_from_rank0(lambda: stack.enter_context(run.lock()))
        yield


def store_training_images(run: Run, setup: TrainingSetup) -> None:
    """Store fingerprints of the training images with the model, so that evaluations recognise them."""
    save_training_images(run.model_dir, fingerprint_training_images(setup.loaded_dataset))
