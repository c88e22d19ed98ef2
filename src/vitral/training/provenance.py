"""environment.json: the hardware, versions, command and data of a run, and checks against it when a run is resumed."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitral import __version__
from vitral.data.datasets import Dataset
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.distributed.world import World
from vitral.errors import VitralError
from vitral.recipes.schema import RESUMABLE_FIELDS, Recipe, read_recipe
from vitral.runs.run import RUN_FORMAT, RUNS, Run
from vitral.training.setup import TrainingSetup
from vitral.utils.atomic import atomic_write


def create_run(
    recipe: Recipe, dataset: Dataset, hardware: Hardware, parallel: ParallelPlan, out: str | Path | None
) -> Path:
    """Create the run folder with recipe.toml and environment.json; returns its path."""
    run = Run.create(RUNS, recipe.name, Path(out) if out else None)
    atomic_write(run.recipe_file, recipe.to_toml())
    run.write_environment(describe_environment(recipe, dataset, hardware, parallel))
    return run.path


def describe_environment(
    recipe: Recipe, dataset: Dataset, hardware: Hardware, parallel: ParallelPlan
) -> dict[str, Any]:
    """The content of environment.json."""
    return {
        "format": RUN_FORMAT,
        "vitral": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "hardware": hardware.name,
        "precision": precision_name(hardware),
        "compile": hardware.compile,
        "threads": torch.get_num_threads(),
        "world_size": hardware.world.size,
        "parallel": parallel.mode,
        "reasons": {**hardware.reasons, "parallel": parallel.reason},
        "launch_id": launch_id(),
        "seed": recipe.seed,
        "git": git_revision(),
        "command": format_command(sys.argv),
        "data": {
            "name": dataset.name,
            "fingerprint": dataset.fingerprint,
            "source": dataset.source,
            "images": len(dataset.train),
        },
    }


def precision_name(hardware: Hardware) -> str:
    return "fp8" if hardware.fp8 else hardware.precision


def record_precision(run: Run, hardware: Hardware) -> None:
    """Update the precision and the reasons in environment.json after they changed during setup."""
    if environment := run.load_environment():
        saved = environment.get("reasons")
        reasons = (saved if isinstance(saved, dict) else {}) | hardware.reasons
        run.write_environment(environment | {"precision": precision_name(hardware), "reasons": reasons})


def started_in_fp8(run: Run) -> bool:
    return run.load_environment().get("precision") == "fp8"


def recorded_threads(run: Run | None) -> int | None:
    """CPU threads that a run was started with; None for a new run or one that was started on a GPU."""
    environment = run.load_environment() if run is not None else {}
    threads = environment.get("threads")
    is_valid = isinstance(threads, int) and threads > 0 and "CPU" in str(environment.get("hardware"))
    return threads if is_valid else None


def format_command(arguments: list[str]) -> str:
    """The command line as typed, without the folder of the `vitral` program."""
    program = arguments[0] if Path(arguments[0]).name not in ("vitral", "__main__.py") else "vitral"
    return shlex.join([program, *arguments[1:]])


def git_revision() -> str | None:
    """Revision of the current folder's repository, with '+' if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


def launch_id() -> str | None:
    """An id that survives restarts by torchrun: its run id, or its host and process id; None without torchrun."""
    if (run_id := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return None
    return f"{platform.node()} {os.getppid()}" if run_id == "none" else run_id


def find_interrupted_run(out: str | Path | None) -> Path | None:
    """The unfinished run of this launch, if torchrun or a scheduler has restarted the processes."""
    if (current_launch := launch_id()) is None:
        return None
    files = [Path(out) / "environment.json"] if out is not None else RUNS.glob("*/environment.json")
    for file in files:
        with suppress(OSError):
            run = Run(file.parent)
            is_same_launch = run.load_environment().get("launch_id") == current_launch
            if is_same_launch and run.recipe_file.is_file() and not run.is_finished:
                return run.path
    return None


def open_unfinished_run(
    world: World, resume: str | Path | None, out: str | Path | None, overrides: dict[str, Any]
) -> tuple[Run, Recipe] | None:
    """The run to continue and its recipe: `resume`, or the interrupted run of this launch; None for a new run."""
    path = world.broadcast_from_rank0(lambda: resume or find_interrupted_run(out))
    if path is None:
        if out is not None:  # checked before any data is loaded
            world.broadcast_from_rank0(lambda: Run.check_available(Path(out)))
        return None
    run = Run.open(path)
    recipe = read_recipe(run.recipe_file)
    return run, recipe.with_overrides(overrides) if resume else recipe


def create_or_update_run(
    world: World,
    run: Run | None,
    setup: TrainingSetup,
    hardware: Hardware,
    parallel: ParallelPlan,
    out: str | Path | None,
) -> Run:
    """Create the run folder, or write the recipe of a resumed run after checking that its data is unchanged."""
    if run is None:
        make = partial(create_run, setup.recipe, setup.dataset, hardware, parallel, out)
        return Run(world.broadcast_from_rank0(make))
    check_data_unchanged(run, setup.dataset)
    world.broadcast_from_rank0(partial(atomic_write, run.recipe_file, setup.recipe.to_toml()))
    if not run.load_environment():  # killed before it was written, or damaged since
        environment = describe_environment(setup.recipe, setup.dataset, hardware, parallel)
        world.broadcast_from_rank0(partial(run.write_environment, environment))
    return run


def check_resumable(overrides: dict[str, Any]) -> None:
    """Refuse to change fields that determine the result when a run is resumed."""
    if fixed := [name for name in overrides if name not in RESUMABLE_FIELDS]:
        raise VitralError(
            f"{fixed[0]} cannot be changed when a run is resumed",
            f"Fields that can: {', '.join(RESUMABLE_FIELDS)}",
        )


def check_data_unchanged(run: Run, dataset: Dataset) -> None:
    """Refuse to resume on data with another fingerprint than the run started with."""
    try:
        fingerprint = run.load_environment()["data"]["fingerprint"]
    except (KeyError, TypeError):
        return
    if fingerprint != dataset.fingerprint:
        raise VitralError(
            f"{dataset.name} has changed since this run started (fingerprint {dataset.fingerprint}, was {fingerprint})",
            "Restore the data, or start a new run",
        )
