"""The run folder: everything that one training run writes.

runs/<recipe>-<date>-<id>/
  recipe.toml         complete: `vitral train --recipe runs/x/recipe.toml` (or pretrain, distill) repeats the run
  environment.json    versions, hardware with reasons, seed, git revision, data fingerprint, whether the run is finished
  metrics.jsonl       one line per epoch
  loggers.json        ids of the run at Weights & Biases and MLflow, if it is logged there
  model/              weights.safetensors and config.json: the portable model (see model_io.py)
  checkpoints/        everything for an exact resume
  test.json           evaluation on the test set at the end of the training
  figures/  report.html
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import Timeout

from vitral import bundled
from vitral.data.names import CHECKPOINT_SUFFIXES
from vitral.errors import VitralError, error_reason, shell_quote
from vitral.utils.atomic import atomic_write, is_temporary, remove_temporary_files
from vitral.utils.json_toml import dump_json, parse_json, read_bytes, read_json_object, read_toml
from vitral.utils.locks import file_lock

RUNS = Path("runs")  # default parent of new run folders
EXAMPLE, ARRAY_EXAMPLE = "example.png", "example.npy"  # figures: a photograph, or an image with other channels
RUN_FORMAT = 2  # of run and model folders; increased when files of older versions can no longer be read


def new_run_path(root: Path, name: str) -> Path:
    """A new path under `root`: name, month and day, random suffix."""
    return root / f"{name}-{time.strftime('%m%d')}-{secrets.token_hex(2)}"


class Run:
    """An existing run folder. Holds no state except its paths."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_file = path / "recipe.toml"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.logger_file = path / "loggers.json"
        self.test_file = path / "test.json"
        self.model_dir = path / "model"
        self.checkpoint_dir = path / "checkpoints"
        self.figure_dir = path / "figures"
        self.report_file = path / "report.html"

    @classmethod
    def create(cls, root: Path, recipe_name: str, out: Path | None = None) -> Run:
        """Create a new folder under `root`, or `out` itself, which must not contain anything."""
        path = out or new_run_path(root, recipe_name)
        run = cls(path)
        try:
            cls.check_available(path)
            for folder in (run.path, run.checkpoint_dir, run.figure_dir):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VitralError(
                f"cannot create the run folder {path}: {error.strerror}", "Choose another folder with --out"
            ) from error
        return run

    @staticmethod
    def check_available(path: Path) -> None:
        """Raise VitralError if `path` is a file or contains files. Empty folders may be left from a killed process."""
        if path.is_file():
            raise VitralError(f"{path} is a file, but a run is a folder", "Choose another --out")
        if path.exists() and not all(inner.is_dir() or is_temporary(inner) for inner in path.rglob("*")):
            raise VitralError(
                f"{path} already exists and is not empty",
                f"Choose another --out, or resume with: {resume_command(path)}",
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Prevent other processes from training in this folder, and delete what killed ones have left."""
        try:
            with file_lock(self.checkpoint_dir / ".lock", timeout=0):
                remove_temporary_files(self.path)
                yield
        except Timeout as error:
            raise VitralError(f"another process is training in {self}", "Wait for it or stop it") from error

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """An existing run folder of the current format."""
        path = Path(path)
        with read_error_guard(path):
            if not path.exists():
                raise VitralError(f"no run folder {path}", newest_runs_hint(path))
            if not (path / "recipe.toml").is_file():
                raise VitralError(f"{path} is not a run folder: recipe.toml is missing", newest_runs_hint(path))
        run = cls(path)
        run._check_format()
        return run

    def _check_format(self) -> None:
        """Refuse a folder whose environment.json has another format. A missing or damaged file is ignored."""
        environment = self.load_environment()
        if environment and environment.get("format", 1) != RUN_FORMAT:
            raise format_error(self.path, environment.get("format", 1), environment.get("vitral"))

    def load_environment(self) -> dict[str, Any]:
        """The content of environment.json; empty if it is missing or damaged."""
        with suppress(OSError, ValueError):
            return read_json_object(self.environment_file)
        return {}

    def write_environment(self, environment: dict[str, Any]) -> None:
        atomic_write(self.environment_file, dump_json(environment, indent=2) + "\n")

    @property
    def is_finished(self) -> bool:
        """Whether the model is trained and evaluated and everything about it is written."""
        return self.has_model and self.load_environment().get("finished") is True

    def mark_finished(self) -> None:
        self.write_environment({"format": RUN_FORMAT, **self.load_environment(), "finished": True})

    @property
    def has_model(self) -> bool:
        return (self.model_dir / "config.json").is_file() and (self.model_dir / "weights.safetensors").is_file()

    def load_metrics(self) -> list[dict[str, Any]]:
        """One dictionary of numbers per epoch; null is NaN. Lines that a crash or an editor damaged are skipped."""
        if not self.metrics_file.exists():
            return []
        try:
            lines = read_bytes(self.metrics_file).splitlines()
        except (OSError, ValueError) as error:
            raise VitralError(
                f"cannot read {self.metrics_file}: {error_reason(error)}", "Expected one line of JSON per epoch"
            ) from error
        rows = []
        for line in lines:
            with suppress(ValueError):
                row = parse_json(line)
                if is_metrics_row(row):
                    rows.append({name: math.nan if value is None else value for name, value in row.items()})
        return rows

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        atomic_write(self.metrics_file, "".join(dump_json(row) + "\n" for row in rows))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


def resume_command(path: Path) -> str:
    """The command that continues the run in a folder: of recipes without labels that of pretraining or distillation."""
    command = "train"
    with suppress(OSError, ValueError):
        pretrain = read_toml(path / "recipe.toml").get("pretrain")
        if pretrain is not None:
            has_teacher = isinstance(pretrain, dict) and pretrain.get("method") == "distill"
            command = "distill" if has_teacher else "pretrain"
    return f"vitral {command} --resume {shell_quote(path)}"


def find_model_dir(path: Path) -> Path:
    """The model folder: `path` itself, or model/ inside a run folder."""
    if not path.exists():
        kind = "checkpoint file" if path.suffix in CHECKPOINT_SUFFIXES else "run or model folder"
        raise VitralError(f"no {kind} {path}", bundled.missing_model_hint(path, newest_runs_hint(path)))
    folder = path / "model" if (path / "model").is_dir() or (path / "recipe.toml").is_file() else path
    if (folder / "config.json").is_file():
        return folder
    if folder == path:
        hint = "; ".join((newest_runs_hint(path), *bundled.shadowing_notes(path)))
        raise VitralError(f"{path} contains neither a run nor a model", hint)
    raise VitralError(
        f"{path} has no trained model; training stopped during epoch {last_epoch(Run(path)) + 1}",
        f"Resume it with: {resume_command(path)}",
    )


def last_epoch(run: Run) -> int:
    """Number of the last epoch in metrics.jsonl; 0 before the first one ends. Epoch 0 is a head before training."""
    return max((int(row["epoch"]) for row in run.load_metrics()), default=0)


def is_checkpoint(path: Path | str) -> bool:
    """Whether a path is a checkpoint of another library rather than a run or model folder of vitral."""
    folder = Path(path)
    is_vitral = (
        (folder / "recipe.toml").is_file() or (folder / "model").is_dir() or (folder / "weights.safetensors").is_file()
    )
    is_foreign_folder = folder.is_dir() and not is_vitral and any(folder.iterdir())
    if is_foreign_folder and any(folder.glob("*/recipe.toml")):  # a folder of runs, unless it also has weights
        is_foreign_folder = any(file.suffix in CHECKPOINT_SUFFIXES for file in folder.iterdir())
    return str(path).startswith("hf:") or folder.is_file() or is_foreign_folder


def is_metrics_row(row: Any) -> bool:
    """Whether a parsed line of metrics.jsonl has an epoch and no values other than numbers."""
    return (
        isinstance(row, dict)
        and type(row.get("epoch")) is int
        and all(value is None or isinstance(value, int | float) for value in row.values())
    )


def format_error(path: Path, version: object, vitral_version: object) -> VitralError:
    """The error for a run or model folder of another format."""
    writer = f" (written by vitral {vitral_version})" if vitral_version else ""
    return VitralError(
        f"{path} has format {version}{writer}; this version of vitral reads format {RUN_FORMAT}",
        "Train again, or use the version of vitral that wrote it",
    )


@contextmanager
def read_error_guard(path: Path) -> Iterator[None]:
    """Turn an OSError into a VitralError that names `path`."""
    try:
        yield
    except OSError as error:
        raise VitralError(f"cannot read {path}: {error.strerror or error}", "Check its permissions") from error


def newest_runs_hint(path: Path) -> str:
    """A hint that lists the newest run folders in or next to `path` and in the default folder."""
    folders = {p.parent.resolve(): p.parent for root in (path, path.parent, RUNS) for p in root.glob("*/recipe.toml")}
    if not folders:
        return "Create one with: vitral train mnist"
    runs = sorted(folders.values(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    return f"Newest runs: {', '.join(map(str, runs[:3]))}"
