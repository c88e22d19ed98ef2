"""Images and labels: `vitral.data.load("mnist")` and what lies beneath it.

Names are looked up when first used, so that importing `vitral.data`, listing the known sets and fetching them
cost no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitral.data.datasets import Dataset as Dataset
    from vitral.data.datasets import Split as Split
    from vitral.data.datasets import load as load
    from vitral.data.sources import KNOWN as KNOWN
    from vitral.data.sources import catalogue as catalogue
    from vitral.data.sources import fetch as fetch
    from vitral.data.sources import where as where

_LIVES_IN = {
    "Dataset": "datasets",
    "Split": "datasets",
    "load": "datasets",
    "KNOWN": "sources",
    "catalogue": "sources",
    "fetch": "sources",
    "where": "sources",
}


def __getattr__(name: str) -> object:
    if name not in _LIVES_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LIVES_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVES_IN})
