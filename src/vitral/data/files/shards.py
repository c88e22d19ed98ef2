"""WebDataset shards: tar files in which a picture and its label share a name. `shards/{train,val}-{000..003}.tar`

    000017.jpg  000017.cls      a number or a name         one picture each; members of other kinds are passed over
    000018.png  000018.json     {"label": "bee"}           .cls, .txt and .json give labels, in this order
    000019.webp 000019.txt      bee

The headers are read once and remembered, so that each picture is known by shard, place and length: any order can be
read, a position in an epoch is as exact as with files, and nothing in an archive is ever written to a path. Shards
elsewhere (http, https) are read through once for their index and then picture by picture, by byte ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from vitral.data.datasets import VALIDATION_SEED, stratified
from vitral.data.decode import SUFFIXES
from vitral.data.files.duplicates import grouped, near_pairs, thumbnails
from vitral.data.files.file_dataset import SPLITS, Labelled, Listed
from vitral.data.files.packed import write_text
from vitral.data.files.remote import MOST_IMAGE, is_url, opened, read_range, state_of
from vitral.data.files.worker import read_source
from vitral.data.files.workers import Source
from vitral.data.registry.sources import home
from vitral.errors import VitralError, nearest

LABELS = ("cls", "txt", "json")  # which is believed first
IN_JSON = ("label", "class", "cls", "class_name")
MOST_LABEL = 2**16  # bytes

Entry = tuple[int, int, str]  # offset and size of a picture, and its label


def looks_like_shards(name: str) -> bool:
    return re.search(r"\.tar(\.|$)", name) is not None


def listed_shards(pattern: str, validation: float) -> Listed:
    """The pictures in the shards a pattern means, with the splits that the shards' names say, or a share held out."""
    places = expanded(pattern)
    states = [state_of(place) if is_url(place) else _state_here(Path(place)) for place in places]
    found: dict[str, list[tuple[Source, str]]] = {"train": [], "validation": [], "test": []}
    for place, state, split in zip(places, states, splits_of(places), strict=True):
        found[split] += [(Source(place, offset, size), label) for offset, size, label in indexed(place, state)]
    classes = tuple(sorted({label for _, label in found["train"]}, key=_by_number))
    if len(classes) < 2:
        raise VitralError(
            f"the shards of {pattern} have {len(classes)} classes; at least two are needed",
            "a label is a member of the picture's name that ends in .cls, .txt or .json",
        )
    number = {name: index for index, name in enumerate(classes)}
    for split in ("validation", "test"):
        if strange := sorted({label for _, label in found[split]} - set(classes)):
            raise VitralError(
                f"the {split} shards have a class that the training shards lack: {strange[0]!r}."
                f"{nearest(strange[0], classes)}",
                "every class needs images to learn from",
            )
    items: dict[str, Sequence[Labelled]] = {
        split: [(source, number[label]) for source, label in pairs] for split, pairs in found.items()
    }
    source = f"from {len(places):,} shard{'s' if len(places) > 1 else ''}"
    if not items["validation"]:
        source += f", {validation:.0%} held out for validation"
        groups = None
        if any(map(is_url, places)):
            source += ", near-duplicates not looked for elsewhere"
        else:
            groups = _copies([source for source, _ in items["train"]])
        labels = np.array([label for _, label in items["train"]])
        out = stratified(labels, validation, seed=VALIDATION_SEED, groups=groups)
        items["validation"] = [item for item, held in zip(items["train"], out, strict=True) if held]
        items["train"] = [item for item, held in zip(items["train"], out, strict=True) if not held]
    return Listed(name=pattern, classes=classes, splits=items, source=source, state=states)


def expanded(pattern: str) -> list[str]:
    """`{000..003}` and `{train,val}` written out, as the webdataset library does it."""
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise VitralError("reading shards needs webdataset", "pip install 'vitral[data]'") from error
    places: list[str] = expand_urls(pattern)
    for place in places:
        if ":" in place.split("/")[0] and not is_url(place):
            raise VitralError(f"{place}: shards are files here, or http and https addresses", "give one of those")
        if place.endswith((".gz", ".tgz", ".bz2", ".xz", ".zst")):
            raise VitralError(f"{place} is compressed, so it cannot be read from a place inside", "unpack it to a .tar")
        if not is_url(place) and not Path(place).is_file():
            raise VitralError(f"there is no shard {place}", f"{len(places)} were asked for by {pattern}")
    return places


def splits_of(places: Sequence[str]) -> list[str]:
    """The split each shard belongs to, by a word in its name; where no name says "train", all are for training."""
    words = [re.findall(r"[a-z]+", PurePosixPath(place).name.lower()) for place in places]
    said = [next((SPLITS[word] for word in found if word in SPLITS), "train") for found in words]
    named = any(SPLITS.get(word) == "train" for found in words for word in found)
    return said if named else ["train"] * len(places)


def indexed(place: str, state: str) -> list[Entry]:
    """Where the pictures of a shard are and what they show; from memory if the shard has not changed."""
    known = home() / "shards" / f"{hashlib.sha256(repr((place, state)).encode()).hexdigest()[:24]}.json"
    try:
        return [(offset, size, label) for offset, size, label in json.loads(known.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        pass
    if is_url(place):
        read_range(place, 0, 512)  # a server that cannot is found out now
        with opened(place) as file:
            entries = list(_entries(file, place))
    else:
        with Path(place).open("rb") as file:
            entries = list(_entries(file, place))
    if not entries:
        raise VitralError(f"{place} has no labelled pictures", "each needs a .cls, .txt or .json of the same name")
    known.parent.mkdir(parents=True, exist_ok=True)
    write_text(known, json.dumps(entries))
    return entries


def _entries(file: IO[bytes], place: str) -> Iterator[Entry]:
    from webdataset.tariterators import base_plus_ext

    picture: tuple[int, int] | None = None
    labels: dict[str, str] = {}
    before = None
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:  # headers one after the other; nothing is unpacked
            for member in archive:
                base, ending = base_plus_ext(member.name)
                if not member.isfile() or base is None:
                    continue
                if base != before:
                    if picture is not None and (label := _first(labels)) is not None:
                        yield *picture, label
                    picture, labels, before = None, {}, base
                kind = ending.lower().rsplit(".", 1)[-1]
                if f".{kind}" in SUFFIXES and picture is None and 0 < member.size <= MOST_IMAGE:
                    picture = member.offset_data, member.size
                elif kind in LABELS and member.size <= MOST_LABEL:
                    content = archive.extractfile(member)
                    said = _said(kind, content.read()) if content is not None else None
                    labels |= {kind: said} if said is not None else {}
    except (tarfile.TarError, EOFError) as error:
        raise VitralError(f"{place} is broken or no tar file: {error}", "fetch or write it again") from error
    if picture is not None and (label := _first(labels)) is not None:
        yield *picture, label


def _first(labels: dict[str, str]) -> str | None:
    return next((labels[kind] for kind in LABELS if kind in labels), None)


def _said(kind: str, content: bytes) -> str | None:
    """The label in a member: text as it is; of JSON a name, a number, or the field that holds one."""
    try:
        text = content.decode("utf-8-sig").strip()
        said: Any = json.loads(text) if kind == "json" else text
    except ValueError:
        return None
    if isinstance(said, dict):
        said = next((said[name] for name in IN_JSON if name in said), None)
    return str(said) if isinstance(said, str | int) and str(said) else None


def _by_number(name: str) -> tuple[int, int, str]:
    """Numbers as numbers, before names."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _state_here(path: Path) -> str:
    state = path.stat()
    return f"{path.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"


def _copies(sources: Sequence[Source]) -> np.ndarray[Any, Any]:
    return grouped(len(sources), near_pairs(thumbnails(sources, read=lambda source: read_source(*source))))
