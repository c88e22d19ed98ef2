"""The number of CPUs under affinity masks and cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitral.device.cpu import available_cpus, busy_warning, cpu_name


@pytest.fixture(autouse=True)
def affinity_of_64_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


@pytest.mark.parametrize(
    ("cpu_max", "expected"), [("250000 100000", 2), ("max 100000", 64), ("50000 100000", 1), ("", 64)]
)
def test_cgroup_v2_quota_limits_the_cpus(tmp_path: Path, cpu_max: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert available_cpus(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("400000", 4), ("-1", 64), ("10000", 1), ("9900000", 64)])
def test_cgroup_v1_quota_limits_the_cpus(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_cpus(tmp_path) == expected


def test_without_a_cgroup_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == 64


def test_busy_warning_appears_when_the_load_exceeds_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = available_cpus()
    monkeypatch.setattr(os, "getloadavg", lambda: (cpus + 1.5, 0.0, 0.0), raising=False)
    warning = busy_warning()
    assert warning is not None
    assert f"load {cpus + 1.5:.1f} on {cpus} cores" in warning
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0), raising=False)
    assert busy_warning() is None


def test_cpu_name_ends_with_the_number_of_cores() -> None:
    assert cpu_name().split(", ")[-1].endswith(("core", "cores"))
