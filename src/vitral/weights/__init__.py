"""Other people's checkpoints, read and written: `vitral.weights.read("model.safetensors").build()`.

One file a family, each a table of names and two functions; what a file says, and what was assumed where it says
nothing, stands in `Checkpoint.notes`. Names are looked up when first used: importing this costs no import of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.utils.lazy import lazily

if TYPE_CHECKING:
    from vitral.weights.checkpoint import Checkpoint as Checkpoint
    from vitral.weights.io import FAMILIES as FAMILIES
    from vitral.weights.io import convert as convert
    from vitral.weights.io import read as read
    from vitral.weights.io import write as write

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "FAMILIES": "io",
        "convert": "io",
        "read": "io",
        "write": "io",
    },
)
