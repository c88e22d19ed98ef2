"""The run folder, and the portable model inside it.

runs/<recipe>-<date>-<id>/
  recipe.toml         complete: `vitral train --recipe runs/x/recipe.toml` repeats the run
  environment.json    versions, hardware and the reasons, seed, git revision, data fingerprint
  metrics.jsonl       one line an epoch
  model/              weights.safetensors and config.json: all that predict and evaluate need
  checkpoints/        everything for an exact resume
  test.json           what the test set said, once, at the end
  figures/
  report.html         all of it in one page
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from vitral import __version__
from vitral import bundled as box
from vitral.data.preprocess import Preprocessing
from vitral.data.registry.download import sync
from vitral.errors import VitralError, typed
from vitral.evaluation.calibration import Calibration
from vitral.utils.serialization import from_plain, to_plain
from vitral.models.variants import VARIANTS, check, config_class
from vitral.models.vit import ViT, ViTConfig

RUNS = Path("runs")  # where run folders are made
FORMAT = 1  # of the model folder; raised when an older vitral could no longer read it


@contextmanager
def whole_or_not(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes `path` when all went well; otherwise what was there stays, and nothing else.

    Written beside, synced, renamed; a rename is safe against a power cut only when its folder is synced too.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """The whole file or the old one, never half of it."""
    try:
        with whole_or_not(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise VitralError(f"cannot write {path}: {error.strerror or error}", _what_to_do(error)) from error


def _what_to_do(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return "free some space; what was saved before is whole" if full else "is the folder writable?"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system refuses in here is an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise VitralError(f"cannot read {path}: {error.strerror or error}", "may this user read it?") from error


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What travels with the weights: architecture, preprocessing, class names."""

    architecture: ViTConfig
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    trained_on: str
    epoch: int  # the one with the best validation accuracy, whose weights these are
    variant: str = "plain"  # of the table in vitral.models.variants
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        if len(self.classes) != self.architecture.classes:
            raise ValueError(f"{len(self.classes)} class names for a model of {self.architecture.classes} classes")
        check(self.variant, self.architecture)


def fresh(root: Path, name: str) -> Path:
    """A name under `root` that nobody has taken."""
    return root / f"{name}-{time.strftime('%m%d')}-{secrets.token_hex(2)}"


class Run:
    """A run folder that exists. Holds no state but its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_file = path / "recipe.toml"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.test_file = path / "test.json"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.figures = path / "figures"
        self.report_file = path / "report.html"

    @classmethod
    def create(cls, root: Path, recipe_name: str, out: Path | None = None) -> Run:
        """A new folder under `root`, or `out` itself; one that already holds a run is refused."""
        path = out or fresh(root, recipe_name)
        run = cls(path)
        try:
            cls.check_free(path)
            for folder in (run.path, run.checkpoints, run.figures):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VitralError(
                f"cannot make the run folder {path}: {error.strerror}", "choose another with --out"
            ) from error
        return run

    @staticmethod
    def check_free(path: Path) -> None:
        if path.is_file():
            raise VitralError(f"{path} is a file; a run is a folder", "choose another --out")
        if path.exists() and any(path.iterdir()):
            raise VitralError(
                f"{path} already exists and is not empty",
                f"choose another --out, or go on with: vitral train --resume {typed(path)}",
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training in this folder."""
        try:
            with FileLock(self.checkpoints / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise VitralError(f"another process is training in {self}", "wait for it, or stop it") from error

    @classmethod
    def open(cls, path: Path | str) -> Run:
        path = Path(path)
        with reading(path):
            if not path.exists():
                raise VitralError(f"there is no run folder {path}", _runs_beside(path))
            if not (path / "recipe.toml").is_file():
                raise VitralError(f"{path} is not a run folder: it has no recipe.toml", _runs_beside(path))
        return cls(path)

    @property
    def finished(self) -> bool:
        return (self.model / "config.json").is_file() and (self.model / "weights.safetensors").is_file()

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary an epoch. A last line that a crash cut short is passed over."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_bytes().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


def _runs_beside(path: Path) -> str:
    """A hint: the run folders that do exist nearby."""
    for root in (path, path.parent, RUNS):
        if root.is_dir():
            runs = sorted((p.parent for p in root.glob("*/recipe.toml")), key=lambda p: p.stat().st_mtime)
            if runs:
                return f"Newest runs: {', '.join(str(run) for run in runs[-3:][::-1])}"
    return "vitral train mnist makes one"


def save_model(folder: Path, model: ViT, card: ModelCard) -> None:
    """weights.safetensors, then config.json: a folder with a config.json is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(f"cannot make {folder}: {error.strerror}", _what_to_do(error)) from error
    save_weights(folder / "weights.safetensors", model.state_dict())
    write_card(folder, card)


def write_card(folder: Path, card: ModelCard) -> None:
    config = {"format": FORMAT, "made_by": f"vitral {__version__}", **to_plain(card)}
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def save_weights(path: Path, state: dict[str, torch.Tensor]) -> None:
    write_atomically(path, to_safetensors({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}))


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise VitralError(f"{path} is missing", "the folder was not copied whole") from error
    except (OSError, SafetensorError) as error:
        raise VitralError(
            f"{path} is not a whole safetensors file: {error}", "copy it again, or train again"
        ) from error


def load_model(path: Path | str) -> tuple[ViT, ModelCard]:
    """The model of a run folder or of a model folder, ready to answer."""
    with reading(Path(path)):
        folder = model_folder(Path(path))
    card = read_card(folder / "config.json")
    model = VARIANTS[card.variant](card.architecture)
    wanted, found = model.state_dict(), load_weights(folder / "weights.safetensors")
    wrong = [said for name in sorted(wanted.keys() | found.keys()) if (said := _differs(name, wanted, found))]
    if wrong:
        raise VitralError(
            f"{folder}: weights and config.json do not belong together ({len(wrong)} tensors differ)",
            f"the first: {', '.join(wrong[:4])}",
        )
    model.load_state_dict(found)
    return model.eval(), card


def check_heads(path: Path | str, asked: int | None, card: ModelCard) -> None:
    """A model of vitral's own says how many heads it has."""
    if asked not in (None, card.architecture.heads):
        raise VitralError(f"{path} has {card.architecture.heads} heads, not {asked}", "leave --heads out")


def model_folder(path: Path) -> Path:
    """Where the model is: here, or in the run folder that this is."""
    if not path.exists():
        raise VitralError(f"there is no run or model folder {path}", box.hint(path, _runs_beside(path)))
    folder = path / "model" if (path / "model").is_dir() or (path / "recipe.toml").is_file() else path
    if (folder / "config.json").is_file():
        return folder
    if folder == path:
        hint = "; ".join((*box.notes(path), _runs_beside(path)))
        raise VitralError(f"{path} holds neither a run nor a model", hint)
    raise VitralError(
        f"{path} has no finished model: training stopped in epoch {len(Run(path).metrics()) + 1}",
        f"go on with: vitral train --resume {typed(path)}",
    )


def _differs(name: str, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """How the tensor of this name is not as the model wants it; empty where it is."""
    if name not in found:
        return f"{name} (missing)"
    if name not in wanted:
        return f"{name} (not in the model)"
    is_so, should = ("×".join(map(str, tensors[name].shape)) for tensors in (found, wanted))
    return f"{name} ({is_so}, not {should})" if is_so != should else ""


def read_card(path: Path) -> ModelCard:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        version, made_by = config.pop("format"), config.pop("made_by", "")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise VitralError(f"{path} cannot be read: {error!r}", "copy it again, or train again") from error
    if version != FORMAT:
        raise VitralError(
            f"{path} has format {version} ({made_by or 'unknown version'}); this vitral reads format {FORMAT}",
            "install the version that made it, or a newer one: pip install --upgrade vitral",
        )
    try:
        return from_plain(ModelCard, config, kinds={"architecture": config_class(config.get("variant"))})
    except VitralError as error:
        raise VitralError(f"{path}: {error.what}", error.hint) from error
