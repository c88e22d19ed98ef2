"""Names of datasets and classes: built-in datasets, the user's files, and lists of class names.

Does not import torch, so that the command line can refuse a name at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vitral.data.files.walk import irregular_file_kind, is_image_file
from vitral.data.registry.fetch import check_dataset_name
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.errors import VitralError, error_reason, is_control, nearest_name, shell_quote
from vitral.utils.json_toml import read_text

SEQUENCE_PREFIX = "sequence:"  # name of a dataset that was passed as a Python sequence
SOURCES_HINT = f"Pass a folder of images, a CSV list, shards or a built-in dataset: {', '.join(BUILTIN_DATASETS)}"
CHECKPOINT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")  # weight files that vitral.weights reads
RUN_FILES = ("recipe.toml", "config.json", "model/config.json")  # in a run or model folder
PACK_INDEX = "index.json"  # in a packed dataset
LAYOUT_HINT = "Use one folder per class: photos/ants, photos/bees"


def path_text(data: str | Path | None) -> str | None:
    """Dataset, folder or list as text, which is how recipes and runs name them."""
    return None if data is None else str(data)


def is_file_dataset(name: str) -> bool:
    """Whether a name refers to a folder, list, shards or Python sequence instead of a built-in dataset.

    Built-in names take precedence: `mnist` is the built-in dataset, `./mnist` a folder of that name.
    """
    is_sequence_or_shards = name.startswith(SEQUENCE_PREFIX) or is_shard_pattern(name)
    is_path = name.endswith((".csv", "/", os.sep)) or os.sep in name
    return is_sequence_or_shards or is_path or (name not in BUILTIN_DATASETS and Path(name).is_dir())


def is_shard_pattern(name: str) -> bool:
    return re.search(r"\.tar(\.|$)", name) is not None


def check_dataset_exists(name: str) -> None:
    """Raise VitralError unless `name` is a built-in dataset or an existing path. Shards are not looked up."""
    if name.startswith(SEQUENCE_PREFIX) or is_shard_pattern(name) or name in BUILTIN_DATASETS:
        return
    path = Path(name)
    if is_model_dir(path) or (path.is_file() and path.suffix.lower() in CHECKPOINT_SUFFIXES):
        raise VitralError(
            f"{name} is a model, not a dataset", f"To fine-tune it: vitral train DATA --init-from {shell_quote(name)}"
        )
    if is_image_file(path):
        raise VitralError(f"{name} is an image, not a dataset", LAYOUT_HINT)
    if path.exists():
        return
    if is_file_dataset(name):
        raise VitralError(f"no folder or list named {name}{_similar_path(path)}", LAYOUT_HINT)
    check_dataset_name(name, _similar_path(path))


def is_model_dir(path: Path) -> bool:
    """Whether a folder is a run or a model. A packed dataset is not."""
    return any((path / file).is_file() for file in RUN_FILES) and not (path / PACK_INDEX).is_file()


def check_source_exists(name: str) -> None:
    """Raise VitralError unless `name` is a source of unlabelled images. Shards are not looked up."""
    if name.startswith(SEQUENCE_PREFIX):
        raise VitralError(
            f"the images were a Python sequence ({name.removeprefix(SEQUENCE_PREFIX)}), not files",
            "Pass the sequence again from Python, or name a folder",
        )
    path = Path(name)
    if name in BUILTIN_DATASETS or is_shard_pattern(name):
        return
    if not name or not path.exists():
        raise VitralError(f"no folder, list or dataset named {name!r}{_similar_path(path)}", SOURCES_HINT)
    if (kind := irregular_file_kind(path.stat().st_mode)) is not None:
        raise VitralError(f"{name} is {kind}, not a source of images", SOURCES_HINT)
    if path.is_file() and path.suffix.lower() != ".csv" and not is_image_file(path):
        raise VitralError(f"{name} is not a folder, a CSV list, shards or an image", SOURCES_HINT)


def _similar_path(path: Path) -> str:
    """The end of a message: ". Did you mean …?" with a name in the same folder, or of a built-in dataset."""
    try:
        names = [entry.name for entry in sorted(path.parent.iterdir()) if not entry.name.startswith(".")]
    except OSError:
        names = []
    similar = nearest_name(path.name, [*BUILTIN_DATASETS, *names] if str(path) == path.name else names)
    return f". Did you mean '{path.parent / similar}'?" if similar is not None else ""


def check_files_exist(path: Path) -> None:
    """Raise VitralError unless `path` exists. Unlike other commands, the doctor does not accept built-in datasets."""
    if path.exists():
        return
    if str(path) in BUILTIN_DATASETS:
        raise VitralError(f"{path} is a built-in dataset, which needs no checks", f"Train on it: vitral train {path}")
    raise VitralError(f"no folder or CSV file {path}", LAYOUT_HINT)


def read_class_names(path: Path) -> tuple[str, ...]:
    """Class names from a text file, one per line."""
    try:
        lines = read_text(path).removeprefix("\ufeff").split("\n")  # a byte order mark, as Windows editors write
    except (OSError, ValueError) as error:
        raise VitralError(
            f"cannot read class names from {path}: {error_reason(error)}", "Expected a text file with one name per line"
        ) from error
    for number, line in enumerate(lines, start=1):
        if any(is_control(character) for character in line.strip() if character != "\t"):
            raise VitralError(f"{path}, line {number} contains a control character", "Expected one class name per line")
    return tuple(line.strip() for line in lines if line.strip())
