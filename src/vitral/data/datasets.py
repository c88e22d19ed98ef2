"""Known data sets as tensors: `load("mnist")`.

They fit into memory, so their splits are two tensors and nothing else; other sets' images may be read as they are
asked for (`vitral.data.lazy_images`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.lazy_images import Pixels
from vitral.data.registry.sources import KNOWN, check_name, obtain
from vitral.errors import VitralError

__all__ = ["KNOWN", "Dataset", "Split", "load"]

# Every run on every machine holds out the same images, whatever its own seed: results stay comparable, and no image
# of the validation split was ever trained on by an earlier run.
VALIDATION_SEED = 2010_11929
TEST_SEED = 2021  # digits only: it comes without an official test set

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Images and their labels, in the order of the official files."""

    images: Pixels  # uint8, N C H W
    labels: Tensor  # int64, N

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images of {'×'.join(map(str, self.images.shape[1:]))})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A known set. The test set is read once, at the end: its files are not opened before `test` is asked for."""

    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split
    source: str  # for people: "from the package registry (official mirror: no route to host)"
    fingerprint: str  # of the training pixels and labels before the split; the same wherever the files came from
    read_test: Callable[[], Split] = field(repr=False)

    @cached_property
    def test(self) -> Split:
        return self.read_test()


def load(name: str, *, validation: float = 0.1, progress: bool = False) -> Dataset:
    """A known set by name, from the cache or fetched; a share of the training images held out for validation."""
    check_name(name)
    if not 0 <= validation < 1:
        raise VitralError(
            f"validation is {validation}; it is the share of the training images to hold out",
            "Give a number from 0 to below 1, such as 0.1",
        )
    if name == "digits":
        whole, test = _digits()
        source, read_test = "from scikit-learn", lambda: test
    else:
        read = READERS[name]
        found = obtain(name, "train", progress=progress)
        whole, source = read(found.paths), found.source

        def read_test() -> Split:
            return read(obtain(name, "test", progress=progress).paths)

    train, held_out = _part(whole, stratified(whole.labels.numpy(), validation, seed=VALIDATION_SEED))
    return Dataset(
        name=name,
        classes=CLASSES[name],
        train=train,
        validation=held_out,
        source=source,
        fingerprint=_fingerprint(whole),
        read_test=read_test,
    )


def stratified(
    labels: np.ndarray[Any, Any], fraction: float, *, seed: int, groups: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which images to hold out: round(fraction · N) in all, and of each class its share to within one image.

    Each class gives the whole part of its share; the images still lacking come from the classes whose shares were
    cut most. RandomState, because NumPy promises that its stream never changes (NEP 19); `default_rng` may.
    `groups` numbers copies of one picture alike: they stay on one side, and a class may then give a few images less.
    """
    random = np.random.RandomState(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    shares = np.array([fraction * len(of_class) for of_class in members])
    counts = np.floor(shares).astype(int)
    lacking = round(fraction * len(labels)) - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:lacking]] += 1
    held_out = np.zeros(len(labels), dtype=np.bool_)
    if groups is not None and len(np.unique(groups)) < len(labels):
        room = dict(zip(np.unique(labels).tolist(), counts.tolist(), strict=True))
        order = np.argsort(groups, kind="stable")
        wholes = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
        for index in random.permutation(len(wholes)):  # each in turn, if there is still room for all of it
            wanted = Counter(labels[wholes[index]].tolist())
            if all(count <= room[label] for label, count in wanted.items()):
                held_out[wholes[index]] = True
                for label, count in wanted.items():
                    room[label] -= count
        return held_out
    for of_class, count in zip(members, counts, strict=True):
        held_out[random.permutation(of_class)[:count]] = True
    return held_out


def _part(whole: Split, held_out: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Split, Split]:
    """(the rest, the held out), both in their old order."""
    rest, chosen = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held_out, held_out))
    return (
        Split(images=whole.images[rest], labels=whole.labels[rest]),
        Split(images=whole.images[chosen], labels=whole.labels[chosen]),
    )


def _fingerprint(split: Split) -> str:
    assert isinstance(split.images, Tensor)
    hashed = hashlib.sha256(repr(tuple(split.images.shape)).encode())
    hashed.update(split.images.numpy().data)
    hashed.update(split.labels.numpy().data)
    return hashed.hexdigest()[:16]


# ── from files to tensors ────────────────────────────────────────────────────────────────────────────────────


def read_idx(path: Path) -> Bytes:
    """MNIST's format: two zero bytes, 8 for 'unsigned bytes', the number of axes; their lengths; the values."""
    remedy = "Move it away; it will be fetched again"
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) < 4 or raw[:3].tolist() != [0, 0, 8]:
        raise VitralError(f"{path} is not an idx file of bytes", remedy)
    axes = int(raw[3])
    shape = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis].tobytes(), "big") for axis in range(axes)]
    values = raw[4 + 4 * axes :]
    if len(raw) < 4 + 4 * axes or len(values) != math.prod(shape):
        raise VitralError(f"{path} promises {'×'.join(map(str, shape))} bytes and has {len(values):,}", remedy)
    return values.reshape(shape)


def _read_idx_pair(paths: Sequence[Path]) -> Split:
    images, labels = (read_idx(path) for path in paths)
    return _split(images[:, None], labels)


def read_cifar(paths: Sequence[Path], *, label_bytes: int) -> Split:
    """CIFAR's binary version: the label bytes (the last one is the class), then 3072 bytes (C H W), for each image."""
    records = np.concatenate([np.fromfile(path, dtype=np.uint8).reshape(-1, label_bytes + 3072) for path in paths])
    return _split(records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1])


def _split(images: Bytes, labels: Bytes) -> Split:
    return Split(
        images=torch.from_numpy(np.ascontiguousarray(images)), labels=torch.from_numpy(labels.astype(np.int64))
    )


def _digits() -> tuple[Split, Split]:
    """scikit-learn's digits with values 0 … 16 spread over 0 … 255; a fixed fifth of them is the test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return _part(_split(images[:, None], digits.target), stratified(digits.target, 0.2, seed=TEST_SEED))


READERS: dict[str, Callable[[Sequence[Path]], Split]] = {
    "mnist": _read_idx_pair,
    "fashion-mnist": _read_idx_pair,
    "cifar10": lambda paths: read_cifar(paths, label_bytes=1),
    "cifar100": lambda paths: read_cifar(paths, label_bytes=2),  # coarse, fine
}

CLASSES: dict[str, tuple[str, ...]] = {
    "digits": tuple("0123456789"),
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
        "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
        "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
        "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard",
        "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
        "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
        "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
        "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
        "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
        "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    ),
}  # fmt: skip
