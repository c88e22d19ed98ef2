"""Class names and class indices."""

from __future__ import annotations

import pytest
import torch

from vitral.data.classes import class_index_map, class_indices


def test_index_is_the_position_of_the_name():
    assert class_index_map(("ants", "bees", "wasps")) == {"ants": 0, "bees": 1, "wasps": 2}


def test_labels_are_converted_by_name():
    mapping = class_indices(("wasps", "ants"), ("ants", "bees", "wasps"))
    assert mapping[torch.tensor([0, 1, 1, 0])].tolist() == [2, 0, 0, 2]
    assert class_indices((), ("ants",)).dtype == torch.int64
    with pytest.raises(KeyError, match="aphids"):
        class_indices(("aphids",), ("ants", "bees"))
