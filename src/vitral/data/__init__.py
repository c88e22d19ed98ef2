"""Images and labels: `vitral.data.load("mnist")` and what lies beneath it.

Names are looked up when first used, so that importing `vitral.data`, listing the known sets and fetching them
cost no import of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.utils.lazy import lazily

if TYPE_CHECKING:
    from vitral.data.datasets import Dataset as Dataset
    from vitral.data.datasets import Split as Split
    from vitral.data.datasets import load as load
    from vitral.data.registry.sources import KNOWN as KNOWN
    from vitral.data.registry.sources import catalogue as catalogue
    from vitral.data.registry.sources import fetch as fetch
    from vitral.data.registry.sources import where as where

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Dataset": "datasets",
        "Split": "datasets",
        "load": "datasets",
        "KNOWN": "registry.sources",
        "catalogue": "registry.sources",
        "fetch": "registry.sources",
        "where": "registry.sources",
    },
)
