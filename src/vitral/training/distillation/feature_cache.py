"""Teacher features on disk: computed once for a set of images and read by every later run.

    <cache>/teacher-features/<fingerprint>.safetensors     pooled (N, E), patches (N, F, h, w)

The fingerprint covers the weights of the teacher, the images, both preprocessings and the dtype. Files are written
atomically and verified by their SHA-256; a damaged file is computed again. When their total size exceeds the limit, the
least recently used files are deleted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.data.registry.cache import cache_dir
from vitral.errors import VitralError
from vitral.runs.model_io import load_weights, save_weights
from vitral.ssl.teacher import TeacherFeatures
from vitral.utils.progress import LogFn, no_log

FOLDER = "teacher-features"
VERSION = 1  # raised when the computation of the features changes


def features_fingerprint(
    teacher_sha256: str,
    data_fingerprint: str,
    teacher: Preprocessing,
    student: Preprocessing,
    dtype: torch.dtype,
    has_patches: bool,
) -> str:
    """Digest of everything that determines the features."""
    preprocessings = [
        [(field.name, getattr(preprocessing, field.name)) for field in fields(preprocessing)]
        for preprocessing in (teacher, student)
    ]
    parts = (VERSION, teacher_sha256, data_fingerprint, preprocessings, str(dtype), has_patches)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def cached_features(
    fingerprint: str | None,
    max_bytes: float,
    compute: Callable[[], TeacherFeatures],
    *,
    is_writer: bool = True,
    agree: Callable[[bool], bool] = bool,
    log: LogFn = no_log,
) -> TeacherFeatures:
    """Read the features from the cache, or compute and store them.

    Args:
        fingerprint: Of the features; None: do not cache them.
        max_bytes: Maximum total size of the cache.
        compute: Called on all ranks or on none.
        is_writer: Whether this process writes the file; true on one rank.
        agree: Maps whether this rank has read the file to whether all ranks have.
        log: Receives one line if the cache cannot be used.
    """
    path = None if fingerprint is None else cache_dir() / FOLDER / f"{fingerprint}.safetensors"
    tensors = None if path is None else _read(path, log)
    if agree(tensors is not None):
        assert tensors is not None
        return TeacherFeatures(tensors["pooled"], tensors.get("patches"))
    features = compute()
    if path is not None and is_writer:
        _write(path, features, max_bytes, log)
    return features


def _read(path: Path, log: LogFn) -> dict[str, Tensor] | None:
    """The tensors of an intact file; None if there is none."""
    if not path.is_file():
        return None
    try:
        tensors = load_weights(path)
    except VitralError as error:
        log(f"cached teacher features are computed again: {error.what}")
        return None
    with suppress(OSError):
        os.utime(path)  # most recently used
    return tensors if "pooled" in tensors else None


def _write(path: Path, features: TeacherFeatures, max_bytes: float, log: LogFn) -> None:
    tensors = {name: tensor for name, tensor in features._asdict().items() if tensor is not None}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _evict(path.parent, max_bytes - num_bytes)
        save_weights(path, tensors)
    except (OSError, VitralError) as error:
        reason = error.what if isinstance(error, VitralError) else f"cannot write {path}: {error.strerror or error}"
        log(f"teacher features are not cached: {reason}")


def _evict(folder: Path, max_bytes: float) -> None:
    """Delete the least recently used files until at most `max_bytes` remain."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > max_bytes:
            file.unlink(missing_ok=True)
