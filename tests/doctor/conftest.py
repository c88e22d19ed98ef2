from __future__ import annotations

from pathlib import Path

import pytest

from support.random_classes import save_random_classes


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Class folders without issues."""
    return save_random_classes(tmp_path / "photos", {"ants": 14, "bees": 12, "wasps": 12})


@pytest.fixture
def split_photos(tmp_path: Path) -> Path:
    """Class folders in train and val without issues."""
    save_random_classes(tmp_path / "split" / "train", {"ants": 14, "bees": 12})
    return save_random_classes(tmp_path / "split" / "val", {"ants": 4, "bees": 4}, seed=500_000).parent


@pytest.fixture
def fast_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.doctor.estimates.BENCHMARK_SECONDS", 0.0)
    monkeypatch.setattr("vitral.doctor.estimates.CPU_BENCHMARK_BATCH", 2)
