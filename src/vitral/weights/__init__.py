"""Checkpoints of other libraries: `vitral.weights.read("model.safetensors").build()`.

Each format has one module with a key mapping, a reader (`to_vitral`) and a writer (`from_vitral`). `Checkpoint.notes`
describes the files and the assumptions that were made. Attributes are loaded on first use, so that importing this
package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitral.weights.checkpoint import Checkpoint as Checkpoint
    from vitral.weights.explanation import explain as explain
    from vitral.weights.io import FORMATS as FORMATS
    from vitral.weights.io import convert as convert
    from vitral.weights.io import read as read
    from vitral.weights.io import write as write

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "FORMATS": "io",
        "convert": "io",
        "explain": "explanation",
        "read": "io",
        "write": "io",
    },
)
