"""Packed datasets: every split decoded once into a memory-mapped file and then read at memory speed.

    photos-3f9c0a…-v3/       one folder per dataset; the name contains the fingerprint of files, labels and image size
      index.json             classes, image size and channels, source
      train.npy              pixels (N, C, H, W)     train.json   labels, unreadable files, preprocessing, checksum,
                                                                  sizes of the images if they differ
      validation.npy …       test.npy …              written on first access

Training images are stored larger than the model input, so that crops can be drawn, and may be decoded at a reduced
size. Validation and test images are stored as model input, pixel for pixel what `Predictor` computes from the files.

The .json of a split is written last (pack_writer.py): a split without it is incomplete. It holds size, time and
checksum of the .npy file, which is read again only if size or time have changed. The operating system caches the pages
in use, so a packed dataset may be larger than memory.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import Timeout
from torch import Tensor

from vitral.data.files.checked_json import read_checked_json, write_checked_json
from vitral.data.files.location import ImageLocation, file_version
from vitral.data.files.row_checksums import file_checksum
from vitral.data.geometry import Size
from vitral.data.lazy_images import Images
from vitral.data.names import PACK_INDEX
from vitral.data.preprocess import Preprocessing
from vitral.data.targets import Labels, TaskName, label_values, labels_array
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError, error_reason
from vitral.utils.json_toml import read_json_object
from vitral.utils.locks import file_lock
from vitral.utils.serialization import from_dict, to_dict

FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """Contents of index.json."""

    classes: tuple[str, ...]
    stored: Preprocessing  # of training images: image_size is the size of the stored pixels
    fingerprint: str
    source: str  # path of the original folder or list, for display
    splits: tuple[str, ...] = ()  # names of the splits that are not empty
    task: TaskName = "classification"
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """A packed split; `images` is memory-mapped."""

    images: Images  # (N, C, H, W), of the preprocessing's type; VariableSizeImages if their sizes differ
    labels: Tensor  # int64 (N,), or float32 (N, K) (`vitral.data.targets`)
    unreadable: tuple[str, ...]  # error messages
    preprocessing: Preprocessing  # with which the images were resized and cropped; mean and std do not apply


class DamagedPackError(VitralError):
    """A file of a pack is missing, incomplete or has other content than was written."""

    def __init__(self, file: Path, reason: object) -> None:
        super().__init__(f"{file} is damaged: {reason}", "Copy the pack again, or pack the images again")
        self.file, self.reason = file, reason


def fingerprint(locations: Iterable[ImageLocation], *parameters: object) -> str:
    """Digest of paths, sizes and modification times, and of parameters that affect the decoded images."""
    digest = hashlib.sha256(repr(parameters).encode())
    versions: dict[str, str] = {}
    for location in locations:
        if location.path not in versions or location.size < 0:
            try:
                versions[location.path] = file_version(Path(location.path))
            except OSError:
                # Missing files are reported when they are decoded. The versions of remote shards are a parameter.
                versions[location.path] = location.path
        line = f"{versions[location.path]}\0{location.offset}\0{location.size}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def write_index(folder: Path, index: PackIndex) -> None:
    write_checked_json(folder / PACK_INDEX, to_dict(index))


def read_index(folder: Path) -> PackIndex:
    try:
        format_number = read_json_object(folder / PACK_INDEX).get("format")
        index = from_dict(PackIndex, read_checked_json(folder / PACK_INDEX)) if format_number == FORMAT else None
    except (OSError, ValueError, VitralError) as error:
        raise DamagedPackError(folder / PACK_INDEX, error_reason(error)) from error
    if index is None:
        raise VitralError(
            f"{folder} was packed in format {format_number}, expected {FORMAT}",
            "Pack the images again: vitral data pack FOLDER",
        )
    return index


def is_packed(path: Path) -> bool:
    return (path / PACK_INDEX).is_file()


def read_split(folder: Path, name: str) -> PackedSplit | None:
    """Memory-map a split; None if it does not exist, is incomplete or has an older format.

    Raises DamagedPackError if its files have other content than was written.
    """
    file, images_file = folder / f"{name}.json", folder / f"{name}.npy"
    try:
        if read_json_object(file).get("format") != FORMAT:
            return None
        metadata = read_checked_json(file)
        preprocessing = from_dict(Preprocessing, metadata["preprocessing"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, VitralError) as error:
        raise DamagedPackError(file, error_reason(error)) from error
    try:
        if _file_state(images_file) != metadata["file_state"]:
            _verify_checksum(images_file, file, metadata)
        images = np.load(images_file, mmap_mode="r")
        if images.dtype != preprocessing.dtype or images.shape != (len(metadata["labels"]), *preprocessing.shape):
            raise ValueError(f"{images.dtype} of shape {images.shape}")
    except (OSError, ValueError, EOFError) as error:
        raise DamagedPackError(images_file, error_reason(error)) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the array being read-only
        mapped = torch.from_numpy(images)
    sizes = metadata.get("sizes")
    return PackedSplit(
        images=mapped if sizes is None else VariableSizeImages(mapped, torch.tensor(sizes).view(-1, 2)),
        labels=torch.from_numpy(
            labels_array(metadata["labels"], metadata.get("task", "classification"), metadata.get("num_outputs", 0))
        ),
        unreadable=tuple(metadata["unreadable"]),
        preprocessing=preprocessing,
    )


def _file_state(file: Path) -> list[int]:
    """Size and modification time, which tell whether a file has been changed or copied since it was verified."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _verify_checksum(images_file: Path, file: Path, metadata: dict[str, Any]) -> None:
    """Raise ValueError if the images have another checksum; otherwise remember the state of the file."""
    if images_file.stat().st_size != metadata["file_state"][0]:
        raise ValueError(f"{images_file.stat().st_size:,} bytes, expected {metadata['file_state'][0]:,}")
    if file_checksum(images_file) != metadata["images_checksum"]:
        raise ValueError("wrong checksum")
    with suppress(OSError, VitralError):  # in a read-only folder the checksum is computed every time
        write_checked_json(file, {**metadata, "file_state": _file_state(images_file)})


def write_split_metadata(
    images_file: Path,
    *,
    stored: Preprocessing,
    labels: Labels,
    task: TaskName,
    unreadable: list[str],
    sizes: Sequence[Size] | None,
    checksum: int,
) -> None:
    """Write the .json file of a split, which makes it complete. Its images are on the disk."""
    metadata = {
        "format": FORMAT,
        "labels": label_values(labels, task),
        "task": task,
        "num_outputs": labels.shape[1] if labels.ndim > 1 else 0,
        "unreadable": unreadable,
        "preprocessing": to_dict(stored),
        "file_state": _file_state(images_file),
        "images_checksum": checksum,
    } | ({} if sizes is None else {"sizes": sizes})
    write_checked_json(images_file.with_suffix(".json"), metadata)


def remove_stale_packs(folder: Path, index: PackIndex) -> None:
    """Delete packs next to `folder` that were made from an earlier state of the same files, or in an older format.

    Packs that were not completed are among them, unless a process is still working on them.
    """
    for other in folder.parent.iterdir():
        if other == folder or not other.is_dir():
            continue
        with suppress(OSError, ValueError, Timeout):
            if is_packed(other):
                if _is_stale(read_json_object(other / PACK_INDEX), index):
                    shutil.rmtree(other)
            elif (part := other / ".train.part").is_file() and _is_stale(read_json_object(part), index):
                with file_lock(folder.parent / f".{other.name}.train.lock", timeout=0):
                    shutil.rmtree(other)


def _is_stale(content: dict[str, Any], index: PackIndex) -> bool:
    """Whether the description of a pack is that of an earlier state of the files of `index`."""
    is_same = content.get("stored") == to_dict(index.stored) or content.get("format") != FORMAT
    is_same &= bool(content.get("classes")) == bool(index.classes)  # with or without labels: two sets of files
    return bool(content.get("source") == index.source and is_same)
