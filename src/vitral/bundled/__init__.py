"""The models that are distributed with vitral. Each folder here is a run folder without checkpoints, plus a README.

A bundled model's name works wherever a run is expected: `mnist` is the bundled model unless a file or folder of that
name exists, `bundled:mnist` always. Importing this module does not import torch.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from vitral.errors import did_you_mean, unknown_name_error

PREFIX = "bundled:"
BUNDLED_DIR = Path(__file__).parent
HUB_NAME = re.compile(r"(?!runs/)[A-Za-z0-9][\w.-]*/[\w.-]+")  # runs: the default folder, also where it is missing
TIMM_NAME = re.compile(r"(timm/)?(vit|deit3?|beit|eva02|flexivit|samvit)_[\w.]+")
TIMM_EXAMPLE = "hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def model_names() -> tuple[str, ...]:
    return tuple(sorted(config.parent.parent.name for config in BUNDLED_DIR.glob("*/model/config.json")))


def resolve(source: Path | str) -> Path | str:
    """The folder of the bundled model that `source` names; any other path or address is returned unchanged."""
    text = str(source)
    if text.startswith(PREFIX):
        if (name := text.removeprefix(PREFIX)) not in model_names():
            raise unknown_name_error("bundled model", name, model_names())
        return BUNDLED_DIR / name
    return BUNDLED_DIR / text if text in model_names() and not Path(text).exists() else source


def shadowing_notes(source: Path | str) -> tuple[str, ...]:
    """A note if a local file or folder hides the bundled model of the same name."""
    if str(source) not in model_names() or not (path := Path(source)).exists():
        return ()
    kind = "folder" if path.is_dir() else "file"
    return (f"using the local {kind} {source}; the bundled model is {PREFIX}{source}",)


def missing_model_hint(source: Path | str = "", other_hint: str = "") -> str:
    """The hint for a model that does not exist: the bundled models, unless `source` is a path, then `other_hint`.

    Names on the Hugging Face hub, and those of timm, lack their prefix.
    """
    text = str(source)
    suggestion = did_you_mean(text, model_names()).removeprefix(". ")
    bundled_hint = "" if "/" in text else f"{suggestion} Bundled models: {', '.join(model_names())}".strip()
    hub_hint = ""
    if TIMM_NAME.fullmatch(text):
        hub_hint = f"timm's models have their full names on the Hugging Face hub, such as {TIMM_EXAMPLE}"
    elif HUB_NAME.fullmatch(text) and not Path(text).parent.exists():
        hub_hint = f"On the Hugging Face hub: hf:{text}"
    return ". ".join(filter(None, (hub_hint, bundled_hint, other_hint)))


def bundled_name(path: Path | str) -> str | None:
    """The name of the bundled model that contains this path; None for other paths."""
    resolved, root = Path(path).resolve(), BUNDLED_DIR.resolve()
    parts = resolved.relative_to(root).parts if resolved.is_relative_to(root) else ()
    return parts[0] if parts and parts[0] in model_names() else None


def display_name(folder: Path) -> str:
    """What a user types for the model in this folder, which may be the cache folder of a bundled model."""
    cached = next((name for name in model_names() if measurement_dir(BUNDLED_DIR / name) == folder), None)
    return cached or bundled_name(folder) or str(folder)


def measurement_dir(folder: Path) -> Path:
    """Where benchmark results of a model are stored: in its folder or, for a bundled model, in the cache."""
    name = bundled_name(folder)
    if name is None:
        return folder
    from vitral.data.registry.cache import cache_dir  # imported here: not needed to list names

    version = hashlib.sha256((BUNDLED_DIR / name / "model" / "weights.safetensors").read_bytes()).hexdigest()[:12]
    return cache_dir() / "bundled" / f"{name}-{version}"
