"""Home-made checkpoints: any pre-norm ViT whose tensor names a key map translates.

Shapes: D width, M hidden width of the MLP, K classes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from vitral.errors import VitralError, truncate_list
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.custom_map import CustomMap
from vitral.weights.files import RawCheckpoint
from vitral.weights.interpretation import Interpretation
from vitral.weights.key_mapping import State, fuse_qkv
from vitral.weights.preprocessing import HALF
from vitral.weights.reading import (
    PATCH_KERNEL,
    RenamedTensors,
    build_checkpoint,
    channels_first,
    infer_config,
    infer_patch_shape,
    split_position_table,
)

TABLE = "position_embedding.table"
# Shapes by the end of vitral's name; a letter is a size that other tensors determine, None any size.
SHAPES: dict[str, tuple[str | None, ...]] = {
    "attention.qkv": ("3D", "D"),
    "attention.q": ("D", "D"),
    "attention.k": ("D", "D"),
    "attention.v": ("D", "D"),
    "attention.project": ("D", "D"),
    "mlp.expand": ("M", "D"),
    "mlp.contract": ("D", "M"),
    "attention_pooling.kv": ("2D", "D"),
    "attention_pooling.q": ("D", "D"),
    "attention_pooling.k": ("D", "D"),
    "attention_pooling.v": ("D", "D"),
    "attention_pooling.project": ("D", "D"),
    "head.hidden": ("D", "D"),
    "head.out": (None, "D"),
    "norm1": ("D",),
    "norm2": ("D",),
    "encoder.norm": ("D",),
    "pooled_norm": ("D",),
    "pre_norm": ("D",),
    "attention_pooling.norm": ("D",),
}


def to_vitral(raw: RawCheckpoint, options: CheckpointOptions, custom_map: CustomMap) -> Checkpoint:
    """Read a checkpoint with a key map. `options` win over the values in the map."""
    reading = Interpretation(source=raw.source, options=_merged_options(custom_map, options))
    assigned, ignored = custom_map.assign(raw.source, raw.tensors)
    names = {key: name for key, (name, _) in assigned.items()}
    if ignored:
        reading.notes.append(f"ignored as listed in {custom_map.path}: {truncate_list(ignored, 4)}")
    state = {key: _transposed(raw.tensors.pop(name), rule.transpose) for key, (name, rule) in assigned.items()}
    width = _width(raw.source, state, custom_map)
    _check_shapes(raw.source, state, names, width)
    heads = reading.heads(width)
    _arrange_qkv(state, width, heads, custom_map.qkv_layout)
    channels, patch = _arrange_patches(state, names, custom_map, reading)
    pooling, size = _arrange_tokens(state, width, patch, reading)
    is_late_norm = "pooled_norm.weight" in state and pooling == "mean"
    has_final_norm = "encoder.norm.weight" in state or "pooled_norm.weight" in state
    if not has_final_norm:
        reading.notes.append("no layer norm after the last block")
    _add_zero_biases(state, names, reading)
    for leaf in ("weight", "bias"):
        if f"pooled_norm.{leaf}" in state and not is_late_norm:  # selecting the class token commutes with the norm
            state[f"encoder.norm.{leaf}"] = state.pop(f"pooled_norm.{leaf}")
    tensors = RenamedTensors(format="custom", raw=raw, state=state, unexpected=(), source_key=names.get)
    config = infer_config(
        tensors,
        image_size=size,
        patch_size=patch,
        channels=channels,
        heads=heads,
        pooling=pooling,
        positions="learned" if TABLE in state else "none",
        final_norm=has_final_norm,
        activation=reading.setting("activation", "gelu", "gelu activation"),
        norm_eps=reading.setting("norm_eps", 1e-5, "norm eps 1e-05"),
    )
    preprocessing = reading.preprocessing(size, channels, mean_std=HALF, crop=1.0, interpolation="bilinear")
    return build_checkpoint(
        tensors,
        config,
        preprocessing,
        reading,
        variant="late-norm" if is_late_norm else "patch-norm" if "patch_embedding.norm.weight" in state else "plain",
        classes=custom_map.classes,
    )


def _merged_options(custom_map: CustomMap, options: CheckpointOptions) -> CheckpointOptions:
    try:
        return replace(CheckpointOptions(**custom_map.options), **options.given)
    except (TypeError, ValueError) as error:
        raise VitralError(f"{custom_map.path}: {error}", "Correct the value, or omit it") from error


def _transposed(tensor: Tensor, transpose: bool) -> Tensor:
    return tensor.T.contiguous() if transpose and tensor.ndim == 2 else tensor


def _width(source: str, state: State, custom_map: CustomMap) -> int:
    if PATCH_KERNEL not in state:
        raise VitralError(
            f"{custom_map.path} names no tensor of {source} as {PATCH_KERNEL}",
            "A Vision Transformer needs one: the convolution or linear layer that embeds the patches",
        )
    return state[PATCH_KERNEL].shape[0]


def _check_shapes(source: str, state: State, names: dict[str, str], width: int) -> None:
    """Raise VitralError for the first tensor of a wrong shape, with the tensor's name in the file."""
    expand = next((tuple(t.shape) for key, t in state.items() if key.endswith("mlp.expand.weight")), ())
    hidden = next((size for size in expand if size != width), width) if expand else None  # even if transposed
    sizes = {None: None, "D": width, "2D": 2 * width, "3D": 3 * width, "M": hidden}
    for key, tensor in state.items():
        module, _, leaf = key.rpartition(".")
        template = next((shape for end, shape in SHAPES.items() if f".{module}".endswith(f".{end}")), None)
        if template is None or "attention_pooling.mlp" in key:
            continue
        expected = [sizes[symbol] for symbol in (template if leaf == "weight" else template[:1])]
        if len(expected) != tensor.ndim or any(a not in (None, b) for a, b in zip(expected, tensor.shape, strict=True)):
            raise _shape_error(source, names[key], key, tensor, expected)


def _shape_error(source: str, name: str, key: str, tensor: Tensor, expected: list[int | None]) -> VitralError:
    text = "×".join("any" if size is None else str(size) for size in expected)
    reverse = expected[::-1]
    is_transposed = tensor.ndim == 2 and all(a in (None, b) for a, b in zip(reverse, tensor.shape, strict=True))
    hint = (
        f'If it is this tensor, stored transposed: "{name}" = {{ to = "{key}", transpose = true }}'
        if is_transposed
        else "Check which tensor it is: vitral convert SOURCE --explain"
    )
    return VitralError(f"{source}: {name} has shape {_shape_text(tensor)}, expected {text} for {key}", hint)


def _shape_text(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _arrange_qkv(state: State, width: int, heads: int, layout: str) -> None:
    """Fuse separate projections; permute the rows of fused ones to vitral's order (three, heads, head width)."""
    for key in [key for key in state if ".attention.qkv." in key]:
        if layout != "qkv h d":
            sizes = {"qkv": 3, "h": heads, "d": width // heads}
            axes = layout.split()
            tensor = state[key].unflatten(0, [sizes[axis] for axis in axes])
            order = [axes.index(axis) for axis in ("qkv", "h", "d")]
            state[key] = tensor.permute(*order, *range(3, tensor.ndim)).flatten(0, 2).contiguous()
    fuse_qkv(state)


def _arrange_patches(
    state: State, names: dict[str, str], custom_map: CustomMap, reading: Interpretation
) -> tuple[int, int]:
    """Flatten the patch convolution, or reorder the columns of a linear one; returns channels and patch size."""
    kernel = state[PATCH_KERNEL]
    if kernel.ndim == 4:
        if kernel.shape[2] != kernel.shape[3]:
            raise VitralError(
                f"{reading.source}: {names[PATCH_KERNEL]} has shape {_shape_text(kernel)}, expected square patches",
                "vitral supports square patches only",
            )
        state[PATCH_KERNEL] = kernel.flatten(1)
        return kernel.shape[1], kernel.shape[2]
    if kernel.ndim != 2:
        raise VitralError(
            f"{reading.source}: {names[PATCH_KERNEL]} has shape {_shape_text(kernel)}, expected width×channels×P×P "
            "(a convolution) or width×values (a linear layer)",
            "Check which tensor it is: vitral convert SOURCE --explain",
        )
    channels, patch = infer_patch_shape(kernel.shape[1], _num_patches(state, kernel.shape[0]), reading)
    if custom_map.patch_layout == "p q c":
        keys = (PATCH_KERNEL, "patch_embedding.norm_pixels.weight", "patch_embedding.norm_pixels.bias")
        state |= {key: channels_first(state[key], channels, patch) for key in keys if key in state}
    return channels, patch


def _num_patches(state: State, width: int) -> int | None:
    if TABLE not in state:
        return None
    num_rows = state[TABLE].numel() // width
    is_square = math.isqrt(num_rows) ** 2 == num_rows  # then the class token has no position
    return num_rows - int("class_token.token" in state and not is_square)


def _arrange_tokens(state: State, width: int, patch: int, reading: Interpretation) -> tuple[str, tuple[int, int]]:
    """Reshape class token, registers and positions as in vitral; returns pooling and image size."""
    for key in ("class_token.token", "registers", TABLE, "attention_pooling.probe"):
        if key in state:
            state[key] = state[key].reshape(1, -1, width)
    num_cls = int("class_token.token" in state)
    if "attention_pooling.probe" in state:
        pooling = reading.setting("pooling", "", "", stored="attention", origin="attention_pooling")
    elif num_cls:
        pooling = reading.setting("pooling", "class", "class-token pooling")
    else:
        pooling = reading.setting("pooling", "", "", stored="mean", origin="no class token")
    if TABLE not in state:
        if reading.options.image_size is None:
            raise VitralError(
                f"{reading.source}: without positions, the image size cannot be inferred from the tensors",
                "Add image_size = [H, W] to [model], or pass --image-size H W",
            )
        return pooling, reading.options.image_size
    num_registers = state["registers"].shape[1] if "registers" in state else 0
    options = [num_cls, num_cls + num_registers, 0] if num_registers else [num_cls, 0]
    num_prefix, size = reading.position_table(state[TABLE].shape[1], options, patch)
    split_position_table(state, num_prefix, num_cls)
    if "pre_norm.weight" in state and "patch_embedding.project.bias" in state:  # vitral has no bias before this norm
        num_patches = (size[0] // patch) * (size[1] // patch)
        table = state[TABLE].clone()
        table[:, -num_patches:] += state.pop("patch_embedding.project.bias")
        state[TABLE] = table
        reading.notes.append("the bias of the patch embedding is added to the positions")
    return pooling, size


def _add_zero_biases(state: State, names: dict[str, str], reading: Interpretation) -> None:
    """Add zero biases to layers without one, which compute the same; q, k and v may have none."""
    added = []
    without_bias = (
        (".attention.qkv.", "patch_embedding.project.") if "pre_norm.weight" in state else (".attention.qkv.",)
    )
    for key in [key for key in state if key.endswith(".weight") and not any(part in key for part in without_bias)]:
        bias = key.replace(".weight", ".bias")
        if bias not in state:
            state[bias] = state[key].new_zeros(state[key].shape[0])
            added.append(names.get(key, key))
    if added:
        reading.notes.append(f"layers without a bias get one of zeros: {truncate_list(added, 3)}")
