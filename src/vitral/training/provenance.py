"""Where and with what a run is made: environment.json. Whether it is the run of before, on the data of before."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vitral import __version__
from vitral.data.datasets import Dataset
from vitral.device.hardware import Hardware
from vitral.distributed.parallel import Way
from vitral.errors import VitralError
from vitral.recipes.schema import Recipe
from vitral.runs.run import RUNS, Run, write_atomically


def create(plan: Recipe, dataset: Dataset, hardware: Hardware, way: Way, out: str | Path | None) -> Path:
    """The run folder, with what is known before the first step."""
    run = Run.create(RUNS, plan.name, Path(out) if out else None)
    write_atomically(run.recipe_file, plan.to_toml())
    write_atomically(run.environment_file, json.dumps(environment(plan, dataset, hardware, way), indent=2) + "\n")
    return run.path


def environment(plan: Recipe, dataset: Dataset, hardware: Hardware, way: Way) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "vitral": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "hardware": hardware.name,
        "precision": number(hardware),
        "compile": hardware.compile,
        "threads": torch.get_num_threads(),
        "processes": hardware.world.size,
        "parallel": way.name,
        "reasons": {**hardware.reasons, "parallel": way.reason},
        "launch": launch(),
        "seed": plan.seed,
        "git": git_revision(),
        "command": typed(sys.argv),
        "data": {"name": dataset.name, "fingerprint": dataset.fingerprint, "source": dataset.source},
    }


def number(hardware: Hardware) -> str:
    return "fp8" if hardware.fp8 else hardware.precision


def note_precision(run: Run, hardware: Hardware) -> None:
    """Where the hardware is used in another way than was thought when the run was made."""
    if known := written(run):
        reasons = known["reasons"] | {"precision": hardware.reasons["precision"]}
        known |= {"precision": number(hardware), "reasons": reasons}
        write_atomically(run.environment_file, json.dumps(known, indent=2) + "\n")


def began_in_fp8(run: Run) -> bool:
    return written(run).get("precision") == "fp8"


def written(run: Run) -> dict[str, Any]:
    """What `environment` said when the run was made; nothing where that is lost, or the run is another command's."""
    with suppress(OSError, ValueError):
        if isinstance(known := json.loads(run.environment_file.read_text(encoding="utf-8")), dict):
            return known
    return {}


def typed(words: list[str]) -> str:
    """As a person types it, wherever the program lies."""
    called = words[0] if Path(words[0]).name not in ("vitral", "__main__.py") else "vitral"
    return shlex.join([called, *words[1:]])


def git_revision() -> str | None:
    """Of the folder the person is in, with '+' where files differ from it."""
    try:
        asked = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def launch() -> str | None:
    """What stays the same when torchrun starts its processes again: its run id, or else its own process."""
    if (name := os.environ.get("TORCHELASTIC_RUN_ID")) is None:
        return None
    return f"{platform.node()} {os.getppid()}" if name == "none" else name


def earlier_attempt(out: str | Path | None) -> Path | None:
    """The unfinished run of this very job, where torchrun or a scheduler has started its processes again."""
    files = [Path(out) / "environment.json"] if out is not None else RUNS.glob("*/environment.json")
    for file in files if launch() else ():
        with suppress(OSError):
            run = Run(file.parent)
            ours = written(run).get("launch") == launch()
            if ours and run.recipe_file.is_file() and not (run.finished and run.test_file.is_file()):
                return run.path
    return None


def check_same_data(run: Run, dataset: Dataset) -> None:
    try:
        before = written(run)["data"]["fingerprint"]
    except (KeyError, TypeError):
        return
    if before != dataset.fingerprint:
        raise VitralError(
            f"{dataset.name} is not the data this run began with (fingerprint {dataset.fingerprint}, was {before})",
            "put the old data back, or begin a new run",
        )
