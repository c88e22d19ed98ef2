"""Known sets as tensors, from tiny synthetic files laid into a cache of the test's own."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vitral.data
from vitral.data import datasets
from vitral.data.datasets import CLASSES, load, read_cifar, read_idx, stratified
from vitral.data.registry import sources
from vitral.data.registry.download import File
from vitral.data.registry.fetchers import FileSet
from vitral.errors import VitralError


def idx(values: np.ndarray[Any, Any]) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in values.shape)
    return bytes([0, 0, 8, values.ndim]) + lengths + values.tobytes()


def lay_down(folder: Path, content: dict[str, bytes]) -> tuple[File, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in content.items():
        (folder / name).write_bytes(body)
    return tuple(
        File(name=name, size=len(body), digest=f"sha256:{hashlib.sha256(body).hexdigest()}")
        for name, body in content.items()
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def tiny_mnist(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """100 training and 20 test images of 28×28 in place of MNIST; returns their folder."""
    random = np.random.default_rng(0)
    content = {}
    for prefix, count in (("train", 100), ("t10k", 20)):
        content[f"{prefix}-images"] = idx(random.integers(0, 256, (count, 28, 28), np.uint8))
        content[f"{prefix}-labels"] = idx(np.arange(count, dtype=np.uint8) % 10)
    files = lay_down(cache / "Tiny", content)
    tiny = FileSet(folder="Tiny", train=files[:2], test=files[2:], ways=())
    monkeypatch.setitem(sources.SETS, "mnist", tiny)
    return cache / "Tiny"


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_load_gives_bytes_and_labels_in_their_shapes(tiny_mnist):
    mnist = load("mnist", validation=0.2)
    assert (mnist.name, mnist.classes, mnist.source) == ("mnist", tuple("0123456789"), "from the cache")
    assert (len(mnist.train), len(mnist.validation), len(mnist.test)) == (80, 20, 20)
    for split in (mnist.train, mnist.validation, mnist.test):
        assert (split.images.dtype, split.labels.dtype) == (torch.uint8, torch.int64)
        assert split.images.shape == (len(split), 1, 28, 28)
        assert split.images.is_contiguous()
    assert repr(mnist.train) == "Split(80 images of 1×28×28)"


def test_images_keep_their_labels(tiny_mnist):
    images = read_idx(tiny_mnist / "train-images")
    label_of = {image.tobytes(): number % 10 for number, image in enumerate(images)}
    mnist = load("mnist")
    for split in (mnist.train, mnist.validation):
        assert [label_of[image.numpy().tobytes()] for image in split.images] == split.labels.tolist()


def test_the_test_files_are_not_opened_before_they_are_asked_for(tiny_mnist):
    for name in ("t10k-images", "t10k-labels"):
        (tiny_mnist / name).rename(tiny_mnist / f"{name}.hidden")
    mnist = load("mnist")
    for name in ("t10k-images", "t10k-labels"):
        (tiny_mnist / f"{name}.hidden").rename(tiny_mnist / name)
    assert len(mnist.test) == 20
    assert mnist.test is mnist.test


def test_the_split_heeds_no_seed_but_its_own(tiny_mnist):
    torch.manual_seed(1)
    np.random.seed(1)
    one = load("mnist")
    torch.manual_seed(2)
    np.random.seed(2)
    drawn = torch.random.get_rng_state()
    two = load("mnist")
    assert torch.equal(one.validation.images, two.validation.images)
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_the_fingerprint_is_of_the_data_not_of_the_split(tiny_mnist, monkeypatch):
    before = load("mnist").fingerprint
    assert load("mnist", validation=0.3).fingerprint == before
    assert len(before) == 16
    labels = read_idx(tiny_mnist / "train-labels").copy()
    labels[0] = 7
    train = sources.SETS["mnist"].train[:1] + lay_down(tiny_mnist, {"train-labels": idx(labels)})
    changed = FileSet(folder="Tiny", train=train, test=sources.SETS["mnist"].test, ways=())
    monkeypatch.setitem(sources.SETS, "mnist", changed)
    assert load("mnist").fingerprint != before


def test_without_validation_everything_is_for_training(tiny_mnist):
    mnist = load("mnist", validation=0)
    assert (len(mnist.train), len(mnist.validation)) == (100, 0)
    assert mnist.validation.images.shape == (0, 1, 28, 28)


@pytest.mark.parametrize("share", [-0.1, 1, 7.5, float("nan")])
def test_an_impossible_share_is_named(share):
    with pytest.raises(VitralError, match=f"validation is {share}"):
        load("mnist", validation=share)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(
        VitralError, match=r"no data set or folder named 'fashion_mnist'\. Did you mean fashion-mnist\?"
    ):
        load("fashion_mnist")


def test_digits_needs_no_network_and_no_cache(monkeypatch, cache):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("digits went to the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    digits = load("digits")
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1294, 144, 359)
    assert digits.train.images.shape[1:] == (1, 8, 8)
    assert (digits.train.images.min(), digits.train.images.max()) == (0, 255)
    assert digits.source == "from scikit-learn"
    assert torch.bincount(digits.test.labels).min() >= 34
    assert not cache.exists()


def test_class_names():
    assert list(CLASSES) == list(sources.KNOWN)
    assert {name: len(classes) for name, classes in CLASSES.items()} == {
        "digits": 10, "mnist": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100,
    }  # fmt: skip
    assert CLASSES["fashion-mnist"][0] == "T-shirt/top"
    assert list(CLASSES["cifar100"]) == sorted(set(CLASSES["cifar100"]))  # the official order


def test_the_package_hands_names_on_without_importing_torch():
    script = "import sys, vitral.data; vitral.data.KNOWN; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert vitral.data.load is datasets.load
    assert {"load", "fetch", "where", "catalogue", "KNOWN", "Dataset", "Split"} <= set(dir(vitral.data))
    with pytest.raises(AttributeError, match="lod"):
        vitral.data.lod  # noqa: B018


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_idx_round_trip(tmp_path_factory, shape, seed):
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    path = tmp_path_factory.mktemp("idx") / "values"
    path.write_bytes(idx(values))
    assert np.array_equal(read_idx(path), values)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00\x0d\x01", b"\x00\x00\x08\x01\x00\x00\x00\x05abc", b"\x00\x00\x08\x03"]
)
def test_what_is_no_idx_file_is_named(tmp_path, content):
    (tmp_path / "broken").write_bytes(content)
    with pytest.raises(VitralError, match="broken"):
        read_idx(tmp_path / "broken")


@pytest.mark.parametrize(("name", "label_bytes"), [("cifar10", 1), ("cifar100", 2)])
def test_cifar_records(cache, monkeypatch, name, label_bytes):
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), np.uint8)
    labels = np.array([5, 1, 4, 1, 5, 9], np.uint8)
    heads = np.stack([labels + 10] * (label_bytes - 1) + [labels], axis=1)  # the coarse label comes first
    records = np.concatenate([heads, images.reshape(6, -1)], axis=1)
    files = lay_down(cache / "tiny", {"a.bin": records[:4].tobytes(), "b.bin": records[4:].tobytes()})
    split = read_cifar([cache / "tiny" / file.name for file in files], label_bytes=label_bytes)
    assert np.array_equal(split.images.numpy(), images)
    assert split.labels.tolist() == labels.tolist()

    monkeypatch.setitem(sources.SETS, name, FileSet(folder="tiny", train=files[:1], test=files[1:], ways=()))
    loaded = load(name, validation=0)
    assert np.array_equal(loaded.train.images.numpy(), images[:4])
    assert loaded.test.labels.tolist() == [5, 9]


# ── the split ────────────────────────────────────────────────────────────────────────────────────────────────

LABELS = st.lists(st.integers(0, 9), max_size=300).map(lambda labels: np.array(labels, dtype=np.int64))


@given(labels=LABELS, fraction=st.floats(0, 0.999))
def test_split_is_exact_and_stratified(labels, fraction):
    held_out = stratified(labels, fraction, seed=0)
    assert held_out.sum() == round(fraction * len(labels))
    for label in np.unique(labels):
        of_class = labels == label
        assert abs(held_out[of_class].sum() - fraction * of_class.sum()) <= 1


@given(labels=LABELS, fraction=st.floats(0, 0.999), seed=st.integers(0, 5))
def test_split_is_fixed_disjoint_and_complete(labels, fraction, seed):
    held_out = stratified(labels, fraction, seed=seed)
    assert np.array_equal(held_out, stratified(labels, fraction, seed=seed))
    numbered = datasets.Split(images=torch.arange(len(labels)), labels=torch.from_numpy(labels))
    rest, chosen = datasets._part(numbered, held_out)
    assert sorted([*rest.images.tolist(), *chosen.images.tolist()]) == list(range(len(labels)))
    assert rest.images.tolist() == sorted(rest.images.tolist())


def test_split_never_changes_between_versions():
    """If this fails, every validation figure ever published with vitral was measured on other images."""
    held_out = stratified(np.arange(1_000) % 10, 0.1, seed=datasets.VALIDATION_SEED)
    assert hashlib.sha256(held_out.tobytes()).hexdigest()[:16] == "39243dbb377d52f9"
