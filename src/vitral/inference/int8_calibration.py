"""Activation ranges of the encoder's linear layers, measured once on real images and stored next to the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.utils.atomic import atomic_write

FILE_NAME = "int8.safetensors"
ActivationRanges = dict[str, Tensor]  # linear layer name -> minimum and maximum of each input column, (2, K)


@torch.inference_mode()
def collect_activation_ranges(model: ViT, batches: Iterable[Tensor], preprocessing: Preprocessing) -> ActivationRanges:
    """Observe the inputs of the encoder's linear layers on batches of uint8 images of the model's input size."""
    ranges: ActivationRanges = {}

    def make_observer(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x_MK = inputs[0].flatten(0, -2).float()
            low, high = x_MK.amin(dim=0), x_MK.amax(dim=0)
            if name in ranges:
                low, high = torch.minimum(low, ranges[name][0]), torch.maximum(high, ranges[name][1])
            ranges[name] = torch.stack([low, high])

        return observe

    layers = {name: layer for name, layer in model.encoder.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [layer.register_forward_pre_hook(make_observer(name)) for name, layer in layers.items()]
    try:
        for images in batches:
            model(preprocessing.normalise(images))
    finally:
        for hook in hooks:
            hook.remove()
    return ranges


def save_activation_ranges(folder: Path, ranges: ActivationRanges) -> None:
    tensors = {name: low_high.contiguous() for name, low_high in ranges.items()}
    atomic_write(folder / FILE_NAME, to_safetensors(tensors))


def load_activation_ranges(folder: Path) -> ActivationRanges | None:
    path = folder / FILE_NAME
    try:
        return load_file(path) if path.is_file() else None
    except (OSError, SafetensorError) as error:
        raise VitralError(f"cannot read {path}: {error}", "Delete it and run vitral bench again") from error
