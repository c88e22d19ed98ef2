"""adapter.safetensors: what a run with `--tune` has trained, without the weights that it left as they were.

The file holds the trained tensors under vitral's names (the factors of LoRA as in peft) and, in its metadata, how to
apply them: rank, alpha and targets, the SHA-256 of the base weights, and the config of the resulting model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitral.errors import VitralError, error_reason, truncate_list
from vitral.models.lora import LORA_MARK, LoRAConfig, merge_lora
from vitral.models.uninitialized import meta_state_dict
from vitral.runs.model_io import (
    DIGEST,
    ModelConfig,
    check_finite,
    create_model_dir,
    load_weights,
    model_config_from_dict,
    published_name,
    save_weights,
)
from vitral.utils.json_toml import dump_json, parse_json_object
from vitral.utils.serialization import from_dict, to_dict
from vitral.weights.adapt import adapt_weights
from vitral.weights.checkpoint import Checkpoint

ADAPTER_FILE = "adapter.safetensors"
ADAPTER_FORMAT = "vitral-adapter-1"  # raised when the content of an adapter changes


@dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """The checkpoint that an adapter was trained on."""

    source: str
    sha256: str  # of its tensors under vitral's names, before they were adapted to other classes or image sizes


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Trained tensors and how to apply them to the base weights."""

    tune: str  # Recipe.tune
    lora: LoRAConfig | None  # of tune "lora"
    base: BaseWeights
    config: ModelConfig  # of the model with the adapter
    tensors: dict[str, Tensor]

    def description(self) -> str:
        if self.lora is None:
            return f"{self.tune}, {len(self.tensors)} tensors"
        return f"LoRA of rank {self.lora.rank}, alpha {self.lora.alpha:g}, on {', '.join(self.lora.targets)}"


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write adapter.safetensors to a model folder."""
    metadata = {
        "format": ADAPTER_FORMAT,
        "tune": adapter.tune,
        "base": published_name(adapter.base.source),
        "base_sha256": adapter.base.sha256,
        "config": dump_json(to_dict(adapter.config)),
    }
    if adapter.lora is not None:
        metadata["lora"] = dump_json(to_dict(adapter.lora))
    create_model_dir(folder)
    save_weights(folder / ADAPTER_FILE, adapter.tensors, metadata)


def is_adapter(path: Path) -> bool:
    """Whether this is a safetensors file with the metadata of an adapter."""
    try:
        with safe_open(path, "pt") as file:
            return str((file.metadata() or {}).get("format", "")).startswith("vitral-adapter")
    except (OSError, SafetensorError):
        return False


def read_adapter(path: Path) -> Adapter:
    """Read and verify an adapter. Raises VitralError for damaged files and for files that are not adapters."""
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise VitralError(f"cannot read the adapter {path}: {error_reason(error)}", "Copy it again") from error
    if metadata.get("format") != ADAPTER_FORMAT or DIGEST not in metadata:
        actual = "peft's format" if metadata.get("format") == "pt" else f"format {metadata.get('format')!r}"
        raise VitralError(
            f"{path} is not an adapter of vitral ({actual}, expected {ADAPTER_FORMAT!r})",
            f"Pass the {ADAPTER_FILE} that vitral train --tune wrote to the run's model/ folder",
        )
    tensors = load_weights(path)
    check_finite(path, tensors)
    try:
        lora = from_dict(LoRAConfig, parse_json_object(metadata["lora"])) if "lora" in metadata else None
        return Adapter(
            tune=metadata["tune"],
            lora=lora,
            base=BaseWeights(source=metadata["base"], sha256=metadata["base_sha256"]),
            config=model_config_from_dict(parse_json_object(metadata["config"])),
            tensors=tensors,
        )
    except (LookupError, ValueError, VitralError) as error:
        reason = error.what if isinstance(error, VitralError) else error_reason(error)
        raise VitralError(f"cannot interpret the metadata of {path}: {reason}", "Copy it again") from error


def apply_adapter(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """The model that was trained: `checkpoint`, the base weights, with the adapter at `path` merged into them."""
    adapter = read_adapter(path)
    if checkpoint.sha256() != adapter.base.sha256:
        raise VitralError(
            f"{path} was trained on other weights than those of {checkpoint.source}",
            f"Pass the checkpoint that it was trained on: {adapter.base.source} (SHA-256 {adapter.base.sha256[:12]}…)",
        )
    config = adapter.config
    base = adapt_weights(checkpoint, config.variant, config.architecture, config.classes)
    _check_tensors(path, adapter)
    state = merge_lora({**base.state, **adapter.tensors}, adapter.lora.scaling if adapter.lora else 1.0)
    return Checkpoint(
        format=checkpoint.format,
        source=checkpoint.source,
        config=config.architecture,
        variant=config.variant,
        state=state,
        preprocessing=config.preprocessing,
        classes=config.classes,
        notes=[*checkpoint.notes, f"merged the adapter {path.name}: {adapter.description()}"],
        assumptions=checkpoint.assumptions,
    )


def _check_tensors(path: Path, adapter: Adapter) -> None:
    """Compare the tensors with the model: the head and all factors of LoRA are required, nothing else is added."""
    model = meta_state_dict(adapter.config.variant, adapter.config.architecture)
    factors = _lora_shapes(model, adapter.lora) if adapter.lora else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()} | factors
    required = {name for name in shapes if name.startswith("head.") or LORA_MARK in name}
    problems = [f"{name} (missing)" for name in sorted(required - adapter.tensors.keys())]
    for name, tensor in adapter.tensors.items():
        if name not in shapes:
            problems.append(f"{name} (not in the model)")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} ({tuple(tensor.shape)}, expected {shapes[name]})")
    if problems:
        raise VitralError(
            f"{path} does not fit its own config: {len(problems)} tensors differ",
            f"First differences: {truncate_list(problems, 4)}",
        )


def _lora_shapes(model: dict[str, Tensor], lora: LoRAConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of A and B for every adapted layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in model.items():
        layer = name.removesuffix(".weight")
        if name.startswith("encoder.blocks.") and name != layer and layer.rpartition(".")[2] in lora.targets:
            shapes[f"{layer}.lora_A.weight"] = (lora.rank, weight.shape[1])
            shapes[f"{layer}.lora_B.weight"] = (weight.shape[0], lora.rank)
    return shapes
