"""Other people's checkpoints, read and written: `vitral.weights.read("model.safetensors").build()`.

One file a family, each a table of names and two functions; what a file says, and what was assumed where it says
nothing, stands in `Checkpoint.notes`. Names are looked up when first used: importing this costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitral.weights.checkpoint import Checkpoint as Checkpoint
    from vitral.weights.exchange import FAMILIES as FAMILIES
    from vitral.weights.exchange import convert as convert
    from vitral.weights.exchange import read as read
    from vitral.weights.exchange import write as write

_LIVES_IN = {
    "Checkpoint": "checkpoint",
    "FAMILIES": "exchange",
    "convert": "exchange",
    "read": "exchange",
    "write": "exchange",
}


def __getattr__(name: str) -> object:
    if name not in _LIVES_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LIVES_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVES_IN})
