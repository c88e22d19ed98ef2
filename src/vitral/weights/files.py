"""Bytes on disk to named tensors and back. Nothing that is read here can run code.

The kind of a file is told by its first bytes, not by its name. Memory: a tensor is held once, and whoever takes it out
of the dictionary may let it go.
"""

from __future__ import annotations

import argparse
import json
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

from vitral import bundled as box
from vitral.errors import VitralError
from vitral.runs.run import whole_or_not

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
EXPORTED = (".onnx", ".pt2")  # models that only answer
HUB_NAMES = ("model.safetensors", "pytorch_model.bin", "weights.safetensors")  # files with their config.json beside
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# Around the weights in a training's checkpoint; averaged weights first, as timm prefers them too.
WRAPPERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model", "module", "params")
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "net.")  # from DataParallel, torch.compile, Lightning …


@dataclass(kw_only=True)
class Found:
    """What lies at a source, before anybody has made sense of it."""

    where: str
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)  # config.json
    preprocessor: dict[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    notes: list[str] = field(default_factory=list)


def find(path: Path) -> Found:
    """A file of weights, or a folder with one and its config.json."""
    if not path.exists():
        hint = box.hint(path, "give a file, a folder, or hf:owner/name")
        raise VitralError(f"there is no file or folder {path}", hint)
    if path.is_dir():
        return _folder(path)
    found = Found(where=str(path), tensors={})
    if path.name in HUB_NAMES:
        _read_configs(found, path.parent)
    _add(found, path)
    return found


def _folder(folder: Path) -> Found:
    found = Found(where=str(folder), tensors={})
    _read_configs(found, folder)
    for index in INDEXES:
        if (folder / index).is_file() and not (folder / HUB_NAMES[0]).is_file():
            for shard in _shards(folder / index):
                _add(found, folder / shard)
            return found
    files = [folder / name for name in HUB_NAMES if (folder / name).is_file()][:1]
    files = files or sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        looked_for = f"looked for {', '.join('*' + suffix for suffix in SUFFIXES)}"
        raise VitralError(f"{folder} holds no weights", "; ".join((looked_for, *box.notes(folder))))
    if len(files) > 1:
        raise VitralError(
            f"{folder} holds {len(files)} files of weights", f"name one: {', '.join(file.name for file in files[:6])}"
        )
    _add(found, files[0])
    return found


def _read_configs(found: Found, folder: Path) -> None:
    found.config = _json(folder / "config.json")
    found.preprocessor = _json(folder / "preprocessor_config.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VitralError(f"{path} is not JSON: {one_line(error)}", "copy it again") from error
    if not isinstance(content, dict):
        raise VitralError(f"{path} holds no settings but {type(content).__name__}", "copy it again")
    return content


def _shards(index: Path) -> list[str]:
    shards = _json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise VitralError(f"{index} has no weight_map", "copy it again")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name:
            raise VitralError(f"{index} points out of its folder: {name}", "do not trust this model")
        if not (index.parent / name).is_file():
            raise VitralError(f"{index.parent / name} is missing", "the folder was not copied whole")
    return names


def _add(found: Found, path: Path) -> None:
    """The tensors of one file."""
    try:
        kind = _kind(path)
        if kind == "safetensors":
            tensors = _safetensors(path)
        elif kind == "npz":
            tensors = _npz(path)
        else:
            tensors = _unwrapped(_torch(path), path, found.notes)
    except (OSError, SafetensorError, zipfile.BadZipFile, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise VitralError(f"{path} cannot be read: {one_line(error)}", "damaged or not whole: copy it again") from error
    if not tensors:
        raise VitralError(f"{path} holds no tensors", "is it a checkpoint?")
    found.notes.append(f"{len(tensors)} tensors read from {path.name}")
    found.tensors.update(_without_prefix(tensors))


def _kind(path: Path) -> str:
    if path.suffix.lower() in EXPORTED:
        raise VitralError(
            f"{path} is an exported model: it gives answers (vitral predict, serve) and nothing else",
            "give the run it was exported from",
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    if start[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(path) as archive:
            return "npz" if all(name.endswith(".npy") for name in archive.namelist()) else "torch"
    if start[:1] == b"\x80":
        return "torch"  # a bare pickle, as torch.save wrote before 1.6
    if len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < max(size, 1 << 27):
        return "safetensors"
    if start.startswith(b"version "):
        raise VitralError(f"{path} is a Git LFS pointer, not the file itself", "fetch it: git lfs pull")
    says = "it is empty" if not start else f"it starts with {start!r}"
    kinds = "safetensors, PyTorch's .pt and .pth, and Google's .npz are read"
    raise VitralError(f"{path} is not a file of weights: {says}", "; ".join((kinds, *box.notes(path))))


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Each tensor copied out through a mapping of its own: pages of a mapping that stays open count as memory."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    tensors = {}
    for name in names:
        with safe_open(path, framework="pt") as file:
            tensors[name] = file.get_tensor(name).clone()
    return tensors


def _npz(path: Path) -> dict[str, Tensor]:
    tensors = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                array = arrays[name]
            except ValueError as error:
                if "allow_pickle" not in str(error):
                    raise
                raise VitralError(
                    f"{path} would run code when opened ({name} holds objects, not numbers): refused unread",
                    "where you trust it, load it there and save plain arrays with numpy.savez",
                ) from error
            if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # how numpy stores JAX's bfloat16
                tensors[name] = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
            elif array.dtype.kind in "fiu":
                tensors[name] = torch.from_numpy(array)
    return tensors


def _torch(path: Path) -> Any:
    """Through PyTorch's unpickler for weights, which knows tensors and plain containers and calls nothing."""
    try:
        # MAE and DeiT keep their command line as a Namespace; the warning is about how old or new the pickle is.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)|Unsupported operand \d+", str(error))
        if asked is None:
            raise VitralError(f"{path} is not a whole PyTorch file", "damaged: copy it again") from error
        raise VitralError(
            f"{path} would run code when opened (it asks for {asked[1] or 'more than tensors'}): refused unread",
            "where you trust it, load it there and save model.state_dict() as safetensors",
        ) from error
    except RuntimeError as error:
        if "TorchScript" not in str(error):
            raise
        raise VitralError(
            f"{path} is a TorchScript program, not a file of weights", "save model.state_dict() as safetensors instead"
        ) from error


def _unwrapped(content: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    for _ in range(4):
        if not isinstance(content, Mapping):
            raise VitralError(f"{path} holds {type(content).__name__}, not named tensors", "is it a checkpoint?")
        wrapper = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if wrapper is None:
            break
        content = content[wrapper]
        notes.append(f"taken from '{wrapper}' in {path.name}" + (" (averaged weights)" if "ema" in wrapper else ""))
    return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors)}
    return tensors


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """The kind of file that the name says; whole, or not there."""
    try:
        with whole_or_not(path) as file:
            if path.suffix == ".safetensors":
                rows = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                save_file(rows, file.name, metadata={"format": "pt"})
            elif path.suffix == ".npz":
                with zipfile.ZipFile(file, "w") as archive:  # numpy.savez would hold all arrays at once
                    for name, tensor in tensors.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                            array = tensor.detach().cpu()
                            array = array.float() if array.dtype == torch.bfloat16 else array
                            np.lib.format.write_array(entry, np.ascontiguousarray(array.numpy()), allow_pickle=False)
            else:
                torch.save({name: _own(tensor.detach().cpu()) for name, tensor in tensors.items()}, file)
    except (OSError, SafetensorError) as error:
        raise VitralError(
            f"cannot write {path}: {one_line(error)}", "is the folder writable, is there space?"
        ) from error


def _own(tensor: Tensor) -> Tensor:
    """torch.save writes the whole storage behind a view."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"
