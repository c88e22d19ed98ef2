"""What is exported: uint8 images in, logits and calibrated probabilities out; positions baked in for the size."""

from __future__ import annotations

import copy
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from vitral.errors import VitralError
from vitral.inference.engine import cannot_be_arranged
from vitral.inference.int8_calibration import Ranges
from vitral.models.vit import EncoderBlock, ViT
from vitral.runs.run import ModelCard

Precision = Literal["fp32", "fp16", "bf16", "int8"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}


class Exported(nn.Module):
    """The model between the pixels and the probabilities. With `blocks`, the tokens after each block come too."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: ViT, card: ModelCard, precision: Precision = "fp32", blocks: bool = False) -> None:
        super().__init__()
        self.dtype, self.temperature, self.blocks = DTYPES[precision], card.calibration.temperature, blocks
        self.model = copy.deepcopy(model).eval().cpu().to(self.dtype)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) * 255 for v in (card.preprocessing.mean, card.preprocessing.std))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalised = ((images.float() - self.mean) / self.std).to(self.dtype)
        if not self.blocks:
            logits = self.model(normalised).float()
            return logits, (logits / self.temperature).softmax(dim=1)
        trace = self.model.trace(normalised)
        return *(tokens.float() for tokens in trace.tokens), trace.logits.float()


def example(card: ModelCard, count: int = 2) -> Tensor:
    """Images of the right shape: what they show does not matter for a graph."""
    C, (H, W) = card.preprocessing.channels, card.preprocessing.image_size
    if card.architecture.image_size != (H, W):
        raise VitralError(
            f"the model was made for {card.architecture.image_size}, its preprocessing gives {(H, W)}",
            "put image_size right in its config.json",
        )
    return (torch.arange(count * C * H * W) * 37 % 256).to(torch.uint8).view(count, C, H, W)


def captured(module: Exported, images: Tensor) -> torch.export.ExportedProgram:
    """The computation as one graph, for any number of images."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(module, (images,), dynamic_shapes={"images": {0: batch}})
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise VitralError(
            f"torch.export cannot follow {type(module.model).__name__}: {first}",
            "other models of vitral can be exported",
        ) from error


@torch.no_grad()
def balanced(model: ViT, ranges: Ranges) -> ViT:
    """The same function, with columns of like size before each product: a step for all of them then fits each.

    Half of what a column is larger is moved from the layer norm (or v) into the matrix behind it (arXiv 2211.10438).
    """
    if why := cannot_be_arranged(model):
        raise VitralError(f"int8 is not possible: {why}", "use --precision fp32")
    model = copy.deepcopy(model)
    for index, block in enumerate(model.encoder.blocks):
        assert isinstance(block, EncoderBlock)
        attention, mlp, D = block.attention, block.mlp, block.norm1.normalized_shape[0]
        moved = _moved(ranges[f"blocks.{index}.attention.project"], attention.project.weight)
        attention.qkv.weight[2 * D :] /= moved[:, None]
        if attention.qkv.bias is not None:
            attention.qkv.bias[2 * D :] /= moved
        attention.project.weight *= moved
        pairs = (("attention.qkv", block.norm1, attention.qkv), ("mlp.expand", block.norm2, mlp.expand))
        for name, norm, layer in pairs:
            moved = _moved(ranges[f"blocks.{index}.{name}"], layer.weight)
            norm.weight.div_(moved)
            norm.bias.div_(moved)
            layer.weight.mul_(moved)
    return model


def _moved(low_high_2K: Tensor, weight_NK: Tensor) -> Tensor:
    return (low_high_2K.abs().amax(dim=0).clamp_min(1e-5) / weight_NK.abs().amax(dim=0).clamp_min(1e-5)).sqrt()
