"""Built-in datasets as tensors, from small synthetic files in a temporary cache."""

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
from vitral.data import dataset_loading, datasets
from vitral.data.datasets import load_builtin_dataset, stratified_holdout
from vitral.data.registry import sources
from vitral.data.registry.checksums import ChecksummedFile
from vitral.data.registry.fetchers import DatasetFiles
from vitral.data.registry.formats import load_digits, read_cifar, read_idx
from vitral.data.registry.sources import CLASS_NAMES
from vitral.errors import VitralError


def encode_idx(values: np.ndarray[Any, Any]) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in values.shape)
    return bytes([0, 0, 8, values.ndim]) + lengths + values.tobytes()


def write_files(folder: Path, content: dict[str, bytes]) -> tuple[ChecksummedFile, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in content.items():
        (folder / name).write_bytes(body)
    return tuple(
        ChecksummedFile(name=name, size=len(body), digest=f"sha256:{hashlib.sha256(body).hexdigest()}")
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
    """Replace MNIST by 100 training and 20 test images of 28×28; returns their folder."""
    random = np.random.default_rng(0)
    content = {}
    for prefix, count in (("train", 100), ("t10k", 20)):
        content[f"{prefix}-images"] = encode_idx(random.integers(0, 256, (count, 28, 28), np.uint8))
        content[f"{prefix}-labels"] = encode_idx(np.arange(count, dtype=np.uint8) % 10)
    files = write_files(cache / "Tiny", content)
    tiny = DatasetFiles(folder="Tiny", train=files[:2], test=files[2:], fetchers=())
    monkeypatch.setitem(sources.DATASET_FILES, "mnist", tiny)
    return cache / "Tiny"


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_load_returns_uint8_images_and_int64_labels(tiny_mnist):
    mnist = load_builtin_dataset("mnist", validation=0.2)
    assert (mnist.name, mnist.classes, mnist.source) == ("mnist", tuple("0123456789"), "from the cache")
    assert (len(mnist.train), len(mnist.validation), len(mnist.test)) == (80, 20, 20)
    for split in (mnist.train, mnist.validation, mnist.test):
        assert isinstance(split.images, torch.Tensor)
        assert (split.images.dtype, split.labels.dtype) == (torch.uint8, torch.int64)
        assert split.images.shape == (len(split), 1, 28, 28)
        assert split.images.is_contiguous()
    assert repr(mnist.train) == "Split(80 images of 1×28×28)"


def test_images_keep_their_labels(tiny_mnist):
    images = read_idx(tiny_mnist / "train-images")
    labels = {image.tobytes(): index % 10 for index, image in enumerate(images)}
    mnist = load_builtin_dataset("mnist")
    for split in (mnist.train, mnist.validation):
        assert [labels[image.numpy().tobytes()] for image in split.images[:]] == split.labels.tolist()


def test_test_files_are_read_on_first_access(tiny_mnist):
    for name in ("t10k-images", "t10k-labels"):
        (tiny_mnist / name).rename(tiny_mnist / f"{name}.hidden")
    mnist = load_builtin_dataset("mnist")
    for name in ("t10k-images", "t10k-labels"):
        (tiny_mnist / f"{name}.hidden").rename(tiny_mnist / name)
    assert len(mnist.test) == 20
    assert mnist.test is mnist.test


def test_validation_split_is_independent_of_global_seeds(tiny_mnist):
    torch.manual_seed(1)
    np.random.seed(1)
    first = load_builtin_dataset("mnist")
    torch.manual_seed(2)
    np.random.seed(2)
    rng_state = torch.random.get_rng_state()
    second = load_builtin_dataset("mnist")
    assert torch.equal(first.validation.images[:], second.validation.images[:])
    assert torch.equal(torch.random.get_rng_state(), rng_state)


def test_fingerprint_depends_on_the_data_and_not_on_the_split(tiny_mnist, monkeypatch):
    before = load_builtin_dataset("mnist").fingerprint
    assert load_builtin_dataset("mnist", validation=0.3).fingerprint == before
    assert len(before) == 16
    labels = read_idx(tiny_mnist / "train-labels").copy()
    labels[0] = 7
    train = sources.DATASET_FILES["mnist"].train[:1] + write_files(tiny_mnist, {"train-labels": encode_idx(labels)})
    changed = DatasetFiles(folder="Tiny", train=train, test=sources.DATASET_FILES["mnist"].test, fetchers=())
    monkeypatch.setitem(sources.DATASET_FILES, "mnist", changed)
    assert load_builtin_dataset("mnist").fingerprint != before


def test_validation_fraction_may_be_zero(tiny_mnist):
    mnist = load_builtin_dataset("mnist", validation=0)
    assert (len(mnist.train), len(mnist.validation)) == (100, 0)
    assert mnist.validation.images.shape == (0, 1, 28, 28)


@pytest.mark.parametrize("fraction", [-0.1, 1, 7.5, float("nan")])
def test_invalid_validation_fraction_is_an_error(fraction):
    with pytest.raises(VitralError, match=f"validation is {fraction}"):
        load_builtin_dataset("mnist", validation=fraction)


def test_unknown_name_is_an_error_with_a_suggestion():
    message = r"no dataset or folder named 'fashion_mnist'\. Did you mean '?fashion-mnist'?\?"
    with pytest.raises(VitralError, match=message) as caught:
        load_builtin_dataset("fashion_mnist")
    assert "Built-in datasets: digits, mnist, " in caught.value.hint


def test_digits_needs_no_network_and_no_cache(monkeypatch, cache):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("network access")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(subprocess, "Popen", fail)
    digits = load_builtin_dataset("digits")
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1294, 144, 359)
    assert digits.train.images.shape[1:] == (1, 8, 8)
    pixels = digits.train.images[:]
    assert (int(pixels.min()), int(pixels.max())) == (0, 255)
    assert digits.source == "from scikit-learn"
    assert torch.bincount(digits.test.labels).min() >= 34
    assert not cache.exists()


@pytest.mark.slow
def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits as load_reference

    expected = load_reference()
    images, labels = load_digits()
    assert np.array_equal(images[:, 0], np.rint(expected.images * (255 / 16)))
    assert np.array_equal(labels, expected.target)


def test_class_names_are_complete():
    assert list(CLASS_NAMES) == list(sources.BUILTIN_DATASETS)
    assert {name: len(classes) for name, classes in CLASS_NAMES.items()} == {
        "digits": 10, "mnist": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100,
    }  # fmt: skip
    assert CLASS_NAMES["fashion-mnist"][0] == "T-shirt/top"
    assert list(CLASS_NAMES["cifar100"]) == sorted(set(CLASS_NAMES["cifar100"]))  # the official order


def test_importing_the_package_does_not_import_torch():
    script = "import sys, vitral.data; vitral.data.BUILTIN_DATASETS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert vitral.data.load is dataset_loading.load
    names = {"load", "fetch", "local_files", "list_datasets", "BUILTIN_DATASETS", "Dataset", "Split"}
    assert names <= set(dir(vitral.data))
    with pytest.raises(AttributeError, match="lod"):
        vitral.data.lod  # noqa: B018


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_idx_round_trip(tmp_path_factory, shape, seed):
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    path = tmp_path_factory.mktemp("idx") / "values"
    path.write_bytes(encode_idx(values))
    assert np.array_equal(read_idx(path), values)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00\x0d\x01", b"\x00\x00\x08\x01\x00\x00\x00\x05abc", b"\x00\x00\x08\x03"]
)
def test_invalid_idx_file_is_an_error_with_its_path(tmp_path, content):
    (tmp_path / "broken").write_bytes(content)
    with pytest.raises(VitralError, match="broken"):
        read_idx(tmp_path / "broken")


@pytest.mark.parametrize(("name", "label_bytes"), [("cifar10", 1), ("cifar100", 2)])
def test_cifar_records_are_read_and_loaded(cache, monkeypatch, name, label_bytes):
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), np.uint8)
    labels = np.array([5, 1, 4, 1, 5, 9], np.uint8)
    label_columns = np.stack([labels + 10] * (label_bytes - 1) + [labels], axis=1)  # coarse, fine
    records = np.concatenate([label_columns, images.reshape(6, -1)], axis=1)
    files = write_files(cache / "tiny", {"a.bin": records[:4].tobytes(), "b.bin": records[4:].tobytes()})
    paths = [cache / "tiny" / file.name for file in files]
    read_images, read_labels = read_cifar(paths, label_bytes=label_bytes)
    assert np.array_equal(read_images, images)
    assert read_labels.tolist() == labels.tolist()

    tiny = DatasetFiles(folder="tiny", train=files[:1], test=files[1:], fetchers=())
    monkeypatch.setitem(sources.DATASET_FILES, name, tiny)
    loaded = load_builtin_dataset(name, validation=0)
    assert np.array_equal(loaded.train.images[:].numpy(), images[:4])
    assert loaded.test.labels.tolist() == [5, 9]


# ── holdout ──────────────────────────────────────────────────────────────────────────────────────────────────

LABELS = st.lists(st.integers(0, 9), max_size=300).map(lambda labels: np.array(labels, dtype=np.int64))


@given(labels=LABELS, fraction=st.floats(0, 0.999))
def test_holdout_is_exact_and_stratified(labels, fraction):
    held_out = stratified_holdout(labels, fraction, seed=0)
    used_up = 0  # classes of which all images but one are held out
    for label in np.unique(labels):
        in_class = labels == label
        assert abs(held_out[in_class].sum() - fraction * in_class.sum()) <= 1
        assert held_out[in_class].sum() < in_class.sum(), "a class keeps at least one training image"
        used_up += held_out[in_class].sum() == in_class.sum() - 1
    assert round(fraction * len(labels)) - used_up <= held_out.sum() <= round(fraction * len(labels))


def test_only_image_of_a_class_is_trained_on():
    labels = np.arange(10)  # 1.5 images would be held out
    assert not stratified_holdout(labels, 0.15, seed=0).any()
    assert not stratified_holdout(labels, 0.15, seed=0, groups=np.arange(10) // 2).any()


@given(labels=LABELS, fraction=st.floats(0, 0.999), seed=st.integers(0, 5))
def test_holdout_is_reproducible_and_partitions_the_images(labels, fraction, seed):
    held_out = stratified_holdout(labels, fraction, seed=seed)
    assert np.array_equal(held_out, stratified_holdout(labels, fraction, seed=seed))
    numbered = datasets.Split(images=torch.arange(len(labels)), labels=torch.from_numpy(labels))
    remaining, chosen = datasets._partition(numbered, held_out)
    assert sorted([*remaining.images[:].tolist(), *chosen.images[:].tolist()]) == list(range(len(labels)))
    assert remaining.images[:].tolist() == sorted(remaining.images[:].tolist())


def test_holdout_never_changes_between_versions():
    """If this fails, validation results of earlier versions were measured on different images."""
    held_out = stratified_holdout(np.arange(1_000) % 10, 0.1, seed=datasets.VALIDATION_SEED)
    assert hashlib.sha256(held_out.tobytes()).hexdigest()[:16] == "39243dbb377d52f9"
