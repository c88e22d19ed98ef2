"""WebDataset shards: tar files in which an image and its label share a name. `shards/{train,val}-{000..003}.tar`

    000017.jpg  000017.cls      a class index or name      one image per name; other members are ignored
    000018.png  000018.json     {"label": "bee"}           labels come from .cls, .txt or .json, in this order
    000019.webp 000019.txt      bee

The tar headers are read once and cached, so that every image is known by shard, offset and size. Images can then be
read in any order, a position in an epoch is as exact as with files, and nothing is extracted to disk. Remote shards
(http, https) are read once for their index and then image by image with range requests.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np

from vitral.data.files.checked_json import read_cached_json, write_checked_json
from vitral.data.files.duplicates import cached_duplicate_groups
from vitral.data.files.listing import (
    SPLIT_NAMES,
    DatasetListing,
    NamedLocation,
    hold_out_missing_splits,
    make_listing,
)
from vitral.data.files.location import ImageLocation, file_version
from vitral.data.files.remote import MAX_IMAGE_BYTES, is_url, open_url, read_range, url_version
from vitral.data.files.walk import IMAGE_SUFFIXES
from vitral.data.folds import Fold
from vitral.data.registry.cache import cache_dir
from vitral.errors import VitralError
from vitral.utils.json_toml import parse_json
from vitral.utils.text import count_text

LABEL_SUFFIXES = ("cls", "txt", "json")  # in order of precedence
JSON_LABEL_KEYS = ("label", "class", "cls", "class_name")
MAX_LABEL_BYTES = 2**16
SHARD_HINT = "Expected a .tar file with images as members: 000017.jpg 000018.png"
LABEL_HINT = "Each image needs a label: a .cls, .txt or .json member with the name of the image"

ShardEntry = tuple[int, int, str | None]  # offset, size and label of an image; None: it has no label


def shards_in_folder_hint(folder: Path) -> str | None:
    """How to name the shards in a folder; None if it has none."""
    first = min(folder.glob("*.tar"), default=None)
    pattern = folder / "train-{000..003}.tar"
    return None if first is None else f"Name its shards, such as {first}, or a pattern such as '{pattern}'"


def list_shards(
    pattern: str, validation: float, progress: bool = False, test_split: float = 0.0, fold: Fold | None = None
) -> DatasetListing:
    """List the images in the shards that match `pattern`.

    Splits come from the names of the shards. Without a validation split, the fraction `validation` is held out;
    without a test split, the fraction `test_split`. With a `fold`, its images are the test split.
    """
    shards = read_shard_indices(pattern)
    images: dict[str, list[NamedLocation]] = {
        split: [(location, label) for location, label in entries if label is not None]
        for split, entries in shards.images.items()
    }
    labelled = {location.path for items in images.values() for location, _ in items}
    if unlabelled := next((shard for shard in shards.paths if shard not in labelled), None):
        raise VitralError(f"{unlabelled} has no labelled images", LABEL_HINT)
    listing = make_listing(
        pattern, images, source=shards.source, hint=LABEL_HINT, state=shards.versions, class_key=_numbers_first
    )
    return hold_out_missing_splits(listing, validation, test_split, fold, partial(_duplicate_groups, progress=progress))


class ShardIndices(NamedTuple):
    """The images of the shards that a pattern expands to."""

    paths: list[str]  # or URLs
    versions: list[str]
    images: dict[str, list[tuple[ImageLocation, str | None]]]  # by split, with their labels; None: no label

    @property
    def source(self) -> str:
        """For display."""
        return f"from {count_text(len(self.paths), 'shard')}"


def read_shard_indices(pattern: str) -> ShardIndices:
    """Locate the images in the shards that match `pattern`, also those without a label."""
    shards = expand_pattern(pattern)
    versions = [url_version(shard) if is_url(shard) else file_version(Path(shard)) for shard in shards]
    indices = ShardIndices(shards, versions, {"train": [], "validation": [], "test": []})
    for shard, version, split in zip(shards, versions, shard_splits(shards), strict=True):
        entries = shard_index(shard, version)
        indices.images[split] += [(ImageLocation(shard, offset, size), label) for offset, size, label in entries]
    return indices


def expand_pattern(pattern: str) -> list[str]:
    """Expand `{000..003}` and `{train,val}`, as the webdataset library does."""
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise VitralError("reading shards requires webdataset", "pip install 'vitral[data]'") from error
    shards: list[str] = expand_urls(pattern)
    for shard in shards:
        if ":" in shard.split("/")[0] and not is_url(shard):
            raise VitralError(f"{shard}: unsupported protocol", "Pass local files or http and https URLs")
        if shard.endswith((".gz", ".tgz", ".bz2", ".xz", ".zst")):
            raise VitralError(f"{shard} is compressed, which does not allow random access", "Decompress it to a .tar")
        if not is_url(shard) and not Path(shard).is_file():
            raise VitralError(f"no shard named {shard}", f"{pattern} expands to {len(shards)} shards")
    return shards


def shard_splits(shards: Sequence[str]) -> list[str]:
    """The split of each shard, by a word in its name. If no name contains "train", all are training shards."""
    words = [re.findall(r"[a-z]+", PurePosixPath(shard).name.lower()) for shard in shards]
    splits = [next((SPLIT_NAMES[word] for word in name if word in SPLIT_NAMES), "train") for name in words]
    has_train = any(SPLIT_NAMES.get(word) == "train" for name in words for word in name)
    return splits if has_train else ["train"] * len(shards)


def shard_index(shard: str, version: str) -> list[ShardEntry]:
    """Offsets, sizes and labels of the images of a shard; cached until its version changes."""
    cached = cache_dir() / "shards" / f"{hashlib.sha256(repr((shard, version)).encode()).hexdigest()[:24]}-v3.json"
    if (content := read_cached_json(cached)) is not None:
        return [(offset, size, label) for offset, size, label in content["entries"]]
    if is_url(shard):
        read_range(shard, 0, 512)  # fails early if the server does not support range requests
        with open_url(shard) as file:
            entries = list(_read_entries(file, shard))
    else:
        with Path(shard).open("rb") as file:
            entries = list(_read_entries(file, shard))
    if not entries:
        raise VitralError(f"{shard} has no images", SHARD_HINT)
    with suppress(OSError, VitralError):  # without the cache, the shard is read again next time
        write_checked_json(cached, {"entries": entries})
    return entries


def _read_entries(file: IO[bytes], shard: str) -> Iterator[ShardEntry]:
    from webdataset.tariterators import base_plus_ext

    image: tuple[int, int] | None = None
    labels: dict[str, str] = {}
    previous_base = None
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:  # sequential; nothing is extracted
            for member in archive:
                base, extension = base_plus_ext(member.name)
                if not member.isfile() or base is None:
                    continue
                if base != previous_base:
                    if image is not None:
                        yield *image, _preferred_label(labels)
                    image, labels, previous_base = None, {}, base
                suffix = extension.lower().rsplit(".", 1)[-1]
                if f".{suffix}" in IMAGE_SUFFIXES and image is None and 0 < member.size <= MAX_IMAGE_BYTES:
                    image = member.offset_data, member.size
                elif suffix in LABEL_SUFFIXES and member.size <= MAX_LABEL_BYTES:
                    content = archive.extractfile(member)
                    parsed = _parse_label(suffix, content.read()) if content is not None else None
                    labels |= {suffix: parsed} if parsed is not None else {}
    except (tarfile.TarError, EOFError) as error:
        raise VitralError(f"{shard} is corrupt or not a tar file: {error}", "Download or write it again") from error
    if image is not None:
        yield *image, _preferred_label(labels)


def _preferred_label(labels: dict[str, str]) -> str | None:
    return next((labels[suffix] for suffix in LABEL_SUFFIXES if suffix in labels), None)


def _parse_label(suffix: str, content: bytes) -> str | None:
    """The label in a member: the text, or from JSON a string, a number or one of the fields `JSON_LABEL_KEYS`."""
    try:
        text = content.decode("utf-8-sig").strip()
        value: Any = parse_json(text) if suffix == "json" else text
    except ValueError:
        return None
    if isinstance(value, dict):
        value = next((value[key] for key in JSON_LABEL_KEYS if key in value), None)
    return str(value) if isinstance(value, str | int) and str(value) else None


def _numbers_first(name: str) -> tuple[int, int, str]:
    """Sort key: numbers by value, then names."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _duplicate_groups(locations: Sequence[ImageLocation], *, progress: bool) -> np.ndarray[Any, Any] | None:
    """Groups of copies; None if they would have to be downloaded."""
    if any(is_url(location.path) for location in locations):
        return None
    return cached_duplicate_groups(locations, progress=progress)
