"""The model folder: weights.safetensors and config.json, all that inference needs.

It is portable: `model/` of a run folder can be copied and used on its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.data.targets import TaskName
from vitral.errors import VitralError, error_reason
from vitral.models.calibration import Calibration
from vitral.models.target_scaling import TargetScaling
from vitral.models.uninitialized import build_uninitialized, meta_state_dict
from vitral.models.variants import SAVED_VARIANTS, check_variant, config_class, upgrade_architecture
from vitral.models.vit import ViT, ViTConfig, check_divisible
from vitral.runs.run import RUN_FORMAT, find_model_dir, format_error, read_error_guard
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json_object
from vitral.utils.serialization import from_dict, to_dict

DIGEST = "sha256"  # name of the digest in config.json and in the metadata of weights.safetensors
TRAINING_IMAGES_FILE = "training_images.npz"  # fingerprints of the training images, to recognise them in evaluations


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The content of config.json: how to build the model, prepare its input and interpret its output."""

    architecture: ViTConfig
    preprocessing: Preprocessing
    classes: tuple[str, ...]  # names of the classes, or of the targets of a regression, in the order of the outputs
    trained_on: str  # name of the dataset
    epoch: int  # epoch of these weights, the one with the best validation result
    variant: str = "plain"  # name in vitral.models.variants.SAVED_VARIANTS
    calibration: Calibration = field(default_factory=Calibration)
    task: TaskName = "classification"  # what the outputs are: one class, independent labels, or values
    target_scaling: TargetScaling | None = None  # of a regression: its outputs are standardised values

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The probability from which each label is predicted; empty unless the model is multi-label."""
        if self.task != "multilabel":
            return ()
        return self.calibration.thresholds or (0.5,) * len(self.classes)

    def __post_init__(self) -> None:
        if (self.calibration.activation == "sigmoid") != (self.task == "multilabel"):
            raise ValueError(f"calibration.activation is {self.calibration.activation!r}, but task is {self.task!r}")
        if self.calibration.thresholds and len(self.calibration.thresholds) != len(self.classes):
            raise ValueError(f"{len(self.calibration.thresholds)} thresholds for {len(self.classes)} classes")
        if (self.target_scaling is not None) != (self.task == "regression"):
            raise ValueError(f"target_scaling is for regression, but task is {self.task!r}")
        if self.target_scaling is not None and len(self.target_scaling.mean) != len(self.classes):
            raise ValueError(
                f"target_scaling has {len(self.target_scaling.mean)} targets, expected {len(self.classes)}"
            )
        if len(self.classes) != self.architecture.num_classes:
            raise ValueError(
                f"classes has {len(self.classes)} names, but architecture.num_classes is "
                f"{self.architecture.num_classes}"
            )
        check_variant(self.variant, self.architecture, tuple(SAVED_VARIANTS))
        if self.preprocessing.channels != self.architecture.channels:
            raise ValueError(
                f"preprocessing.channels is {self.preprocessing.channels}, but architecture.channels is "
                f"{self.architecture.channels}"
            )
        check_divisible(self.preprocessing.image_size, self.architecture.patch_size)


def published_name(source: str) -> str:
    """The name of a dataset or checkpoint without the folders of this machine, for files that are published.

    Built-in datasets and `hf:owner/name` are unchanged; so is the format in "timm: /models/vit.safetensors".
    """
    library, separator, path = source.rpartition(": ")
    if "/" in library:
        library, separator, path = "", "", source
    if not path.startswith("hf:"):
        path = PurePath(path.replace("\\", "/")).name or "images"
    return f"{library}{separator}{path}"


def save_model(folder: Path, model: ViT, config: ModelConfig) -> None:
    """Write weights.safetensors, then config.json: a folder that contains config.json is complete."""
    create_model_dir(folder)
    save_weights(folder / "weights.safetensors", model.state_dict())
    save_model_config(folder, config)


def create_model_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(f"cannot create {folder}: {error.strerror}", "Check that its parent is writable") from error


def save_model_config(folder: Path, config: ModelConfig) -> None:
    content = {"format": RUN_FORMAT, "vitral_version": __version__, **to_dict(config)}
    atomic_write(folder / "config.json", dump_json({**content, DIGEST: config_digest(content)}, indent=2) + "\n")


def config_digest(content: dict[str, Any]) -> str:
    """SHA-256 of the values in config.json, whatever their order and indentation."""
    return hashlib.sha256(dump_json(content, sort_keys=True).encode()).hexdigest()


def save_weights(path: Path, state: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the SHA-256 of its tensors in its metadata."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    atomic_write(path, to_safetensors(tensors, metadata={**(metadata or {}), DIGEST: tensors_digest(tensors)}))


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the names, dtypes, shapes and values, whatever their order in a file."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def weights_damage(path: Path) -> str | None:
    """Why a file of `save_weights` cannot be used; None if it is intact."""
    try:
        load_weights(path)
    except VitralError as error:
        return error.what.removeprefix(f"{path} ").removeprefix("is ")
    return None


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file and compare its tensors with its digest, if it has one: vitral's files do."""
    try:
        tensors = load_file(path)
        check_digest(path, tensors)
    except FileNotFoundError as error:
        raise VitralError(f"{path} is missing", "The folder was not copied completely; copy it again") from error
    except (OSError, SafetensorError) as error:
        raise VitralError(
            f"{path} is not a complete safetensors file: {error}", "Copy it again, or train again"
        ) from error
    return tensors


def check_digest(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse tensors that differ from the digest in their safetensors file, if it has one."""
    with safe_open(path, "pt") as file:
        digest = (file.metadata() or {}).get(DIGEST)
    if digest not in (None, tensors_digest(tensors)):
        raise VitralError(f"{path} is damaged: its SHA-256 does not match", "Copy it again, or train again")


def load_model(path: Path | str) -> tuple[ViT, ModelConfig]:
    """The model of a run folder or of a model folder, in evaluation mode."""
    with read_error_guard(Path(path)):
        folder = find_model_dir(Path(path))
    config = load_model_config(folder / "config.json")
    actual = load_weights(folder / "weights.safetensors")
    check_depth(folder, config.architecture, actual)
    expected = meta_state_dict(config.variant, config.architecture)
    differences = [_tensor_difference(name, expected, actual) for name in sorted(expected.keys() | actual.keys())]
    if mismatches := [difference for difference in differences if difference is not None]:
        raise VitralError(
            f"{folder}: weights.safetensors does not match config.json ({len(mismatches)} tensors differ)",
            f"First differences: {', '.join(mismatches[:4])}",
        )
    check_finite(folder / "weights.safetensors", actual)
    model = build_uninitialized(config.variant, config.architecture)
    model.load_state_dict(actual)
    return model.eval(), config


def check_depth(source: object, architecture: ViTConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a depth far beyond the weights before a model is built: a damaged config.json can request any."""
    if architecture.depth > len(tensors):
        raise VitralError(
            f"{source} has {len(tensors)} tensors, too few for depth {architecture.depth:,} of config.json",
            "Copy the folder again, or train again",
        )


def check_finite(source: object, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are NaN or infinite: every prediction would be, too."""
    for name, tensor in tensors.items():
        values = tensor.float() if tensor.itemsize == 1 else tensor  # isfinite does not support FP8
        num_finite = int(values.isfinite().sum())
        if num_finite != tensor.numel():
            raise VitralError(
                f"{source}: {tensor.numel() - num_finite:,} of {tensor.numel():,} values of {name} are NaN or infinite",
                "Training diverged or the file is damaged; use an earlier checkpoint",
            )


def _tensor_difference(name: str, expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> str | None:
    """How a saved tensor differs from the model's; None if the shapes are equal."""
    if name not in actual:
        return f"{name} (missing)"
    if name not in expected:
        return f"{name} (not in the model)"
    if expected[name].is_floating_point() and not actual[name].is_floating_point():
        return f"{name} ({actual[name].dtype}, expected floating point)"
    actual_shape, expected_shape = ("×".join(map(str, tensors[name].shape)) for tensors in (actual, expected))
    return f"{name} ({actual_shape}, expected {expected_shape})" if actual_shape != expected_shape else None


def load_model_config(path: Path) -> ModelConfig:
    """Read config.json. Raises VitralError for damaged files and other formats.

    A file without a digest, such as one written by an older version, is not compared with it.
    """
    try:
        content = read_json_object(path)
        digest, actual_digest = content.pop(DIGEST, None), config_digest(content)
    except (OSError, ValueError) as error:
        raise VitralError(f"cannot read {path}: {error_reason(error)}", "Copy it again, or train again") from error
    if "format" not in content:
        raise VitralError(
            f"cannot read {path}: vitral did not write it (it has no field 'format')", "Copy it again, or train again"
        )
    version, vitral_version = content.pop("format"), content.pop("vitral_version", None)
    if version != RUN_FORMAT:
        raise format_error(path, version, vitral_version)
    try:
        config = model_config_from_dict(content)
    except VitralError as error:
        raise VitralError(f"{path}: {error.what}", error.hint) from error
    if digest not in (None, actual_digest):
        raise VitralError(
            f"{path} is damaged or was edited: its SHA-256 does not match",
            f'Copy it again; to keep your own changes, delete the line "{DIGEST}" from it',
        )
    return config


def model_config_from_dict(content: dict[str, Any]) -> ModelConfig:
    """A config from nested dictionaries. The variant decides the class of `architecture`."""
    if "architecture" in content:
        content = {**content, "architecture": upgrade_architecture(content["architecture"])}
    return from_dict(ModelConfig, content, field_types={"architecture": config_class(content.get("variant"))})
