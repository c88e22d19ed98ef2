"""Weights of the fused encoder under FSDP: gathered block by block, in bf16 or FP8, just before their GEMMs.

Every rank casts or quantizes its own rows once per step, and blocks travel in that form: 2 bytes per weight in bf16, 1
in FP8, in each pass. While a block computes, the next one is gathered. No rank holds the matrices of more than three
blocks, and none in fp32.

FP8 needs scales on which all ranks agree. Forward GEMMs have one scale per row, which the owner of the row knows.
Input-gradient GEMMs have one scale per column, from the largest absolute value over the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitral.distributed.gather import GatherRing, ShardGather, ShardSpec, shard_bounds
from vitral.distributed.world import World
from vitral.kernels.fp8.kernel import FP8_MAX
from vitral.kernels.fp8.op import Fp8Weight, quantize_weight, quantize_with_scales
from vitral.kernels.linear import EncoderWeights, compute_wgrad_scales, fp8_layers, linear_layers
from vitral.models.vit import Encoder

FP8 = torch.float8_e4m3fn


class GatheredWeight(NamedTuple):
    """How a weight matrix (N, K) travels."""

    layer: nn.Linear
    form: str  # compute: (N, K) in bf16; rows: (N, K) in FP8; columns: (K, N) in FP8, for input gradients

    def specs(self, dtype: torch.dtype) -> list[ShardSpec]:
        N, K = self.layer.weight.shape
        if self.form == "compute":
            return [ShardSpec((N, K), dtype)]
        if self.form == "rows":
            return [ShardSpec((N, K), FP8), ShardSpec((N, 1), torch.float32)]
        return [ShardSpec((K, N), FP8, dim=1)]  # every rank computes the scales of all columns


class ShardedEncoderWeights(EncoderWeights):
    """Copies of the weight matrices of an encoder whose blocks' matrices are placeholders without values.

    shards: placeholder -> the sharded parameter (DTensor).
    keep_qkv: the input-gradient GEMM of qkv runs in bf16, as it does after `short_attention`.
    """

    def __init__(
        self, encoder: Encoder, shards: Mapping[Tensor, Any], world: World, *, fp8: bool, dtype: torch.dtype,
        cls_only: bool, fp8_wgrad: bool, keep_qkv: bool = False,
    ) -> None:  # fmt: skip
        self.shards, self.world, self.dtype = shards, world, dtype
        self.device = next(iter(shards.values())).device
        blocks: list[Any] = list(encoder.blocks)
        self.index = {block: index for index, block in enumerate(blocks)}
        quantized = [fp8_layers(block, training=True) if fp8 else [] for block in blocks]
        all_layers = [layer for block in blocks for layer in linear_layers(block)]
        self.layer_index = {layer: index for index, layer in enumerate(all_layers)}
        if fp8 and cls_only:
            quantized[-1] = quantized[-1][:1]  # class tokens alone are computed in bf16
        self.fp8_layers = [layer for block_layers in quantized for layer in block_layers]
        self.groups: list[list[GatheredWeight]] = []
        for direction in ("rows", "columns") if fp8 else ("rows",):
            for block, block_layers in zip(blocks, quantized, strict=True):
                group = [
                    GatheredWeight(layer, direction if layer in block_layers else "compute")
                    for layer in linear_layers(block)
                ]
                if keep_qkv and direction == "columns":
                    group.append(GatheredWeight(block.attention.qkv, "compute"))
                self.groups.append(group)
        gathers = [
            ShardGather([spec for weight in group for spec in weight.specs(dtype)], world, self.device)
            for group in self.groups
        ]
        self.ring = GatherRing(gathers)
        self.column_scales: dict[nn.Linear, Tensor] = {}
        super().__init__(encoder, fp8, dtype, cls_only, fp8_wgrad)

    def allocate(self, dtype: torch.dtype) -> dict[Tensor, Tensor]:
        return {}

    @torch.no_grad()
    def cast(self, training: bool, include_frozen: bool = False) -> None:
        """Cast and quantize this rank's rows. A collective with FP8: all ranks must call this."""
        self.ring.discard()
        self.compute.clear()
        self.quantized.clear()
        self.quantized_t.clear()
        rows = {layer.weight: self.shards[layer.weight].to_local() for layer in self.layers}
        if self.fp8:
            self.bounds.zero_()
            self.column_scales = self.compute_column_scales(rows)
        parts, sources = [], []
        for group, gather in zip(self.groups, self.ring.groups, strict=True):
            shards = iter(gather.shards)
            for weight in group:
                local = rows[weight.layer.weight]
                if weight.form == "compute":
                    parts.append(next(shards))
                    sources.append(local)
                elif weight.form == "rows":
                    self.quantize_rows(weight.layer, local, next(shards), next(shards))
                else:
                    quantize_with_scales(local.t(), self.column_scales[weight.layer], next(shards))
        if parts:
            torch._foreach_copy_(parts, sources)
        if self.fp8:
            self.all_reduce(self.bounds, dist.ReduceOp.MAX)
            if training and self.fp8_wgrad:
                self.wgrad_scales = dict(zip(self.blocks, compute_wgrad_scales(self.blocks, self.bounds), strict=True))

    def quantize_rows(self, layer: nn.Linear, local: Tensor, data: Tensor, scales: Tensor) -> None:
        start, stop = shard_bounds(len(layer.weight), self.world.rank, self.world.size)
        if stop == start:
            return
        bias = None if layer.bias is None else layer.bias[start:stop]
        quantized = quantize_weight(local, bias, self.bounds[self.layer_index[layer], 0])
        data.view(torch.uint8).copy_(quantized.data.view(torch.uint8))
        scales.copy_(quantized.scales)

    def compute_column_scales(self, rows: dict[Tensor, Tensor]) -> dict[nn.Linear, Tensor]:
        """One scale per column (K, 1) of each matrix, as for its transpose; also fills `bounds`."""
        weights = [rows[layer.weight] for layer in self.fp8_layers]
        largest = torch.cat([column_max(weight) for weight in weights])
        square_sums = torch.cat([weight.square().sum(dim=0) for weight in weights])
        self.all_reduce(largest, dist.ReduceOp.MAX)
        self.all_reduce(square_sums, dist.ReduceOp.SUM)
        scales = (largest.clamp_min(1e-12) / FP8_MAX.value).split([weight.shape[1] for weight in weights])
        for layer, sums in zip(
            self.fp8_layers, square_sums.split([weight.shape[1] for weight in weights]), strict=True
        ):
            self.bounds[self.layer_index[layer], 1, 0] = sums.max().sqrt()
        return {layer: scale[:, None] for layer, scale in zip(self.fp8_layers, scales, strict=True)}

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        if self.world.size > 1:
            dist.all_reduce(tensor, op=op)

    def fetch(self, block: Any, backward: bool = False) -> None:
        """Wait for the weights of a block and start gathering those of the next one."""
        depth, index = len(self.blocks), self.index[block]
        if backward:
            first = depth if self.fp8 else 0
            current, following = first + index, first + index - 1 if index else None
        else:  # the backward pass begins with the last block
            current, following = index, index + 1 if index + 1 < depth else (2 * depth - 1 if self.fp8 else None)
        tensors = iter(self.ring.fetch(current, following))
        for weight in self.groups[current]:
            master = weight.layer.weight
            if weight.form == "compute":
                self.compute[master] = next(tensors)
                continue
            bound, bound_t = self.bounds[self.layer_index[weight.layer]]
            if weight.form == "rows":
                self.quantized[master] = Fp8Weight(next(tensors), next(tensors), bound)
            else:
                self.quantized_t[master] = Fp8Weight(next(tensors), self.column_scales[weight.layer], bound_t)


def column_max(weight: Tensor) -> Tensor:
    """The largest absolute value of each column; 0 without rows."""
    return weight.abs().amax(dim=0) if len(weight) else weight.new_zeros(weight.shape[1])
