"""push: a model as a folder that other libraries load, with its card, and onto the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vitral import bundled as box
from vitral import weights
from vitral.errors import VitralError
from vitral.reporting.hub.model_card import LOADED_BY, RECIPE, Told, card_text
from vitral.runs.run import ModelCard, model_folder, read_card, write_atomically
from vitral.weights import Checkpoint, hub

FAMILIES = ("timm", "transformers")  # transformers loads timm's folders too, so that is tried first


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What was handed on."""

    loaded_by: tuple[str, ...]
    files: tuple[tuple[str, int], ...]  # names and sizes
    notes: tuple[str, ...]
    address: str  # empty where nothing was uploaded


def push(
    path: str | Path,
    destination: str,
    *,
    heads: int | None = None,
    folder: str | Path | None = None,
    dry_run: bool = False,
    private: bool = False,
    license: str | None = None,
    understood: Callable[[Iterable[str]], None] = lambda notes: None,
) -> Pushed:
    """Write a model as timm and transformers load it, with a card of what was measured, and put it on the hub.

    `destination` is "hf:owner/name". With `folder` the files are kept there; with `dry_run` nothing is uploaded.
    `understood` hears how another library's checkpoint was read, before anything is done with it.
    """
    repository, revision = hub.spelled(destination)
    path = box.find(path)
    checkpoint, told = weights.read(path, heads=heads), Told.by(Path(path))
    understood(checkpoint.notes if checkpoint.family != "vitral" else ())
    with TemporaryDirectory() as temporary:
        place = Path(folder) if folder is not None else Path(temporary) / "model"
        family, notes = write_for_others(checkpoint, place)
        text = card_text(card_of(path, checkpoint), told, repository, family, notes, license)
        write_atomically(place / "README.md", text)
        if (recipe := Path(path) / "recipe.toml").is_file():
            write_atomically(place / RECIPE, recipe.read_bytes())
        files = tuple((file.name, file.stat().st_size) for file in sorted(place.iterdir()))
        address = "" if dry_run else hub.upload(place, repository, private=private, revision=revision)
    return Pushed(loaded_by=LOADED_BY[family], files=files, notes=tuple(notes), address=address)


def card_of(path: str | Path, checkpoint: Checkpoint) -> ModelCard:
    """Vitral's own, with epoch and calibration; of a model from elsewhere, what can be said."""
    if checkpoint.family != "vitral" or str(path).startswith(hub.SCHEME):
        return checkpoint.card
    return read_card(model_folder(Path(path)) / "config.json")


def write_for_others(checkpoint: Checkpoint, place: Path) -> tuple[str, list[str]]:
    """The folder for as many libraries as can hold the model: whose files they are, and what to know about them."""
    if place.exists() and any(place.iterdir() if place.is_dir() else [place]):
        raise VitralError(f"{place} already exists and is not empty", "choose another --folder; nothing is overwritten")
    reasons = []
    for family in FAMILIES:
        try:
            notes = weights.write(checkpoint, place, to=family)
        except VitralError as error:
            if not error.what.startswith(f"{family} cannot hold"):
                raise
            reasons.append(error.what)
        else:
            return family, [*reasons, *notes, *check(checkpoint, place, family)]
    return "vitral", [*reasons, *weights.write(checkpoint, place, to="vitral")]


@torch.inference_mode()
def check(checkpoint: Checkpoint, place: Path, family: str) -> list[str]:
    """What was written, read back and asked: a sentence where it does not answer like the model."""
    config = checkpoint.config
    images = torch.randn(1, config.channels, *config.image_size, generator=torch.Generator().manual_seed(0))
    again = weights.read(place, heads=config.heads, image_size=config.image_size)
    apart = (again.build()(images) - checkpoint.build()(images)).abs().max().item()
    return [] if apart <= 1e-4 else [f"read back from {family}'s files, its logits differ by {apart:.1g}"]
