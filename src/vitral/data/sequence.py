"""Any Python sequence of (image, label) as a Dataset: torchvision's and Hugging Face's data sets as they are.

An item is a pair, or a row like {"image": …, "label": …}. An image is Pillow's, an array or tensor (H W, H W C or
C H W; whole numbers to 255 or fractions to 1), bytes, or a path. A label is a number or a name. Class names come from
`.classes`, from `.features["label"].names`, or from the labels themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.data.datasets import VALIDATION_SEED, Dataset, Split, stratified
from vitral.data.decode import NotAnImage, decode
from vitral.data.files.duplicates import grouped, near_pairs, thumbnail
from vitral.data.files.file_dataset import PREFIX, SPLITS, Reading, stored_like
from vitral.data.files.packed import check_share, settle, stand_in
from vitral.data.files.stream import complain
from vitral.data.lazy_images import Images, Pixels
from vitral.data.preprocess import Preprocessing
from vitral.data.registry.download import progress_bars
from vitral.errors import VitralError

MOST_HELD = 2 * 2**30  # bytes of decoded images that are held in memory; of a larger set, each is asked for when needed
IMAGES, LABELS = ("image", "img", "pixels"), ("label", "labels", "fine_label", "target", "class")


class Items(Protocol):
    """What a list, torchvision's and Hugging Face's data sets have in common."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def is_sequence(data: object) -> TypeGuard[Items]:
    return (
        isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | Path | Mapping)
    )


def check_sequence(data: object) -> None:
    """Refuse what is neither a name nor a sequence."""
    if data is None or isinstance(data, str | Path) or is_sequence(data):
        return
    kind = type(data).__name__
    if isinstance(data, Mapping) and data:
        some = next((key for key in data if SPLITS.get(str(key)) == "train"), next(iter(data)))
        raise VitralError(f"a {kind} of {', '.join(map(str, data))} is several data sets", f"give one: data[{some!r}]")
    raise VitralError(f"a {kind} is no data set", "a folder, a known set, or what has len(data) and data[i] does")


def name_of(data: Items) -> str:
    return PREFIX + type(data).__name__


def load_sequence(
    data: Items, preprocessing: Preprocessing, *, validation: float, how: Reading, progress: bool = False
) -> Dataset:
    """A Dataset with a share held out for validation, copies of one picture kept on one side."""
    stored = stored_like(preprocessing)
    said = _labels(data)
    classes = _classes(data, said)
    number = {name: index for index, name in enumerate(classes)}
    try:
        labels = np.array([label if isinstance(label, int) and _named(data) else number[str(label)] for label in said])
    except KeyError as error:
        raise VitralError(
            f"the label {error} is none of the classes {', '.join(classes[:8])}",
            "labels are those names, or their numbers from 0",
        ) from None
    if not len(labels) or not 0 <= labels.min() <= labels.max() < len(classes) or len(classes) < 2:
        raise VitralError(
            f"{len(labels):,} items with {len(classes)} classes: at least two classes are needed",
            "an item is (image, label)",
        )
    whole: Pixels
    if len(labels) * int(np.prod(stored.shape)) <= MOST_HELD:
        with progress_bars(progress, "images") as meter:
            images, small, troubles = _held(data, stored, partial(meter, "reading"))
        check_share(troubles.values(), len(labels), how.unreadable)
        labels = settle(images, labels, troubles, keep_count=True)
        groups = grouped(len(labels), near_pairs(small))
        whole, note = torch.from_numpy(images), f"{len(troubles)} unreadable replaced" if troubles else ""
        mark = hashlib.sha256(images.data)
    else:
        whole, groups = Asked(data, labels, stored, how.unreadable), np.arange(len(labels))
        note = f"larger than {MOST_HELD / 2**30:g} GiB: asked for as needed, near-duplicates not looked for"
        mark = hashlib.sha256(b"by labels")  # all pixels would have to be asked for
    mark.update(repr((classes, stored)).encode() + labels.tobytes())
    out = stratified(labels, validation, seed=VALIDATION_SEED, groups=groups)
    parts = []
    for rows in (torch.from_numpy(np.flatnonzero(side)) for side in (~out, out)):
        part = whole[rows] if isinstance(whole, Tensor) else Chosen(whole, rows)
        parts.append(Split(images=part, labels=torch.from_numpy(labels)[rows]))
    return Dataset(
        name=name_of(data),
        classes=classes,
        train=parts[0],
        validation=parts[1],
        source="; ".join(filter(None, [f"{validation:.0%} held out for validation", note])),
        fingerprint=mark.hexdigest()[:16],
        read_test=lambda: Split(images=torch.zeros(0, *stored.shape, dtype=torch.uint8), labels=torch.zeros(0).long()),
    )


class Asked(Images):
    """Images that are asked from the sequence each time: by one thread, a batch ahead, for few are made for more."""

    def __init__(self, data: Items, labels: np.ndarray[Any, Any], stored: Preprocessing, unreadable: float) -> None:
        self.data, self.labels, self.stored, self.unreadable = data, labels, stored, unreadable
        self.shape = (len(labels), *stored.shape)
        self.troubles: dict[int, str] = {}

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        with ThreadPoolExecutor(1) as thread:
            ahead = None
            for rows in chain(chosen, [None]):
                ready, ahead = ahead, None if rows is None else thread.submit(self._batch, rows.tolist())
                if ready is not None:
                    yield ready.result()

    def _batch(self, rows: Sequence[int]) -> Tensor:
        found = torch.empty(len(rows), *self.stored.shape, dtype=torch.uint8)
        for place, row in enumerate(rows):
            found[place] = self._one(row)
        return found

    def _one(self, row: int) -> Tensor:
        while True:
            asked = stand_in(row, self.labels, self.troubles) if row in self.troubles else row
            try:
                return self.stored.pixels(picture_of(pair_of(self.data[asked])[0]))
            except NotAnImage as error:
                self.troubles[asked] = f"item {asked}: {error.what}"
                complain(self.troubles[asked])
                check_share(self.troubles.values(), len(self), self.unreadable)


class Chosen(Images):
    """Some of a set's images."""

    def __init__(self, images: Images, rows: Tensor) -> None:
        self.images, self.rows, self.shape = images, rows, (len(rows), *images.shape[1:])

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        return self.images.batches(self.rows[part] for part in chosen)


def _held(
    data: Items, stored: Preprocessing, done: Callable[[int, int], None]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], dict[int, str]]:
    """All images as they are stored, their thumbnails, and what was wrong with which."""
    images = np.zeros((len(data), *stored.shape), dtype=np.uint8)
    small = np.zeros((len(data), 32, 32, 3), dtype=np.uint8)
    troubles = {}
    for index in range(len(data)):
        try:
            picture = picture_of(pair_of(data[index])[0])
            images[index], small[index] = stored.pixels(picture), thumbnail(picture)
        except NotAnImage as error:
            troubles[index] = f"item {index}: {error.what}"
        done(index + 1, len(data))
    return images, small, troubles


def pair_of(item: Any) -> tuple[Any, Any]:
    """Image and label of an item."""
    if isinstance(item, Mapping):
        image, label = (next((key for key in keys if key in item), None) for keys in (IMAGES, LABELS))
        if image is None or label is None:
            raise VitralError(f"an item has the fields {', '.join(map(str, item))}", "it needs 'image' and 'label'")
        return item[image], item[label]
    if isinstance(item, Sequence) and len(item) >= 2 and not isinstance(item, str | bytes):
        return item[0], item[1]
    raise VitralError(f"an item is a {type(item).__name__}", "it must be (image, label) or {'image': …, 'label': …}")


def picture_of(image: Any) -> Image.Image:
    """Whatever an image is, as an upright 8-bit picture: a file, bytes, one of Pillow's, or an array of H W, H W C or
    C H W with bytes or with fractions from 0 to 1."""
    if isinstance(image, Image.Image | str | Path | bytes):
        return decode(image)
    try:
        values = np.asarray(image)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotAnImage(f"{type(image).__name__} is no image ({error})") from error
    if not values.ndim:
        raise NotAnImage(f"{type(image).__name__} is no image")
    if values.ndim == 3 and values.shape[2] not in (1, 3, 4) and values.shape[0] in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if isinstance(image, Tensor) and image.ndim == 3 and image.shape[0] in (1, 3, 4):  # torch's order goes first
        values = np.asarray(image).transpose(1, 2, 0)
    if values.ndim not in (2, 3) or not values.size or (values.ndim == 3 and values.shape[2] not in (1, 3, 4)):
        raise NotAnImage(f"an array of shape {'×'.join(map(str, values.shape))} and type {values.dtype} is no image")
    if values.dtype.kind == "f":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            if values.min() >= 0 and 1 < values.max() <= 255:
                raise VitralError(
                    "an image of fractions has values up to 255, not to 1", "divide it by 255, or make it uint8"
                )
            raise VitralError(
                "an image of fractions has values outside 0 to 1: it seems to be normalised already",
                "leave normalising to vitral: it belongs to the model",
            )
        values = (values * 255).round()
    if values.dtype.kind not in "uifb" or values.min() < 0 or values.max() > 255:
        raise NotAnImage(f"an array of {values.dtype} with values outside 0 to 255 is no image")
    values = values.astype(np.uint8) if values.dtype.kind != "b" else values.astype(np.uint8) * 255
    return decode(Image.fromarray(values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values))


def _labels(data: Items) -> list[int | str]:
    """The label of each item, without asking for its image where the sequence offers that."""
    found: Any = getattr(data, "targets", None)  # torchvision
    if found is None and hasattr(data, "column_names"):  # Hugging Face
        column = next((name for name in LABELS if name in data.column_names), None)
        found = data[column] if column else None  # type: ignore[index]
    if found is None or len(found) != len(data):
        found = [pair_of(data[index])[1] for index in range(len(data))]
    return [_plain(label) for label in found]


def _plain(label: Any) -> int | str:
    if isinstance(label, np.generic | Tensor):
        label = label.item()
    if isinstance(label, int | str) and not isinstance(label, bool):
        return label
    raise VitralError(f"a label is {label!r}", "it must be a whole number or a name")


def _named(data: Items) -> tuple[str, ...] | None:
    """The names that the sequence itself gives its numbers."""
    names: Any = getattr(data, "classes", None)
    features = getattr(data, "features", None)
    if names is None and isinstance(features, Mapping):
        column = next((name for name in LABELS if name in features), None)
        names = getattr(features[column], "names", None) if column else None
    return tuple(map(str, names)) if names else None


def _classes(data: Items, labels: Sequence[int | str]) -> tuple[str, ...]:
    if (named := _named(data)) is not None:
        return named
    numbers = sorted({label for label in labels if isinstance(label, int)})
    return (*map(str, numbers), *sorted({label for label in labels if isinstance(label, str)}))
