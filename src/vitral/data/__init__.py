"""Images and labels: `vitral.data.load("mnist")`, `vitral.data.load("photos/")`.

Names are imported on first use, so that importing `vitral.data` and listing or fetching datasets do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitral.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitral.data.dataset_loading import load as load
    from vitral.data.datasets import Dataset as Dataset
    from vitral.data.datasets import Split as Split
    from vitral.data.registry.fetch import fetch as fetch
    from vitral.data.registry.fetch import list_datasets as list_datasets
    from vitral.data.registry.fetch import local_files as local_files
    from vitral.data.registry.sources import BUILTIN_DATASETS as BUILTIN_DATASETS

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Dataset": "datasets",
        "Split": "datasets",
        "load": "dataset_loading",
        "BUILTIN_DATASETS": "registry.sources",
        "fetch": "registry.fetch",
        "list_datasets": "registry.fetch",
        "local_files": "registry.fetch",
    },
)
