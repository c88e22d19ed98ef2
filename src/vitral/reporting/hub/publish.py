"""Push a model to the Hugging Face hub, in a format that other libraries load, with a model card."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vitral import bundled, weights
from vitral.errors import VitralError
from vitral.models.calibration import Calibration
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import recipe_from_dict
from vitral.reporting.hub.model_card import LOADED_BY, RECIPE_FILE, RunRecord, render_model_card
from vitral.runs.model_io import ModelConfig, load_model_config, published_name
from vitral.runs.run import find_model_dir, is_checkpoint
from vitral.utils.atomic import atomic_write
from vitral.utils.progress import LogFn, no_log
from vitral.weights import Checkpoint, hub
from vitral.weights.writing import NotRepresentableError

PREFERRED_FAMILIES = ("timm", "transformers")  # transformers also loads the timm format
MAX_LOGIT_DIFFERENCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """What `push` wrote and uploaded."""

    loaded_by: tuple[str, ...]  # libraries
    files: tuple[tuple[str, int], ...]  # names and sizes in bytes
    notes: tuple[str, ...]
    url: str | None  # None if nothing was uploaded


def check_classification(path: Path) -> None:
    """Refuse a model of another task: timm and transformers would take its outputs for those of exclusive classes."""
    if (
        not is_checkpoint(path)
        and (task := load_model_config(find_model_dir(path) / "config.json").task) != "classification"
    ):
        raise VitralError(
            f"vitral push publishes models that predict one class per image; {path} is a {task} model",
            f"Copy {path / 'model'} instead; vitral reads it anywhere",
        )


def push(
    path: str | Path,
    destination: str,
    *,
    options: CheckpointOptions = NO_OPTIONS,
    folder: str | Path | None = None,
    dry_run: bool = False,
    private: bool = False,
    license: str | None = None,
    log: LogFn = no_log,
) -> PushResult:
    """Write a model in the format of timm or transformers, with a model card, and upload it to the hub.

    Args:
        path: Run folder, model folder, checkpoint or bundled model.
        destination: "hf:owner/name".
        options: What the files of a checkpoint of another library do not contain.
        folder: Folder to keep the files in; a temporary folder by default.
        dry_run: Write the files, but upload nothing.
        private: Create a private repository.
        license: License identifier for the model card.
        log: Called with notes on how a checkpoint of another library was interpreted.

    Examples:
        >>> vitral.push("runs/mine", "hf:me/mine", dry_run=True).loaded_by
    """
    repository, revision = hub.parse_hub_name(destination)
    path = bundled.resolve(path)
    check_classification(Path(path))
    record, checkpoint = RunRecord.load(Path(path)), weights.read(path, options)
    checkpoint = replace(checkpoint, source=published_name(checkpoint.source))
    if checkpoint.format != "vitral":
        for note in checkpoint.notes:
            log(note)
    with TemporaryDirectory() as temporary:
        output = Path(folder) if folder is not None else Path(temporary) / "model"
        family, notes = write_portable(checkpoint, output)
        config = checkpoint.model_config if options.adapter else resolve_model_config(path, checkpoint)
        atomic_write(output / "README.md", render_model_card(config, record, repository, family, notes, license))
        if record.recipe:
            atomic_write(output / RECIPE_FILE, recipe_from_dict(record.recipe).to_toml())
        if family != "vitral" and config.calibration != Calibration():
            lost = "temperature, prediction sets and OOD threshold"
            notes.append(f"the {family} format does not contain the calibration ({lost})")
        files = tuple((file.name, file.stat().st_size) for file in sorted(output.iterdir()))
        url = None if dry_run else hub.upload(output, repository, private=private, revision=revision)
    return PushResult(loaded_by=LOADED_BY[family], files=files, notes=tuple(notes), url=url)


def resolve_model_config(path: str | Path, checkpoint: Checkpoint) -> ModelConfig:
    """The stored configuration of a local vitral model, with epoch and calibration; otherwise the checkpoint's."""
    if checkpoint.format != "vitral" or str(path).startswith(hub.SCHEME):
        return checkpoint.model_config
    return load_model_config(find_model_dir(Path(path)) / "config.json")


def write_portable(checkpoint: Checkpoint, folder: Path) -> tuple[str, list[str]]:
    """Write the model in the first format that can represent it; returns the format and notes for the model card."""
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise VitralError(f"{folder} already exists and is not empty", "Choose another --folder")
    unsupported = []
    for family in PREFERRED_FAMILIES:
        try:
            notes = weights.write(checkpoint, folder, to=family)
        except NotRepresentableError as error:
            unsupported.append(error.what)
        else:
            return family, [*unsupported, *notes, *roundtrip_notes(checkpoint, folder, family)]
    return "vitral", [*unsupported, *weights.write(checkpoint, folder, to="vitral")]


@torch.inference_mode()
def roundtrip_notes(checkpoint: Checkpoint, folder: Path, family: str) -> list[str]:
    """Read the written files back; a note if the logits differ from the original model."""
    config = checkpoint.config
    images = torch.randn(1, config.channels, *config.image_size, generator=torch.Generator().manual_seed(0))
    reloaded = weights.read(folder, CheckpointOptions(heads=config.heads, image_size=config.image_size))
    difference = (reloaded.build()(images) - checkpoint.build()(images)).abs().max().item()
    return [] if difference <= MAX_LOGIT_DIFFERENCE else [f"logits differ by {difference:.1g} in the {family} format"]
