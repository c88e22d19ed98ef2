from __future__ import annotations

from pathlib import Path

import pytest

from vitral import bundled
from vitral.errors import VitralError
from vitral.runs.model_io import load_model
from vitral.weights.io import write


def test_a_conversion_that_is_not_supported_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="hybrid"):
        write(load_model(bundled.BUNDLED_DIR / "cifar10"), tmp_path / "converted", "timm")
    assert list(tmp_path.iterdir()) == []
