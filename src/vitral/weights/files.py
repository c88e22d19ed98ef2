"""Weight files to named tensors and back. Reading never executes code from a file.

The kind of a file is detected from its first bytes, not from its name. Each tensor is held in memory once; callers may
remove tensors from the dictionary to free them.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitral import bundled
from vitral.data.names import CHECKPOINT_SUFFIXES
from vitral.errors import VitralError
from vitral.utils.atomic import atomic_writer
from vitral.utils.json_toml import read_json

EXPORT_SUFFIXES = (".onnx", ".pt2")  # exported models, which can only predict
HUB_FILE_NAMES = (  # next to their config.json
    "model.safetensors", "pytorch_model.bin", "weights.safetensors",
    "open_clip_model.safetensors", "open_clip_pytorch_model.bin",
)  # fmt: skip
SHARD_INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# Keys around the weights in training checkpoints. EMA weights come first; timm prefers them too. The target encoder is
# the EMA of the encoder in the official files of I-JEPA and MSN.
WRAPPER_KEYS = (
    "state_dict_ema", "model_ema", "ema", "target_encoder",
    "state_dict", "model_state_dict", "model", "module", "params",
)  # fmt: skip
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "net.")  # added by DataParallel, torch.compile, Lightning
MAX_INFLATION, MIN_INFLATED_BYTES = 20, 2**30  # ratio to the stored bytes, and bytes below which any is accepted
DAMAGED_HINT = "The file is damaged or incomplete; copy it again"


@dataclass(kw_only=True)
class RawCheckpoint:
    """Tensors and JSON files as found at a source, before their format is detected."""

    source: str
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    preprocessor_config: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    open_clip_config: dict[str, Any] = field(default_factory=dict)  # open_clip_config.json
    notes: list[str] = field(default_factory=list)


def load_raw(path: Path) -> RawCheckpoint:
    """Load a weight file, or a folder with weights and optionally config.json."""
    if not path.exists():
        hint = bundled.missing_model_hint(path, "Pass a file, a folder or hf:owner/name")
        raise VitralError(f"no file or folder {path}", hint)
    if path.is_dir():
        return _load_folder(path)
    raw = RawCheckpoint(source=str(path), tensors={})
    if path.name in HUB_FILE_NAMES:
        _load_configs(raw, path.parent)
    _load_file(raw, path)
    return raw


def _load_folder(folder: Path) -> RawCheckpoint:
    raw = RawCheckpoint(source=str(folder), tensors={})
    _load_configs(raw, folder)
    for index in SHARD_INDEX_NAMES:
        if (folder / index).is_file() and not (folder / HUB_FILE_NAMES[0]).is_file():
            for shard in _shard_names(folder / index):
                _load_file(raw, folder / shard)
            return raw
    files = [folder / name for name in HUB_FILE_NAMES if (folder / name).is_file()][:1]
    files = files or sorted(file for file in folder.iterdir() if file.suffix in CHECKPOINT_SUFFIXES and file.is_file())
    if not files:
        suffixes = ", ".join("*" + suffix for suffix in CHECKPOINT_SUFFIXES)
        expected = f"Expected a run folder, or a folder with one of {suffixes}"
        raise VitralError(f"{folder} contains no weights", "; ".join((expected, *bundled.shadowing_notes(folder))))
    if len(files) > 1:
        raise VitralError(
            f"{folder} contains {len(files)} weight files",
            f"Pass one of them: {', '.join(file.name for file in files[:6])}",
        )
    _load_file(raw, files[0])
    return raw


def _load_configs(raw: RawCheckpoint, folder: Path) -> None:
    raw.config = _load_json(folder / "config.json")
    raw.preprocessor_config = _load_json(folder / "preprocessor_config.json")
    raw.open_clip_config = _load_json(folder / "open_clip_config.json")


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise VitralError(f"{path} is not valid JSON: {error_in_one_line(error)}", DAMAGED_HINT) from error
    if not isinstance(content, dict):
        raise VitralError(f"{path}: expected a JSON object, got {type(content).__name__}", DAMAGED_HINT)
    return content


def _shard_names(index: Path) -> list[str]:
    weight_map = _load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise VitralError(f"{index} has no weight_map", DAMAGED_HINT)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise VitralError(f"{index} refers to a file outside its folder: {name}", "Do not trust this model")
        if not (index.parent / name).is_file():
            raise VitralError(f"{index.parent / name} is missing", "Copy the folder again")
    return names


def _load_file(raw: RawCheckpoint, path: Path) -> None:
    """Add the tensors of one file."""
    try:
        kind = _detect_file_kind(path)
        if kind == "safetensors":
            tensors = _load_safetensors(path)
        elif kind == "npz":
            tensors = _load_npz(path)
        else:
            tensors = _unwrap(_load_torch(path), path, raw.notes)
    except (OSError, SafetensorError, zipfile.BadZipFile, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise VitralError(f"cannot read {path}: {error_in_one_line(error)}", DAMAGED_HINT) from error
    if not tensors:
        raise VitralError(f"{path} contains no tensors", "Check that it is a checkpoint")
    raw.notes.append(f"read {len(tensors)} tensors from {path.name}")
    raw.tensors.update(_strip_prefixes(tensors))


def _detect_file_kind(path: Path) -> str:
    if path.suffix.lower() in EXPORT_SUFFIXES:
        raise VitralError(
            f"{path} is an exported model, which only vitral predict accepts (.onnx)",
            "Pass the run that it was exported from",
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    if start[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(path) as archive:
            _check_inflated_size(path, size, archive)
            return "npz" if all(name.endswith(".npy") for name in archive.namelist()) else "torch"
    if start[:1] == b"\x80":
        return "torch"  # a bare pickle, as torch.save wrote it before version 1.6
    if len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < max(size, 1 << 27):
        return "safetensors"
    if start.startswith(b"version "):
        raise VitralError(f"{path} is a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull")
    reason = "it is empty" if not start else f"it starts with {start!r}"
    supported = "Supported files: safetensors, PyTorch .pt and .pth, and Google's .npz"
    notes = bundled.shadowing_notes(path)
    raise VitralError(f"{path} is not a weight file: {reason}", "; ".join((supported, *notes)))


def _check_inflated_size(path: Path, size: int, archive: zipfile.ZipFile) -> None:
    """Refuse archives that decompress to far more than their size: weights hardly compress."""
    inflated = sum(entry.file_size for entry in archive.infolist())
    if inflated > max(MAX_INFLATION * size, MIN_INFLATED_BYTES):
        raise VitralError(
            f"{path} has {size / 1e6:.1f} MB and would decompress to {inflated / 1e9:.1f} GB, which no weights do",
            "The file is damaged or malicious; if you trust it, save it again with numpy.savez",
        )


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    """Copy each tensor through its own mapping: the pages of a mapping count as memory until it is closed."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    tensors = {}
    for name in names:
        with safe_open(path, framework="pt") as file:
            tensors[name] = file.get_tensor(name).clone()
    return tensors


def _load_npz(path: Path) -> dict[str, Tensor]:
    tensors = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                _check_npy_header(path, arrays, name)
                array = arrays[name]
            except ValueError as error:
                if "allow_pickle" not in str(error):
                    raise
                raise VitralError(
                    f"refused to load {path}: it could execute code ({name} contains Python objects)",
                    "If you trust it, load it with NumPy and save numeric arrays with numpy.savez",
                ) from error
            if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # how NumPy stores JAX's bfloat16
                tensors[name] = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
            elif array.dtype.kind in "fiu":
                tensors[name] = torch.from_numpy(array)
    return tensors


def _check_npy_header(path: Path, arrays: Any, name: str) -> None:
    """Compare the shape in an array's header with the size of its entry: NumPy allocates before it reads."""
    entry = f"{name}.npy" if f"{name}.npy" in arrays.zip.namelist() else name
    with arrays.zip.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and num_bytes > arrays.zip.getinfo(entry).file_size:
        raise VitralError(f"{path}: {name} has {num_bytes:,} bytes according to its header, but fewer", DAMAGED_HINT)


def check_storage(raw: RawCheckpoint) -> None:
    """Refuse tensors that repeat few stored bytes (stride 0): a small file could request any amount of memory."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in raw.tensors.values()}
    stored, needed = sum(s.nbytes() for s in storages.values()), sum(t.nbytes for t in raw.tensors.values())
    if needed > max(MAX_INFLATION * stored, MIN_INFLATED_BYTES):
        name, tensor = max(raw.tensors.items(), key=lambda item: item[1].nbytes)
        raise VitralError(
            f"{raw.source} stores {stored / 1e6:.1f} MB and would need {needed / 1e9:,.1f} GB; "
            f"{name} ({'×'.join(map(str, tensor.shape))}) repeats its values",
            "The file is damaged or malicious; if you trust it, save contiguous tensors",
        )


def _load_torch(path: Path) -> Any:
    """Load with PyTorch's restricted unpickler, which accepts tensors and plain containers only."""
    try:
        # MAE and DeiT checkpoints contain their arguments as a Namespace. The warnings are about pickle versions.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)|Unsupported operand \d+", str(error))
        if match is None:
            raise VitralError(f"{path} is not a complete PyTorch file", DAMAGED_HINT) from error
        raise VitralError(
            f"refused to load {path}: it could execute code (it contains {match[1] or 'more than tensors'})",
            "If you trust it, load it with PyTorch and save model.state_dict() as safetensors",
        ) from error
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise
        raise VitralError(
            f"{path} is a TorchScript program, not a weight file", "Save model.state_dict() as safetensors instead"
        ) from error


def _unwrap(content: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The state dict inside a training checkpoint."""
    for _ in range(4):
        if not isinstance(content, Mapping):
            raise VitralError(
                f"{path}: expected named tensors, got {type(content).__name__}", "Check that it is a checkpoint"
            )
        wrapper = next((key for key in WRAPPER_KEYS if isinstance(content.get(key), Mapping)), None)
        if wrapper is None:
            break
        content = content[wrapper]
        is_ema = "ema" in wrapper or wrapper == "target_encoder"
        notes.append(f"used '{wrapper}' of {path.name}" + (" (EMA weights)" if is_ema else ""))
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _strip_prefixes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors)}
    return tensors


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a .safetensors, .npz or PyTorch file, selected by the suffix, atomically. Only safetensors has metadata."""
    try:
        with atomic_writer(path) as file:
            if path.suffix == ".safetensors":
                contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                save_file(contiguous, file.name, metadata={"format": "pt", **(metadata or {})})
            elif path.suffix == ".npz":
                with zipfile.ZipFile(file, "w") as archive:  # numpy.savez would hold all arrays at once
                    for name, tensor in tensors.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                            array = tensor.detach().cpu()
                            array = array.float() if array.dtype == torch.bfloat16 else array
                            np.lib.format.write_array(entry, np.ascontiguousarray(array.numpy()), allow_pickle=False)
            else:
                torch.save({name: _without_shared_storage(t.detach().cpu()) for name, t in tensors.items()}, file)
    except (OSError, SafetensorError) as error:
        raise VitralError(
            f"cannot write {path}: {error_in_one_line(error)}", "Check permissions and free disk space"
        ) from error


def _without_shared_storage(tensor: Tensor) -> Tensor:
    """Copy views, because torch.save writes their whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def error_in_one_line(error: BaseException) -> str:
    """An exception's message on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"
