"""A model's layers, parameters, FLOPs and activation memory, computed without allocating tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torchinfo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from vitral.models.variants import SAVED_VARIANTS
from vitral.models.vit import ViTConfig


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    table: str  # torchinfo's table, one line per layer
    parameters: int
    multiply_adds: int  # MACs of one forward pass with one image
    weight_bytes: int  # fp32
    activation_bytes: int  # saved for the backward pass of one image, fp32

    def __str__(self) -> str:
        prefix, unit = ("G", 1e9) if self.multiply_adds >= 1e8 else ("M", 1e6)
        return (
            f"{self.table}\n"
            f"Parameters        {self.parameters:,} ({self.weight_bytes / 2**20:,.1f} MiB in fp32)\n"
            f"Forward, 1 image  {self.multiply_adds / unit:,.2f} {prefix}MACs = "
            f"{2 * self.multiply_adds / unit:,.2f} {prefix}FLOPs\n"
            f"Training memory   {4 * self.weight_bytes / 2**20:,.1f} MiB for weights, gradients and AdamW state, plus "
            f"{self.activation_bytes / 2**20:,.1f} MiB of activations per image (fp32)"
        )


def summarise(config: ViTConfig, depth: int = 3, variant: str = "plain") -> ModelSummary:
    """Summarise a model; `depth` is the number of module levels in the table."""
    shape = (1, config.channels, *config.image_size)
    with torch.device("meta"):
        model = SAVED_VARIANTS[variant](config)
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
    with FakeTensorMode():  # unlike the meta device, dispatches to the kernels of a CPU
        model = SAVED_VARIANTS[variant](config)
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # missing in FlopCounterMode
        counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})
        saved_bytes: dict[int, int] = {}  # by storage

        def record(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved_bytes[storage._cdata] = storage.nbytes()
            return tensor

        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        with counter, torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            logits = model(torch.empty(shape))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del logits
    lines = str(table).splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("Total params")), len(lines))
    return ModelSummary(
        table="\n".join(lines[: end - 1]),
        parameters=parameters,
        multiply_adds=counter.get_total_flops() // 2,
        weight_bytes=4 * parameters,
        activation_bytes=sum(size for storage, size in saved_bytes.items() if storage not in weights),
    )


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q, k, v)
