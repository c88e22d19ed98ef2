"""Adapt a checkpoint's weights to another image size, patch size, number of channels or set of classes.

Shapes: P patch side, C channels, D width, E = C·P·P values per patch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError, truncate_list
from vitral.models.uninitialized import meta_state_dict
from vitral.models.variants.hybrid import HybridConfig
from vitral.models.vit import ViTConfig, resample_positions
from vitral.weights.checkpoint import Checkpoint

# Fields of ViTConfig that must equal the checkpoint's.
FIXED_FIELDS = (
    "width",
    "depth",
    "heads",
    "pooling",
    "positions",
    "registers",
    "qk_norm",
    "qkv_bias",
    "hidden_width",
    "pre_norm",
    "final_norm",
    "key_bias",
    "rope",
    "rope_base",
    "register_positions",
    "has_class_token",
)


@dataclass(frozen=True, kw_only=True)
class AdaptedWeights:
    state: dict[str, Tensor]
    notes: tuple[str, ...]  # changes, one line each


def adapt_weights(checkpoint: Checkpoint, variant: str, config: ViTConfig, classes: tuple[str, ...]) -> AdaptedWeights:
    """The checkpoint's weights in fp32 for a model with this config.

    Head rows of classes that the checkpoint does not have are zero. The variant must be the checkpoint's: a distilled
    model stays distilled, and both of its heads are trained on the labels.
    """
    _check_compatible(checkpoint, variant, config)
    old = checkpoint.config
    state = {name: tensor.float() for name, tensor in checkpoint.state.items()}
    notes = _adapt_patches(state, old, config)
    notes += _adapt_positions(state, old, config)
    notes.append(adapt_heads(state, checkpoint, classes))
    if variant == "distilled":
        notes.append("distilled: both heads are kept and trained on the labels")
    if config.head != "mlp":  # the hidden layer of a head was trained for the old classes
        state = {name: tensor for name, tensor in state.items() if not re.match(r"head\.(\w+\.)?hidden\.", name)}
    expected = meta_state_dict(variant, config)
    mismatched = sorted(
        name
        for name in expected.keys() | state.keys()
        if name not in expected or name not in state or expected[name].shape != state[name].shape
    )
    if mismatched:
        raise VitralError(
            f"{len(mismatched)} tensors of the checkpoint do not fit the model",
            f"Mismatched: {truncate_list(mismatched, 4)}",
        )
    return AdaptedWeights(state=state, notes=tuple(notes))


def _check_compatible(checkpoint: Checkpoint, variant: str, config: ViTConfig) -> None:
    """Refuse differences that cannot be adapted. Stems and norms over pixels depend on more fields."""
    old = checkpoint.config
    if checkpoint.variant != variant:
        raise VitralError(
            f"the checkpoint is a {checkpoint.variant} ViT, the recipe's model a {variant} ViT",
            f"Omit --variant or use --variant {checkpoint.variant}",
        )
    fields, adaptable, reason = list(FIXED_FIELDS), "image size, patch size, channels and classes", ""
    if variant == "hybrid":
        fields += ["stem", "channels"]
        adaptable, reason = "image size, patch size and classes", "; the convolutional stem depends on the channels"
    elif variant == "patch-norm":
        fields += ["patch_size", "channels"]
        adaptable, reason = "image size and classes", "; the norm over pixels depends on patch size and channels"
    for name in fields:
        if getattr(old, name) != getattr(config, name):
            raise VitralError(
                f"the checkpoint has {name} {getattr(old, name)}, the recipe {getattr(config, name)}",
                f"Only {adaptable} may differ from the checkpoint{reason}",
            )


def _adapt_patches(state: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> list[str]:
    notes, key = [], "patch_embedding.project.weight"
    if old.channels != new.channels:
        state[key] = adapt_channels(state[key], old.channels, new.channels)
        how = "summed" if new.channels == 1 else f"repeated and scaled by {old.channels}/{new.channels}"
        notes.append(f"patch kernels adapted from {old.channels} to {new.channels} channels: {how}")
    if old.patch_size != new.patch_size:
        stride = old.stem.stride if isinstance(old, HybridConfig) else 1  # patches of the stem's feature map
        state[key] = resample_patch_kernels(state[key], old.patch_size // stride, new.patch_size // stride)
        notes.append(f"patch kernels resampled from {old.patch_size} to {new.patch_size} pixels")
    return notes


def _adapt_positions(state: dict[str, Tensor], old: ViTConfig, new: ViTConfig) -> list[str]:
    key = "position_embedding.table"
    if key not in state or old.grid == new.grid:
        return []
    num_prefix = state[key].shape[1] - old.grid[0] * old.grid[1]
    patches = resample_positions(state[key][:, num_prefix:], old.grid, new.grid, old.position_resampling)
    state[key] = torch.cat([state[key][:, :num_prefix], patches], dim=1)
    return [f"positions resampled from {old.grid[0]}×{old.grid[1]} to {new.grid[0]}×{new.grid[1]}"]


def adapt_heads(state: dict[str, Tensor], checkpoint: Checkpoint, classes: tuple[str, ...]) -> str:
    """Keep the head rows of classes with the same name and set all others to zero; returns a note."""
    old_rows = {name: row for row, name in enumerate(checkpoint.classes or ()) if not checkpoint.headless}
    num_kept = sum(name in old_rows for name in classes)
    for key in [key for key in state if re.fullmatch(r"head\.(\w+\.)?out\.(weight|bias)", key)]:
        old = state[key]
        state[key] = old.new_zeros(len(classes), *old.shape[1:])
        for row, name in enumerate(classes):
            if name in old_rows:
                state[key][row] = old[old_rows[name]]
    if num_kept == len(classes):
        return "head: kept, it has all classes"
    return f"head: {num_kept} of {len(classes)} classes kept, the others new" if num_kept else "head: new"


def adapt_channels(kernels_DE: Tensor, old: int, new: int) -> Tensor:
    """Patch kernels for `new` channels: summed for greyscale, otherwise repeated in order and scaled by old / new.

    The usual inflation of RGB weights (I3D, arXiv 1705.07750; timm does the same): channel c gets the kernel of
    channel c mod 3. With inputs of equal statistics the expected activation is kept. An image whose channels repeat
    red, green and blue equally often has exactly the embedding of the RGB image.
    """
    kernels = kernels_DE.unflatten(1, (old, -1))  # (D, C, P·P)
    if new == 1:
        return kernels.sum(dim=1)
    return (kernels[:, [c % old for c in range(new)]] * (old / new)).flatten(1)


def resample_patch_kernels(kernels_DE: Tensor, old: int, new: int) -> Tensor:
    """Patch kernels for another patch size by the pseudo-inverse of the resize (FlexiViT, arXiv 2212.08013).

    The dot product of a resized patch with the resampled kernel equals the original one.
    """
    basis = torch.eye(old * old).view(old * old, 1, old, old)
    resize = F.interpolate(basis, size=(new, new), mode="bilinear", antialias=new < old).view(old * old, -1).T
    inverse = torch.linalg.pinv(resize.T.double()).float()  # (new², old²)
    kernels = kernels_DE.unflatten(1, (-1, old * old))  # (D, C, P·P)
    return (kernels @ inverse.T).flatten(1)
