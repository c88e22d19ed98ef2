"""read, write, convert: the three doors of this room."""

from __future__ import annotations

import json
from pathlib import Path

from vitral import bundled as box
from vitral.errors import VitralError, unknown
from vitral.models.vit import ViT
from vitral.runs.run import ModelCard, check_heads, model_folder, read_card, write_atomically, write_card
from vitral.weights import hub, npz, timm, torchvision, transformers, vit_pytorch
from vitral.weights.checkpoint import NO_HEAD, Asked, Checkpoint
from vitral.weights.detect import family_of
from vitral.weights.files import Found, find, one_line, save
from vitral.weights.preprocessing import seen
from vitral.weights.reading import finish

READERS = {
    "timm": timm.to_vitral,
    "transformers": transformers.to_vitral,
    "torchvision": torchvision.to_vitral,
    "vit-pytorch": vit_pytorch.to_vitral,
    "npz": npz.to_vitral,
}
WRITERS = {
    "timm": timm.from_vitral,
    "transformers": transformers.from_vitral,
    "torchvision": torchvision.from_vitral,
    "vit-pytorch": vit_pytorch.from_vitral,
    "npz": npz.from_vitral,
}
FAMILIES = (*WRITERS, "vitral")
# What a destination may be called; "" is a folder.
SUFFIXES = {
    "timm": ("", ".safetensors", ".pth", ".pt"),
    "transformers": ("",),
    "torchvision": (".pth", ".pt", ".safetensors"),
    "vit-pytorch": (".pt", ".pth", ".safetensors"),
    "npz": (".npz",),
    "vitral": ("",),
}


def read(source: Path | str, *, heads: int | None = None, image_size: tuple[int, int] | None = None) -> Checkpoint:
    """A file, a folder, "hf:owner/name[@revision]", or the name of a model in the box.

    `heads` and `image_size` for files that do not tell."""
    asked = Asked(heads=heads, image_size=image_size)
    place = box.find(source)
    named = str(place)
    path = hub.fetch(named) if named.startswith(hub.SCHEME) else Path(place)
    try:
        if (path / "recipe.toml").is_file() or (path / "model" / "config.json").is_file():
            path = model_folder(path)
        found = find(path)
        found.notes += box.notes(source)
        if named.startswith(hub.SCHEME):
            found.where = named
        family = family_of(found)
        return _ours(found, path, asked) if family == "vitral" else READERS[family](found, asked)
    except OSError as error:
        raise VitralError(f"cannot read {path}: {error.strerror or error}", "may this user read it?") from error
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        # A stranger's config.json can hold anything: a number where a list was, a tensor of another rank.
        raise VitralError(
            f"{source} cannot be understood: {one_line(error)}", "are config.json and the weights from one model?"
        ) from error


def _ours(found: Found, path: Path, asked: Asked) -> Checkpoint:
    """A model folder of vitral's, without building the model."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise VitralError(f"{path} needs the config.json that was saved with it", "give the model folder")
    card = read_card(folder / "config.json")
    check_heads(found.where, asked.heads, card)
    notes = [f"preprocessing from config.json: {seen(card.preprocessing)}"]
    checkpoint = finish(
        "vitral",
        found,
        found.tensors,
        [],
        card.architecture,
        lambda name: name,
        card.preprocessing,
        notes,
        variant=card.variant,
        classes=card.classes,
    )
    checkpoint.headless = card.classes == (NO_HEAD,)
    return checkpoint


def write(what: Checkpoint | tuple[ViT, ModelCard], destination: Path | str, to: str) -> list[str]:
    """Files of the family `to`; the answer is what a person should know about them."""
    checkpoint = what if isinstance(what, Checkpoint) else Checkpoint.of(*what)
    if to not in FAMILIES:
        raise unknown("family", to, FAMILIES)
    path = Path(destination)
    if path.suffix not in SUFFIXES[to]:
        if "" not in SUFFIXES[to]:
            raise VitralError(f"{path}: a {to} checkpoint is a file", f"name it {path}{SUFFIXES[to][0]}")
        if path.suffix in {".bin", ".ckpt", *(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)}:
            raise VitralError(f"{path}: a {to} model is a folder", f"name it {path.with_suffix('')}")
    try:
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            raise VitralError(f"{path} already exists", "choose another name; nothing is overwritten")
        is_file = path.suffix in SUFFIXES[to] and path.suffix != ""
        written = None if to == "vitral" else WRITERS[to](checkpoint)
        (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(f"cannot make {path}: {error.strerror or error}", "is the folder writable?") from error
    if written is None:
        save(path / "weights.safetensors", checkpoint.state)
        write_card(path, checkpoint.card)
        return [] if checkpoint.classes or checkpoint.headless else ["no class names are known: classes are numbered"]
    save(path if is_file else path / "model.safetensors", written.tensors)
    if is_file and written.documents:
        return [*written.notes, f"config.json is left out; a folder would hold it: name {path.with_suffix('')}"]
    for name, document in written.documents.items():
        write_atomically(path / name, json.dumps(document, indent=2) + "\n")
    return written.notes


def convert(
    source: Path | str,
    destination: Path | str,
    to: str,
    *,
    heads: int | None = None,
    image_size: tuple[int, int] | None = None,
) -> list[str]:
    """From any family to any other. The notes of reading, then those of writing."""
    if to not in FAMILIES:
        raise unknown("family", to, FAMILIES)
    checkpoint = read(source, heads=heads, image_size=image_size)
    return [*checkpoint.notes, *write(checkpoint, destination, to)]
