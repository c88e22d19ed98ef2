"""How large the numbers get that 8-bit products read: measured once on real images, kept beside the weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.runs.run import write_atomically

FILE = "int8.safetensors"
Ranges = dict[str, Tensor]  # name of a linear layer → lowest and highest value of each of its inputs, 2 K


@torch.inference_mode()
def measure_ranges(model: ViT, batches: Iterable[Tensor], preprocessing: Preprocessing) -> Ranges:
    """Of uint8 images as the model wants them, in batches: what each linear layer of the encoder reads."""
    ranges: Ranges = {}

    def watch(name: str) -> object:
        def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x_MK = inputs[0].flatten(0, -2).float()
            low, high = x_MK.amin(dim=0), x_MK.amax(dim=0)
            if name in ranges:
                low, high = torch.minimum(low, ranges[name][0]), torch.maximum(high, ranges[name][1])
            ranges[name] = torch.stack([low, high])

        return look

    layers = {name: layer for name, layer in model.encoder.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]  # type: ignore[arg-type]
    try:
        for images in batches:
            model(preprocessing.normalise(images))
    finally:
        for hook in hooks:
            hook.remove()
    return ranges


def save_ranges(folder: Path, ranges: Ranges) -> None:
    write_atomically(folder / FILE, to_safetensors({name: both.contiguous() for name, both in ranges.items()}))


def load_ranges(folder: Path) -> Ranges | None:
    try:
        return load_file(folder / FILE) if (folder / FILE).is_file() else None
    except (OSError, SafetensorError) as error:
        raise VitralError(f"{folder / FILE} cannot be read: {error}", "delete it and run vitral bench again") from error
