"""A model layer by layer: shapes, parameters, arithmetic, memory. Tensors have shapes and no values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torchinfo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViTConfig

MOST_PATCHES = 2**20  # of an image 16,384 pixels wide and high, in patches of 16


@dataclass(frozen=True, kw_only=True)
class Summary:
    table: str  # torchinfo's, a line a layer
    parameters: int
    multiply_adds: int  # of one image, forward; a multiplication and an addition count as one
    weight_bytes: int  # fp32
    activation_bytes: int  # kept for the backward pass of one image, fp32

    def __str__(self) -> str:
        prefix, unit = ("G", 1e9) if self.multiply_adds >= 1e8 else ("M", 1e6)
        return (
            f"{self.table}\n"
            f"parameters          {self.parameters:,} ({self.weight_bytes / 2**20:,.1f} MiB in fp32)\n"
            f"one image forward   {self.multiply_adds / unit:,.2f} {prefix}MACs = "
            f"{2 * self.multiply_adds / unit:,.2f} {prefix}FLOPs\n"
            f"one image training  {self.activation_bytes / 2**20:,.1f} MiB of activations in fp32, besides "
            f"{4 * self.weight_bytes / 2**20:,.1f} MiB of weights, gradients and AdamW's averages"
        )


def summarise(config: ViTConfig, depth: int = 3, variant: str = "plain") -> Summary:
    """Everything about one image's way through the model."""
    shape = (1, config.channels, *config.image_size)
    if config.grid[0] * config.grid[1] > MOST_PATCHES:
        raise VitralError(f"{config.grid[0]}×{config.grid[1]} patches are more than any model has", "a smaller image")
    with torch.device("meta"):
        model = VARIANTS[variant](config)
        table = torchinfo.summary(
            model,
            input_size=shape,
            depth=depth,
            device="meta",
            verbose=0,
            mode="eval",
            col_names=("output_size", "num_params"),
            row_settings=("var_names",),
            col_width=22,
        )
    with FakeTensorMode():  # shapes without values, but with the kernels that a CPU would use
        model = VARIANTS[variant](config)
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts the GPU's kernels only
        counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            return tensor

        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(torch.empty(shape))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del logits
    lines = str(table).splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("Total params")), len(lines))
    return Summary(
        table="\n".join(lines[: end - 1]),
        parameters=parameters,
        multiply_adds=counter.get_total_flops() // 2,
        weight_bytes=4 * parameters,
        activation_bytes=sum(size for storage, size in kept.items() if storage not in weights),
    )


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *rest: Any, **more: Any) -> int:
    return sdpa_flop_count(q, k, v)
