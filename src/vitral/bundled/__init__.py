"""The models that come with vitral, each a folder here: a run without its checkpoints, weights in bf16, and a card.

Wherever a model is asked for, `mnist` means the one of that name, unless a file or folder `mnist` is there; `box:mnist`
means it in any case. Importing this imports nothing heavy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from vitral.errors import nearest, unknown

PREFIX = "box:"
ROOM = Path(__file__).parent


def names() -> tuple[str, ...]:
    return tuple(sorted(config.parent.parent.name for config in ROOM.glob("*/model/config.json")))


def find(source: Path | str) -> Path | str:
    """What a person called a model: the folder of one in the box, or else a path or an address as it was given."""
    said = str(source)
    if said.startswith(PREFIX):
        if (name := said.removeprefix(PREFIX)) not in names():
            raise unknown("model in the box", name, names())
        return ROOM / name
    return ROOM / said if said in names() and not Path(said).exists() else source


def notes(source: Path | str) -> tuple[str, ...]:
    """What to tell a person who may have meant the model in the box."""
    if str(source) not in names() or not (place := Path(source)).exists():
        return ()
    kind = "folder" if place.is_dir() else "file"
    return (f"{source}: the {kind} of that name here; the model that comes with vitral is {PREFIX}{source}",)


def hint(source: Path | str = "", also: str = "") -> str:
    """For an error about a model that is not there: what is in the box, unless a path was meant; then `also`."""
    said, known = str(source), ", ".join(names())
    here = "" if "/" in said else f"{nearest(said, names())} Come with vitral: {known}".strip()
    return "; ".join(filter(None, (here, also)))


def name_of(path: Path | str) -> str:
    """The name of the model in the box whose folder this is; empty where it is none."""
    place = Path(path).resolve()
    inside = place.relative_to(ROOM.resolve()).parts if place.is_relative_to(ROOM.resolve()) else ()
    return inside[0] if inside and inside[0] in names() else ""


def called(folder: Path) -> str:
    """What a person types for the model of this folder, or of this place in the cache."""
    kept_for = [name for name in names() if kept(ROOM / name) == folder]
    return next(iter(kept_for), "") or name_of(folder) or str(folder)


def kept(folder: Path) -> Path:
    """Where measurements about a model are kept: in its own folder, or, of one in the box, in the cache."""
    if not (name := name_of(folder)):
        return folder
    from vitral.data.registry.sources import home  # not for those who only ask for names

    version = hashlib.sha256((ROOM / name / "model" / "weights.safetensors").read_bytes()).hexdigest()[:12]
    return home() / "box" / f"{name}-{version}"
