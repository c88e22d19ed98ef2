"""Read, write and convert checkpoints of any supported format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vitral import bundled
from vitral.errors import VitralError, shell_quote, truncate_list, unknown_name_error
from vitral.models.vit import ViT
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.runs.model_io import (
    DIGEST,
    ModelConfig,
    check_digest,
    load_model_config,
    save_model_config,
    tensors_digest,
)
from vitral.runs.run import find_model_dir
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json
from vitral.weights import custom, hub, npz, open_clip, timm, torchvision, transformers, vit_pytorch
from vitral.weights.adapter import apply_adapter, is_adapter
from vitral.weights.checkpoint import NO_HEAD, Checkpoint, ConvertedModel
from vitral.weights.custom_map import load_key_map
from vitral.weights.detect import detect_format
from vitral.weights.files import RawCheckpoint, check_storage, error_in_one_line, load_raw, save_tensors
from vitral.weights.interpretation import Interpretation, check_options
from vitral.weights.preprocessing import describe_preprocessing
from vitral.weights.reading import RenamedTensors, build_checkpoint

READERS = {
    "timm": timm.to_vitral,
    "transformers": transformers.to_vitral,
    "torchvision": torchvision.to_vitral,
    "vit-pytorch": vit_pytorch.to_vitral,
    "npz": npz.to_vitral,
    "open-clip": open_clip.to_vitral,
}
WRITERS = {
    "timm": timm.from_vitral,
    "transformers": transformers.from_vitral,
    "torchvision": torchvision.from_vitral,
    "vit-pytorch": vit_pytorch.from_vitral,
    "npz": npz.from_vitral,
    "open-clip": open_clip.from_vitral,
}
FORMATS = (*WRITERS, "vitral")
# Suffixes that a destination may have; "" is a folder.
DESTINATION_SUFFIXES = {
    "timm": ("", ".safetensors", ".pth", ".pt"),
    "transformers": ("",),
    "torchvision": (".pth", ".pt", ".safetensors"),
    "vit-pytorch": (".pt", ".pth", ".safetensors"),
    "npz": (".npz",),
    "open-clip": (".safetensors", ".pt", ".pth"),
    "vitral": ("",),
}


def read(
    source: Path | str, options: CheckpointOptions = NO_OPTIONS, *, key_map: Path | str | None = None
) -> Checkpoint:
    """Read a checkpoint; its format is detected from the tensor names, or stated by a key map.

    Args:
        source: File, folder, run, `"hf:owner/name[@revision]"` or the name of a bundled model.
        options: What the files do not contain; the rest is assumed and listed in `Checkpoint.assumptions`.
        key_map: TOML file that names the tensors of a home-made checkpoint.

    Examples:
        >>> checkpoint = vitral.weights.read("model.safetensors")
        >>> model = checkpoint.build()  # a torch.nn.Module
    """
    if options.adapter is not None:
        base = read(source, replace(options, adapter=None), key_map=key_map)
        return apply_adapter(base, Path(options.adapter))
    custom_map = None if key_map is None else load_key_map(Path(key_map))
    location = bundled.resolve(source)
    name = str(location)
    path = hub.download(name) if name.startswith(hub.SCHEME) else Path(location)
    try:
        if (path / "recipe.toml").is_file() or (path / "model" / "config.json").is_file():
            path = find_model_dir(path)
        if path.is_file() and is_adapter(path):
            raise VitralError(
                f"{path} is an adapter, which needs the weights that it was trained on",
                f"Pass those weights and --adapter {shell_quote(path)}, or the run's model/ folder, which is complete",
            )
        raw = load_raw(path)
        raw.notes += bundled.shadowing_notes(source)
        if name.startswith(hub.SCHEME):
            raw.source = name
        check_storage(raw)
        if custom_map is not None:
            return custom.to_vitral(raw, options, custom_map)
        format_name = detect_format(raw)
        return _read_vitral(raw, path, options) if format_name == "vitral" else READERS[format_name](raw, options)
    except OSError as error:
        raise VitralError(f"cannot read {path}: {error.strerror or error}", "Check its permissions") from error
    except MemoryError as error:
        raise VitralError(f"not enough memory to read {source}", "Check that the file is not damaged") from error
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        # A config.json of unknown origin can contain anything, such as a number in place of a list.
        raise VitralError(
            f"cannot interpret {source}: {_unexpected_content(error)}",
            "Check that config.json and the weights belong to the same model",
        ) from error


def _unexpected_content(error: Exception) -> str:
    """An error that the readers do not expect, without Python's vocabulary where it would mislead."""
    return f"no {error} in its files" if isinstance(error, LookupError) else error_in_one_line(error)


def _read_vitral(raw: RawCheckpoint, path: Path, options: CheckpointOptions) -> Checkpoint:
    """Read one of vitral's model folders without building the model."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise VitralError(f"{path} needs the config.json that was saved with it", "Pass the model folder")
    model_config = load_model_config(folder / "config.json")
    check_digest(path if path.is_file() else folder / "weights.safetensors", raw.tensors)
    check_options(raw.source, options, model_config)
    preprocessing = model_config.preprocessing
    reading = Interpretation(source=raw.source, options=options)
    reading.notes.append(f"preprocessing from config.json: {describe_preprocessing(preprocessing)}")
    checkpoint = build_checkpoint(
        RenamedTensors(format="vitral", raw=raw, state=raw.tensors, unexpected=(), source_key=lambda key: key),
        model_config.architecture,
        preprocessing,
        reading,
        variant=model_config.variant,
        classes=model_config.classes,
    )
    checkpoint.headless = model_config.classes == (NO_HEAD,)
    return checkpoint


def write(model: Checkpoint | tuple[ViT, ModelConfig], destination: Path | str, to: str) -> list[str]:
    """Write a model in the format `to`; returns notes about differences. Existing files are never overwritten.

    Args:
        model: A checkpoint, or a model with its config.
        destination: File or folder, depending on the format.
        to: One of `FORMATS`.

    Examples:
        >>> checkpoint = vitral.weights.read("model.safetensors")
        >>> notes = vitral.weights.write(checkpoint, "written", to="transformers")
    """
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint.from_model(*model)
    if to not in FORMATS:
        raise unknown_name_error("format", to, FORMATS)
    path = Path(destination)
    is_file = _is_file_destination(path, to)
    try:
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            raise VitralError(f"{path} already exists", "Choose another name; existing files are not overwritten")
        converted = None if to == "vitral" else WRITERS[to](checkpoint)
        (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(
            f"cannot create {path}: {error.strerror or error}", "Check that the folder is writable"
        ) from error
    if converted is None:
        digest = {DIGEST: tensors_digest(checkpoint.state)}
        save_tensors(path / "weights.safetensors", checkpoint.state, metadata=digest)
        save_model_config(path, checkpoint.model_config)
        return [] if checkpoint.classes or checkpoint.headless else ["no class names: classes are numbered"]
    return _save_converted(converted, path, is_file)


def _is_file_destination(path: Path, to: str) -> bool:
    """Whether the destination is a file rather than a folder; refuses names that do not fit the format."""
    suffixes = DESTINATION_SUFFIXES[to]
    if path.suffix in suffixes:
        return path.suffix != ""
    if "" not in suffixes:
        raise VitralError(f"{path}: a {to} checkpoint is a file", f"Name it {path}{suffixes[0]}")
    if path.suffix in {".bin", ".ckpt", *(suffix for options in DESTINATION_SUFFIXES.values() for suffix in options)}:
        folder = path.with_suffix("")
        if folder.exists():
            folder = folder.with_name(f"{folder.name}-{to}")
        others = truncate_list([name for name, options in DESTINATION_SUFFIXES.items() if path.suffix in options])
        formats = f", or choose a format that is such a file: {others}" if others else ""
        raise VitralError(f"{path}: a {to} model is a folder", f"Name it {folder}{formats}")
    return False


def _save_converted(converted: ConvertedModel, path: Path, is_file: bool) -> list[str]:
    save_tensors(path if is_file else path / "model.safetensors", converted.tensors)
    if is_file and converted.json_files:
        return [*converted.notes, f"config.json was not written; to include it, write a folder: {path.with_suffix('')}"]
    for name, content in converted.json_files.items():
        atomic_write(path / name, dump_json(content, indent=2) + "\n")
    return converted.notes


def convert(
    source: Path | str,
    destination: Path | str,
    to: str,
    options: CheckpointOptions = NO_OPTIONS,
    *,
    key_map: Path | str | None = None,
) -> list[str]:
    """Convert a checkpoint to another format. Arguments as for `read` and `write`.

    Returns:
        The notes of reading, then those of writing.

    Examples:
        >>> vitral.weights.convert("model.safetensors", "converted", to="transformers")
    """
    if to not in FORMATS:
        raise unknown_name_error("format", to, FORMATS)
    checkpoint = read(source, options, key_map=key_map)
    return [*checkpoint.notes, *write(checkpoint, destination, to)]
