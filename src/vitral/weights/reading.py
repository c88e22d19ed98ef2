"""Steps that all readers share: infer the architecture from the tensors and compare them with the model.

Missing, unexpected and wrongly shaped tensors are errors; nothing is loaded partially.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError, shell_quote, truncate_list
from vitral.models.vit import ViTConfig
from vitral.weights.checkpoint import ArchitectureHints, Checkpoint, describe_architecture, unsupported_model_error
from vitral.weights.files import RawCheckpoint
from vitral.weights.key_mapping import State
from vitral.weights.uninitialized import meta_state_dict

PATCH_KERNEL = "patch_embedding.project.weight"
# Attention heads by width, as in papers and libraries: head dimension 64 up to L, 16 heads beyond.
USUAL_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1664: 16}

SourceKeyFn = Callable[[str], str | None]  # vitral's tensor name to the source's, for error messages


def convert_hint(flag: str, source: str, python: str) -> str:
    """How to specify what the tensors do not contain: `vitral convert` stores it for all other commands."""
    return f"Convert it once: vitral convert {shell_quote(source)} FOLDER {flag}, then use FOLDER (Python: {python})"


def image_size_hint(source: str) -> str:
    return convert_hint("--image-size H W", source, "image_size=(H, W)")


def incomplete_error(source: str, library: str, missing: str) -> VitralError:
    return VitralError(f"{source} is not a complete {library} model", f"Missing: {missing}")


def flatten_patch_kernel(raw: RawCheckpoint, state: State, name: str) -> tuple[int, int, int]:
    """Flatten the patch convolution (D, C, P, P) to (D, C·P·P); returns width, channels and patch size."""
    kernel = state[PATCH_KERNEL]
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise unsupported_model_error(raw.source, f"patches are not square: {name} has shape {tuple(kernel.shape)}")
    state[PATCH_KERNEL] = kernel.flatten(1)
    return kernel.shape[0], kernel.shape[1], kernel.shape[2]


def resolve_heads(
    width: int, hints: ArchitectureHints, stored: int | None, origin: str, notes: list[str], source: str
) -> int:
    """The number of attention heads, which cannot be inferred from most formats' tensors.

    In order of precedence: `stored` in a config (`origin` names it), specified by the user, usual for this width.
    """
    if stored is not None:
        if hints.heads not in (None, stored):
            raise VitralError(f"{source} has {stored} heads ({origin}), not {hints.heads}", "Omit heads")
        notes.append(f"heads: {stored}, from {origin}")
        return stored
    if hints.heads is not None:
        if hints.heads < 1 or width % hints.heads:
            raise VitralError(
                f"{source}: width {width} is not divisible by {hints.heads} heads",
                f"Usual is one head per 64 channels: {max(width // 64, 1)}",
            )
        # A recipe passes on heads that were assumed when the checkpoint was read first.
        is_usual = hints.heads == USUAL_HEADS.get(width)
        notes.append(f"heads: {hints.heads}, " + (f"usual for width {width}" if is_usual else "as specified"))
        return hints.heads
    if width not in USUAL_HEADS:
        raise VitralError(
            f"{source}: the number of heads of a model of width {width} cannot be inferred from its tensors",
            convert_hint("--heads N", source, "heads=N"),
        )
    notes.append(f"heads: {USUAL_HEADS[width]}, assumed (usual for width {width})")
    return USUAL_HEADS[width]


def resolve_position_table(
    num_rows: int,
    prefix_options: Sequence[int],
    patch: int,
    hints: ArchitectureHints,
    stored_size: tuple[int, int] | None,
    source: str,
) -> tuple[int, tuple[int, int]]:
    """How many rows of a position table precede the patches (one of `prefix_options`), and the image size."""
    size = hints.image_size or stored_size
    for num_prefix in prefix_options:
        if size and size[0] % patch == size[1] % patch == 0 and math.prod(size) // patch**2 == num_rows - num_prefix:
            return num_prefix, size
    if hints.image_size is None:
        for num_prefix in prefix_options:
            side = math.isqrt(max(num_rows - num_prefix, 0))
            if side and side**2 == num_rows - num_prefix:
                return num_prefix, (side * patch, side * patch)
        raise VitralError(f"{source}: {num_rows} positions do not form a square image", image_size_hint(source))
    height, width = hints.image_size
    raise VitralError(
        f"{source}: {num_rows} positions do not fit images of {height}×{width}",
        _matching_sizes_hint(num_rows - prefix_options[0], patch, source),
    )


def _matching_sizes_hint(num_patches: int, patch: int, source: str) -> str:
    """Image sizes with this number of patches, the squarest first, and how to train at another size."""
    heights = [h for h in range(math.isqrt(max(num_patches, 0)), 0, -1) if num_patches % h == 0][:3]
    sizes = " or ".join(f"{h * patch} {num_patches // h * patch}" for h in heights)
    other = f"for another size: vitral train DATA --init-from {shell_quote(source)} --model.image-size H W"
    return f"Matching sizes: --image-size {sizes}, or transposed; {other}" if sizes else f"Omit the size; {other}"


def infer_config(
    raw: RawCheckpoint, state: State, source_key: SourceKeyFn, layer_scale: float | None = None, **settings: Any
) -> ViTConfig:
    """Infer the remaining fields of the config from the tensors; `settings` are the fields set by the reader."""

    def shape(key: str) -> tuple[int, ...]:
        if key not in state or state[key].ndim == 0:
            raise VitralError(f"{raw.source} is not a complete model", f"Missing: {source_key(key) or key}")
        return tuple(state[key].shape)

    block_indices = [int(match[1]) for key in state if (match := re.match(r"encoder\.blocks\.(\d+)\.", key))]
    first = "encoder.blocks.0"
    width, hidden = shape(PATCH_KERNEL)[0], shape(f"{first}.mlp.expand.weight")[0]
    if hidden == 2 * shape(f"{first}.mlp.contract.weight")[-1]:
        raise unsupported_model_error(raw.source, "SwiGLU MLP")
    if f"{first}.norm1.weight" in state and f"{first}.norm1.bias" not in state:
        raise unsupported_model_error(raw.source, "norms without bias (RMS norm)")
    classifiers = _classifier_keys(state)
    has_layer_scale = any(key.endswith("residual1.scale") for key in state)
    try:
        return ViTConfig(
            width=width,
            depth=max(block_indices) + 1,
            mlp_width=None if hidden == 4 * width else hidden,
            num_classes=shape(classifiers[0])[0] if classifiers else 1,
            head="mlp" if any("hidden" in key for key in state) else "linear",
            registers=shape("registers")[1] if "registers" in state else 0,
            layer_scale=(layer_scale or 1e-5) if has_layer_scale else None,
            qkv_bias=any(key.endswith("attention.qkv.bias") for key in state),
            qk_norm=any("attention.norm_q" in key for key in state),
            **settings,
        )
    except ValueError as error:
        raise _invalid_config_error(raw.source, error) from error


def _invalid_config_error(source: str, error: ValueError) -> VitralError:
    return VitralError(f"{source}: {error}", "No model of vitral matches these tensors")


def _classifier_keys(state: State) -> list[str]:
    return [key for key in state if key.startswith("head.") and key.endswith("out.weight")]


def build_checkpoint(
    format_name: str,
    raw: RawCheckpoint,
    state: State,
    unexpected: list[str],
    config: ViTConfig,
    source_key: SourceKeyFn,
    preprocessing: Preprocessing,
    notes: list[str],
    *,
    variant: str = "plain",
    classes: Sequence[str] | None = None,
) -> Checkpoint:
    """Compare the tensors with the model that the config describes and collect everything in a `Checkpoint`.

    unexpected: Tensor names of the source that its key mapping does not contain.
    """
    try:
        expected = meta_state_dict(variant, config)
    except ValueError as error:
        raise _invalid_config_error(raw.source, error) from error
    headless = format_name != "vitral" and not _classifier_keys(state)
    if headless:
        notes.append("no classifier in the file: usable for features and fine-tuning (a zero head was added)")
        like = state[PATCH_KERNEL]
        state |= {key: like.new_zeros(tensor.shape) for key, tensor in expected.items() if ".out." in f".{key}"}
    _check_tensors(format_name, raw.source, state, unexpected, expected, source_key)
    if classes is not None and len(classes) != config.num_classes:
        notes.append(f"{len(classes)} class names for {config.num_classes} classes: names ignored")
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
        notes=[*raw.notes, f"{format_name}: {describe_architecture(config, variant)}", *notes],
    )


def _check_tensors(
    format_name: str,
    source: str,
    state: State,
    unexpected: list[str],
    expected: State,
    source_key: SourceKeyFn,
) -> None:
    def shape_text(tensor: Tensor) -> str:
        return "×".join(map(str, tensor.shape))

    common = [key for key in expected if key in state]
    names = {key: source_key(key) or key for key in expected.keys() | state.keys()}
    problems = {
        "missing": [names[key] for key in expected if key not in state],
        "unexpected": [*unexpected, *(names[key] for key in state if key not in expected)],
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
        lists = "; ".join(f"{problem}: {truncate_list(keys, 8)}" for problem, keys in problems.items())
        raise VitralError(f"the tensors of {source} do not match a {format_name} ViT: {counts}", _capitalize(lists))


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
