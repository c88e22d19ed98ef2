"""A checkpoint's weights in a model of another image size, patch size, number of channels or classes.

Shapes:  P patch side   C channels   D width   K classes
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError
from vitral.models.variants.hybrid import HybridConfig
from vitral.models.vit import ViTConfig, resample_positions
from vitral.weights.checkpoint import Checkpoint
from vitral.weights.uninitialized import shapes


@dataclass(frozen=True, kw_only=True)
class Transferred:
    state: dict[str, Tensor]
    notes: tuple[str, ...]  # what was changed, for people


def transfer(checkpoint: Checkpoint, variant: str, config: ViTConfig, classes: tuple[str, ...]) -> Transferred:
    """The checkpoint's weights for a model of `config`; what cannot follow starts anew, a new head at zero.

    A checkpoint keeps its variant: a distilled model stays one, and both of its heads learn from the labels.
    """
    old, notes = checkpoint.config, []
    _check_alike(checkpoint, variant, config)
    state = {name: tensor.float() for name, tensor in checkpoint.state.items()}
    kernels = "patch_embedding.project.weight"
    if old.channels != config.channels:
        state[kernels] = other_channels(state[kernels], old.channels, config.channels)
        notes.append(f"kernels for {config.channels} channels made from those for {old.channels}")
    if old.patch_size != config.patch_size:
        stride = old.stem.stride if isinstance(old, HybridConfig) else 1  # kernels lie on the stem's map
        state[kernels] = resample_kernels(state[kernels], old.patch_size // stride, config.patch_size // stride)
        notes.append(f"patch kernels resampled from {old.patch_size} to {config.patch_size} pixels")
    table = "position_embedding.table"
    if table in state and old.grid != config.grid:
        front = state[table].shape[1] - old.grid[0] * old.grid[1]
        patches = resample_positions(state[table][:, front:], old.grid, config.grid)
        state[table] = torch.cat([state[table][:, :front], patches], dim=1)
        notes.append(f"positions resampled from {old.grid[0]}×{old.grid[1]} to {config.grid[0]}×{config.grid[1]}")
    notes.append(new_heads(state, checkpoint, classes))
    if variant == "distilled":
        notes.append("distilled: its two heads are kept, and both learn from the labels")
    if config.head != "mlp":  # a hidden layer in the head belongs to the old classes
        state = {name: tensor for name, tensor in state.items() if not re.match(r"head\.(\w+\.)?hidden\.", name)}
    wanted = shapes(variant, config)
    wrong = sorted(
        n
        for n in wanted.keys() | state.keys()
        if n not in wanted or n not in state or wanted[n].shape != state[n].shape
    )
    if wrong:
        raise VitralError(
            f"{len(wrong)} tensors of the checkpoint do not fit the model", f"the first: {', '.join(wrong[:4])}"
        )
    return Transferred(state=state, notes=tuple(notes))


def _check_alike(checkpoint: Checkpoint, variant: str, config: ViTConfig) -> None:
    """Only image size, patch size, channels and classes may differ; less where a stem or a norm sees them."""
    old = checkpoint.config
    if checkpoint.variant != variant:
        raise VitralError(
            f"the checkpoint is a {checkpoint.variant} ViT, the recipe's model a {variant} one",
            f"leave out --variant, or say --variant {checkpoint.variant}",
        )
    alike = ["width", "depth", "heads", "pooling", "positions", "registers", "qk_norm", "qkv_bias", "hidden_width"]
    may, why = "image size, patch size, channels and classes", ""
    if variant == "hybrid":
        alike, may, why = [*alike, "stem", "channels"], "image size, patch size and classes", "; the stem sees channels"
    elif variant == "patch-norm":
        alike, may, why = [*alike, "patch_size", "channels"], "image size and classes", "; a norm sees each pixel"
    for name in alike:
        if getattr(old, name) != getattr(config, name):
            raise VitralError(
                f"the checkpoint has {name} {getattr(old, name)}, the recipe {getattr(config, name)}",
                f"only {may} may differ from the checkpoint's{why}",
            )


def new_heads(state: dict[str, Tensor], checkpoint: Checkpoint, classes: tuple[str, ...]) -> str:
    """Rows of classes that the checkpoint knows by name are kept; all others start at zero."""
    known = {name: row for row, name in enumerate(checkpoint.classes or ()) if not checkpoint.headless}
    kept = [name for name in classes if name in known]
    for name in [name for name in state if re.fullmatch(r"head\.(\w+\.)?out\.(weight|bias)", name)]:
        before = state[name]
        state[name] = before.new_zeros(len(classes), *before.shape[1:])
        for row, of_class in enumerate(classes):
            if of_class in known:
                state[name][row] = before[known[of_class]]
    return f"head: {len(kept)} of {len(classes)} classes kept, the others new" if kept else "head: new, at zero"


def other_channels(kernels_DE: Tensor, old: int, new: int) -> Tensor:
    """Kernels for `new` channels from those for `old`: summed for gray, otherwise repeated, with the same sum."""
    kernels = kernels_DE.unflatten(1, (old, -1))  # D C PP
    if new == 1:
        return kernels.sum(dim=1)
    return (kernels[:, [c % old for c in range(new)]] * (old / new)).flatten(1)


def resample_kernels(kernels_DE: Tensor, old: int, new: int) -> Tensor:
    """Patch kernels for another patch size, by the pseudo-inverse of the resize (FlexiViT, arXiv 2212.08013).

    A patch and its kernel, both resized, then have the product that they had before.
    """
    basis = torch.eye(old * old).view(old * old, 1, old, old)
    resize = F.interpolate(basis, size=(new, new), mode="bilinear", antialias=new < old).view(old * old, -1).T
    inverse = torch.linalg.pinv(resize.T.double()).float()  # new² × old²
    kernels = kernels_DE.unflatten(1, (-1, old * old))  # D C PP
    return (kernels @ inverse.T).flatten(1)
