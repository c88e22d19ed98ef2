"""The exported computation: images to logits and calibrated probabilities, with fixed positions."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.errors import VitralError
from vitral.inference.cpu_engine import unsupported_reason
from vitral.inference.int8_calibration import ActivationRanges
from vitral.models.vit import EncoderBlock, ViT
from vitral.runs.model_io import ModelConfig, published_name
from vitral.utils.serialization import to_dict

ExportPrecision = Literal["fp32", "fp16", "bf16", "int8"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}
MAX_BATCH_SIZE = 4096


def export_metadata(config: ModelConfig, precision: ExportPrecision) -> dict[str, Any]:
    """What every exported file stores about itself, as JSON."""
    return {
        "versions": f"vitral {__version__}, torch {torch.__version__}",
        "classes": list(config.classes),
        "task": config.task,
        "preprocessing": to_dict(config.preprocessing),
        "calibration": to_dict(config.calibration),
        **({"target_scaling": to_dict(config.target_scaling)} if config.target_scaling is not None else {}),
        "precision": precision,
        "trained_on": published_name(config.trained_on),
    }


class ExportWrapper(nn.Module):
    """Images (B, C, H, W) of the preprocessing's type, uint8 for photographs, to logits and probabilities (B, K).

    Of a regression, to its outputs and to values in units of the targets.

    With `blocks`, returns the tokens after the embedding and after each block, and the logits instead.
    """

    mean: Tensor
    std: Tensor
    target_mean: Tensor  # of a regression
    target_std: Tensor

    def __init__(
        self, model: ViT, config: ModelConfig, precision: ExportPrecision = "fp32", blocks: bool = False
    ) -> None:
        super().__init__()
        self.dtype, self.calibration, self.blocks = DTYPES[precision], config.calibration, blocks
        self.model = copy.deepcopy(model).eval().cpu().to(self.dtype)
        preprocessing = config.preprocessing
        scale = preprocessing.pixel_scale
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) * scale for v in (preprocessing.mean, preprocessing.std))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        scaling = config.target_scaling
        self.is_regression = scaling is not None
        if scaling is not None:
            self.register_buffer("target_mean", torch.tensor(scaling.mean))
            self.register_buffer("target_std", torch.tensor(scaling.std))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalised = ((images.float() - self.mean) / self.std).to(self.dtype)
        if not self.blocks:
            logits = self.model(normalised).float()
            if self.is_regression:
                return logits, logits * self.target_std + self.target_mean
            return logits, self.calibration.probabilities(logits)
        trace = self.model.trace(normalised)
        return *(tokens.float() for tokens in trace.tokens), trace.logits.float()


def example_images(config: ModelConfig) -> Tensor:
    """Two images with the shape of the model's input, for tracing."""
    C, (H, W) = config.preprocessing.channels, config.preprocessing.image_size
    if config.architecture.image_size != (H, W):
        raise VitralError(
            f"the architecture expects images of {config.architecture.image_size}, the preprocessing returns {(H, W)}",
            "Correct image_size in its config.json",
        )
    return (torch.arange(2 * C * H * W) * 37 % 256).to(config.preprocessing.torch_dtype).view(2, C, H, W)


def capture_graph(module: ExportWrapper, images: Tensor) -> torch.export.ExportedProgram:
    """Trace the computation with torch.export, with a dynamic batch size."""
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH_SIZE)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (images,), dynamic_shapes={"images": {0: batch}})
    except Exception as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise VitralError(
            f"torch.export cannot trace {type(module.model).__name__}: {message}",
            "The standard ViT and most variants can be exported",
        ) from error
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            for node in graph_module.graph.nodes:
                node.meta.pop("stack_trace", None)  # would publish where vitral is installed, often a home folder
    return program


@torch.no_grad()
def smooth_activations(model: ViT, ranges: ActivationRanges) -> ViT:
    """An equivalent model whose activation columns are of similar magnitude, so that one int8 scale fits all of them.

    Half of a column's excess magnitude moves from the layer norm (or v) into the following weights (arXiv 2211.10438).
    """
    if reason := unsupported_reason(model):
        raise VitralError(f"int8 export unavailable: {reason}", "Use --precision fp32")
    model = copy.deepcopy(model)
    for index, block in enumerate(model.encoder.blocks):
        assert isinstance(block, EncoderBlock)
        attention, mlp, D = block.attention, block.mlp, block.norm1.normalized_shape[0]
        factors = _smoothing_factors(ranges[f"blocks.{index}.attention.project"], attention.project.weight)
        attention.qkv.weight[2 * D :] /= factors[:, None]
        if attention.qkv.bias is not None:
            attention.qkv.bias[2 * D :] /= factors
        attention.project.weight *= factors
        pairs = (("attention.qkv", block.norm1, attention.qkv), ("mlp.expand", block.norm2, mlp.expand))
        for name, norm, layer in pairs:
            factors = _smoothing_factors(ranges[f"blocks.{index}.{name}"], layer.weight)
            norm.weight.div_(factors)
            norm.bias.div_(factors)
            layer.weight.mul_(factors)
    return model


def _smoothing_factors(low_high_2K: Tensor, weight_NK: Tensor) -> Tensor:
    return (low_high_2K.abs().amax(dim=0).clamp_min(1e-5) / weight_NK.abs().amax(dim=0).clamp_min(1e-5)).sqrt()
