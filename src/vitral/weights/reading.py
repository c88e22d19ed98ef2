"""Steps that all readers share: infer the architecture from the tensors and compare them with the model.

Missing, unexpected and wrongly shaped tensors are errors; nothing is loaded partially.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError, truncate_list
from vitral.models.uninitialized import meta_state_dict
from vitral.models.vit import ViTConfig
from vitral.runs.model_io import check_depth, check_finite
from vitral.utils.text import count_text
from vitral.weights.checkpoint import NO_HEAD, Checkpoint, describe_architecture, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import KeyMapping, State

PATCH_KERNEL = "patch_embedding.project.weight"
SourceKeyFn = Callable[[str], str | None]  # vitral's tensor name to the source's, for error messages


@dataclass(kw_only=True)
class RenamedTensors:
    """The tensors of a checkpoint under vitral's names, and what messages about them need."""

    format: str  # one of vitral.weights.FORMATS
    raw: RawCheckpoint
    state: State
    unexpected: Sequence[str]  # names in the source that its key mapping does not contain
    source_key: SourceKeyFn

    @property
    def source(self) -> str:
        return self.raw.source


def rename_tensors(format_name: str, raw: RawCheckpoint, tensors: State, keys: KeyMapping) -> RenamedTensors:
    """Rename `tensors` as `keys` says. Empties `tensors` to save memory, except for unexpected ones."""
    state, unexpected = keys.rename_to_vitral(tensors)
    return RenamedTensors(format=format_name, raw=raw, state=state, unexpected=unexpected, source_key=keys.from_vitral)


def incomplete_error(tensors: RenamedTensors, missing: str) -> VitralError:
    """The error for a tensor without which the architecture cannot be inferred.

    With unexpected tensors, the file is of another model, not incomplete.
    """
    if not tensors.unexpected:
        return VitralError(f"{tensors.source} is not a complete {tensors.format} model", f"Missing: {missing}")
    return VitralError(
        f"the tensors of {tensors.source} are not those of a {tensors.format} ViT",
        f"Expected {missing}; found {_list_names(tensors.unexpected, 4)}",
    )


def check_has_blocks(tensors: RenamedTensors) -> None:
    """Refuse files without the encoder blocks of the library, before anything else is concluded from their tensors."""
    key = "encoder.blocks.0.mlp.expand.weight"
    if key not in tensors.state:
        raise incomplete_error(tensors, tensors.source_key(key) or key)


def drop_tensors(tensors: State, patterns: Mapping[str, str], notes: list[str]) -> None:
    """Remove tensors that the encoder does not need, with a note per pattern that names them."""
    for pattern, part in patterns.items():
        if names := [name for name in tensors if re.fullmatch(pattern, name)]:
            for name in names:
                del tensors[name]
            notes.append(f"{part} is not needed: ignored {_list_names(names, 3)}")


def flatten_patch_kernel(tensors: RenamedTensors) -> tuple[int, int, int]:
    """Flatten the patch convolution (D, C, P, P) to (D, C·P·P); returns width, channels and patch size."""
    kernel = tensors.state[PATCH_KERNEL]
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        name = tensors.source_key(PATCH_KERNEL) or PATCH_KERNEL
        raise unsupported_model_error(tensors.source, f"patches are not square: {name} has shape {tuple(kernel.shape)}")
    tensors.state[PATCH_KERNEL] = kernel.flatten(1)
    return kernel.shape[0], kernel.shape[1], kernel.shape[2]


def split_position_table(state: State, num_prefix: int, num_cls: int) -> None:
    """Arrange position rows as in vitral: for the class token, for the registers too or not, and for the patches.

    `num_prefix` rows precede those of the patches. A class token without a position gets a zero row.
    """
    table = state["position_embedding.table"]
    prefix, patches = table[:, :num_prefix], table[:, num_prefix:]
    if "distillation_token" in state and num_prefix == 2:
        state["distillation_position_table"] = prefix[:, 1:2].clone()
        state["position_embedding.table"] = torch.cat([prefix[:, :1], patches], dim=1)
    elif num_cls and num_prefix == 0:
        state["position_embedding.table"] = torch.cat([torch.zeros_like(patches[:, :1]), patches], dim=1)


def infer_patch_shape(num_values: int, num_patches: int | None, reading: Interpretation) -> tuple[int, int]:
    """Channels and side of a patch, of which the tensors contain only the product C·P²."""
    channels, size = reading.options.channels, reading.options.image_size
    if channels is None and size is not None and num_patches and math.prod(size) % num_patches == 0:
        channels = max(num_values * num_patches // math.prod(size), 1)
    for candidate in (3, 1) if channels is None else (channels,):
        side = math.isqrt(num_values // candidate)
        if candidate * side**2 == num_values:
            if channels is None:
                text = f"{count_text(candidate, 'channel')} in patches of {side}×{side}"
                reading.assume(text, "channels")
            return candidate, side
    expected = "1 or 3 channels" if channels is None else f"{channels} channels"
    raise VitralError(
        f"{reading.source}: patches of {num_values} values are not square with {expected}",
        reading.missing_hint("--channels N"),
    )


def channels_first(tensor: Tensor, channels: int, patch: int) -> Tensor:
    """(..., P·P·C) to (..., C·P·P)."""
    return tensor.unflatten(-1, (patch, patch, channels)).movedim(-1, -3).flatten(-3).contiguous()


def channels_last(tensor: Tensor, channels: int, patch: int) -> Tensor:
    """(..., C·P·P) to (..., P·P·C)."""
    return tensor.unflatten(-1, (channels, patch, patch)).movedim(-3, -1).flatten(-3).contiguous()


def infer_config(tensors: RenamedTensors, *, layer_scale: float | None = None, **settings: Any) -> ViTConfig:
    """Infer the remaining fields of the config from the tensors; `settings` are the fields set by the reader."""
    state, source = tensors.state, tensors.source

    def shape(key: str) -> tuple[int, ...]:
        if key not in state or state[key].ndim == 0:
            raise incomplete_error(tensors, tensors.source_key(key) or key)
        return tuple(state[key].shape)

    first = "encoder.blocks.0"
    width, hidden = shape(PATCH_KERNEL)[0], shape(f"{first}.mlp.contract.weight")[-1]
    if is_gated(state) and settings.get("activation") != "swiglu":
        raise unsupported_model_error(source, "SwiGLU MLP")
    if f"{first}.norm1.weight" in state and f"{first}.norm1.bias" not in state:
        raise unsupported_model_error(source, "norms without bias (RMS norm)")
    classifiers, registers = _classifier_keys(state), shape("registers")[1] if "registers" in state else 0
    num_cls = int("class_token.token" in state)
    has_layer_scale = any(key.endswith("residual1.scale") for key in state)
    try:
        return ViTConfig(
            width=width,
            depth=count_blocks(source, state),
            mlp_width=None if hidden == 4 * width else hidden,
            num_classes=shape(classifiers[0])[0] if classifiers else 1,
            head="mlp" if any("hidden" in key for key in state) else "linear",
            class_token=True if num_cls and settings.get("pooling", "class") != "class" else None,
            registers=registers,
            register_positions=registers > 0 and _num_prefix_rows(state, settings) == registers + num_cls,
            layer_scale=(layer_scale or 1e-5) if has_layer_scale else None,
            qkv_bias=any(key.endswith("attention.qkv.bias") for key in state),
            qk_norm=any("attention.norm_q" in key for key in state),
            pre_norm="pre_norm.weight" in state,
            **settings,
        )
    except ValueError as error:
        raise _invalid_config_error(source, error) from error


def is_gated(state: State) -> bool:
    """Whether the first layer of the MLP computes gates and values, as in SwiGLU."""
    expand, contract = (state.get(f"encoder.blocks.0.mlp.{name}.weight") for name in ("expand", "contract"))
    return expand is not None and contract is not None and len(expand) == 2 * contract.shape[-1]


def _num_prefix_rows(state: State, settings: dict[str, Any]) -> int:
    """Rows of the position table before those of the patches."""
    (height, width), patch = settings["image_size"], settings["patch_size"]
    table = state.get("position_embedding.table")
    return 0 if table is None else table.shape[1] - (height // patch) * (width // patch)


def count_blocks(source: str, state: State) -> int:
    """The number of encoder blocks. Refuses gaps, so that the name of one tensor cannot claim any depth."""
    indices = {int(match[1]) for key in state if (match := re.match(r"encoder\.blocks\.(\d{1,9})\.", key))}
    missing = next((index for index in range(len(indices)) if index not in indices), None)
    if missing is not None:
        raise VitralError(
            f"{source} has {len(indices)} blocks, up to block {max(indices)}, but no block {missing}",
            "The file is incomplete, or it contains tensors of another model",
        )
    return len(indices)


def _invalid_config_error(source: str, error: ValueError) -> VitralError:
    return VitralError(f"{source}: {error}", "No model of vitral matches these tensors")


def _classifier_keys(state: State) -> list[str]:
    return [key for key in state if key.startswith("head.") and key.endswith("out.weight")]


def build_checkpoint(
    tensors: RenamedTensors,
    config: ViTConfig,
    preprocessing: Preprocessing,
    reading: Interpretation,
    *,
    variant: str = "plain",
    classes: Sequence[str] | None = None,
) -> Checkpoint:
    """Compare the tensors with the model that the config describes and collect everything in a `Checkpoint`."""
    raw, state, format_name = tensors.raw, tensors.state, tensors.format
    check_depth(raw.source, config, state)
    try:
        expected = meta_state_dict(variant, config)
    except ValueError as error:
        raise _invalid_config_error(raw.source, error) from error
    headless = format_name != "vitral" and not _classifier_keys(state)
    if headless:
        reading.notes.append("no classifier in the file: usable for features and fine-tuning (a zero head was added)")
        like = state[PATCH_KERNEL]
        state |= {key: like.new_zeros(tensor.shape) for key, tensor in expected.items() if ".out." in f".{key}"}
    _check_tensors(tensors, expected)
    if preprocessing.image_size != config.image_size and "position_embedding.table" in state:
        (height, width), (old_height, old_width) = preprocessing.image_size, config.image_size
        reading.notes.append(
            f"images are {height}×{width}, positions are for {old_height}×{old_width}: "
            f"resampled as in {format_name} ({config.position_resampling})"
        )
    if classes is not None and len(classes) != config.num_classes:
        reading.notes.append(f"{len(classes)} class names for {config.num_classes} classes: names ignored")
        classes = None
    return Checkpoint(
        format=format_name,
        source=raw.source,
        config=config,
        variant=variant,
        state=state,
        preprocessing=preprocessing,
        classes=None if classes is None else tuple(classes),
        headless=headless,
        notes=[
            *raw.notes,
            f"{format_name}: {describe_architecture(config, variant, headless=headless or classes == (NO_HEAD,))}",
            *reading.notes,
            *reading.assumption_notes(),
        ],
        assumptions=tuple(reading.assumptions),
    )


def _check_tensors(tensors: RenamedTensors, expected: State) -> None:
    def shape_text(tensor: Tensor) -> str:
        return "×".join(map(str, tensor.shape))

    state = tensors.state
    common = [key for key in expected if key in state]
    names = {key: tensors.source_key(key) or key for key in expected.keys() | state.keys()}
    problems = {
        "missing": [names[key] for key in expected if key not in state],
        "unexpected": [*tensors.unexpected, *(names[key] for key in state if key not in expected)],
        "with a wrong shape": [
            f"{names[key]} ({shape_text(state[key])}, expected {shape_text(expected[key])})"
            for key in common
            if state[key].shape != expected[key].shape
        ],
        "not floating point": [
            f"{names[key]} ({state[key].dtype})" for key in common if not state[key].is_floating_point()
        ],
    }
    problems = {problem: keys for problem, keys in problems.items() if keys}
    if problems:
        counts = ", ".join(f"{len(keys)} {problem}" for problem, keys in problems.items())
        lists = "; ".join(f"{problem}: {_list_names(keys, 8)}" for problem, keys in problems.items())
        what = f"the tensors of {tensors.source} do not match a {tensors.format} ViT: {counts}"
        raise VitralError(what, _capitalize(lists))
    check_finite(tensors.source, {names[key]: tensor for key, tensor in state.items()})


def _list_names(names: Sequence[str], limit: int) -> str:
    """The first tensor names, each shortened: a file may contain names of any length."""
    return truncate_list([name if len(name) <= 120 else f"{name[:119]}…" for name in names], limit)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
