"""Cached teacher features: found again, computed again when damaged, bounded in size."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.distillation import STUDENT, TEACHER, preprocessing_of
from vitral.data.registry.cache import cache_dir
from vitral.ssl.teacher import TeacherFeatures
from vitral.training.distillation.feature_cache import FOLDER, cached_features, features_fingerprint

FEATURES = TeacherFeatures(torch.randn(8, 4), torch.randn(8, 4, 2, 2))
NUM_BYTES = 8 * 4 * 4 * 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path))
    return cache_dir() / FOLDER


def must_not_compute() -> TeacherFeatures:
    raise AssertionError("computed again")


def assert_equal(features: TeacherFeatures, expected: TeacherFeatures = FEATURES) -> None:
    assert torch.equal(features.pooled, expected.pooled)
    assert (features.patches is None) == (expected.patches is None)
    if features.patches is not None and expected.patches is not None:
        assert torch.equal(features.patches, expected.patches)


@pytest.mark.parametrize("features", [FEATURES, TeacherFeatures(FEATURES.pooled.bfloat16(), None)])
def test_features_are_read_again_bit_for_bit(features: TeacherFeatures) -> None:
    cached_features("a", 1e9, lambda: features)
    assert_equal(cached_features("a", 1e9, must_not_compute), features)


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_file_is_computed_again(cache: Path, damage: str) -> None:
    cached_features("a", 1e9, lambda: FEATURES)
    file = cache / "a.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "changed":
        content[-3] ^= 1
    file.write_bytes(bytes(content if damage == "changed" else content[:-40] if damage == "truncated" else b""))
    messages: list[str] = []
    assert_equal(cached_features("a", 1e9, lambda: FEATURES, log=messages.append))
    assert messages[0].startswith("cached teacher features are computed again")
    assert_equal(cached_features("a", 1e9, must_not_compute))


def test_least_recently_used_files_are_deleted(cache: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        cached_features(name, 1e9, lambda: FEATURES)
        os.utime(cache / f"{name}.safetensors", (1e9 - age, 1e9 - age))
    cached_features("old", 1e9, must_not_compute)  # used now
    file_size = (cache / "old.safetensors").stat().st_size
    cached_features("newest", 2 * file_size + NUM_BYTES, lambda: FEATURES)
    assert {file.stem for file in cache.iterdir()} == {"newest", "old", "new"}


def test_features_without_a_fingerprint_are_not_written(cache: Path) -> None:
    assert_equal(cached_features(None, 1e9, lambda: FEATURES))
    assert not cache.exists()


def test_only_one_rank_writes_and_all_compute_if_one_has_no_file(cache: Path) -> None:
    cached_features("a", 1e9, lambda: FEATURES, is_writer=False)
    assert not cache.exists()
    cached_features("a", 1e9, lambda: FEATURES)
    other = TeacherFeatures(torch.zeros(8, 4), None)
    assert_equal(cached_features("a", 1e9, lambda: other, agree=lambda found: False), other)


def test_cache_that_cannot_be_written_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "file"))
    messages: list[str] = []
    assert_equal(cached_features("a", 1e9, lambda: FEATURES, log=messages.append))
    assert messages[0].startswith("teacher features are not cached: cannot write")


def test_fingerprint_depends_on_everything_that_determines_the_features() -> None:
    teacher, student = preprocessing_of(TEACHER), preprocessing_of(STUDENT)
    base = ("sha", "data", teacher, student, torch.float32, True)
    others = [
        ("other", *base[1:]),
        ("sha", "other", *base[2:]),
        ("sha", "data", replace(teacher, mean=(0.1, 0.2, 0.3)), *base[3:]),
        ("sha", "data", teacher, replace(student, crop=0.9), torch.float32, True),
        ("sha", "data", teacher, replace(student, resize="pad"), torch.float32, True),
        ("sha", "data", teacher, student, torch.bfloat16, True),
        ("sha", "data", teacher, student, torch.float32, False),
    ]
    fingerprints = {features_fingerprint(*arguments) for arguments in (base, *others)}
    assert len(fingerprints) == 8
    assert features_fingerprint(*base) == features_fingerprint(*base)
