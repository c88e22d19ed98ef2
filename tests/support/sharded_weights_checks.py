"""Checks of gathered weights that tests/distributed runs on three ranks, which divide no width. Each rank raises."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from typing import Any

import torch
from torch import Tensor

from support.triton_interpreter import fake_gpu, small_model
from vitral.distributed.parallel import ParallelPlan, place_model
from vitral.distributed.world import World, init_distributed, world_from_env
from vitral.kernels.fp8.op import Fp8Weight
from vitral.kernels.linear import EncoderWeights, fp8_layers, linear_layers
from vitral.kernels.sharded_model import ShardedModel
from vitral.kernels.sharded_weights import ShardedEncoderWeights

SETTINGS: dict[str, Any] = {"dtype": torch.bfloat16, "cls_only": False}


def main() -> None:
    torch.set_num_threads(1)
    world = world_from_env()
    init_distributed(world, torch.device("cpu"))
    for fp8 in (False, True):
        check_weights(world, fp8)


def check_weights(world: World, fp8: bool) -> None:
    """Every fetched weight is that of an unsharded model, in both passes, also after the weights have changed."""
    sharded_vit, _ = small_model(8, depth=4, width=32)
    full_vit, _ = small_model(8, depth=4, width=32)
    plan = ParallelPlan(mode="fsdp", reason="test")
    place_model(sharded_vit, plan, device=torch.device("cpu"), world_size=world.size, precision="bf16")
    model = ShardedModel(sharded_vit, fake_gpu(world=world), "fp32")
    settings = SETTINGS | {"fp8": fp8, "fp8_wgrad": fp8}
    weights = ShardedEncoderWeights(model.vit.encoder, model.shards, world, **settings)
    for _ in range(2):
        expected = EncoderWeights(full_vit.encoder, **settings)
        expected.cast(training=True)
        model.gather()
        for parameter, reference in zip(model.vectors, vectors(model, full_vit), strict=True):
            assert torch.equal(parameter, reference)
        weights.cast(training=True)
        pairs = list(zip(model.vit.encoder.blocks, full_vit.encoder.blocks, strict=True))
        for block, full_block in pairs:
            weights.fetch(block)
            compare_block(weights, expected, block, full_block, backward=False)
        for block, full_block in reversed(pairs):
            weights.fetch(block, backward=True)
            compare_block(weights, expected, block, full_block, backward=True)
            if fp8:
                scales = zip(weights.wgrad_scales[block], expected.wgrad_scales[full_block], strict=True)
                assert all(torch.allclose(a, b) for a, b in scales)
        with torch.no_grad():
            for vit in (sharded_vit, full_vit):
                for parameter in vit.parameters():
                    parameter.mul_(-1.5)


def vectors(model: ShardedModel, full_vit: Any) -> list[Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.vit.named_parameters()}
    return [full_vit.get_parameter(names[parameter]) for parameter in model.vectors]


def compare_block(
    weights: EncoderWeights, expected: EncoderWeights, block: Any, reference: Any, backward: bool
) -> None:
    quantized = fp8_layers(reference, training=True) if weights.fp8 else []
    for layer, full_layer in zip(linear_layers(block), linear_layers(reference), strict=True):
        if full_layer not in quantized:
            assert torch.equal(weights.compute[layer.weight], expected.compute[full_layer.weight])
        elif backward:
            compare_fp8(weights.quantized_t[layer.weight], expected.quantized_t[full_layer.weight])
        else:
            compare_fp8(weights.quantized[layer.weight], expected.quantized[full_layer.weight])


def compare_fp8(weight: Fp8Weight, expected: Fp8Weight) -> None:
    assert torch.equal(weight.scales, expected.scales)
    assert torch.allclose(weight.bound, expected.bound)
    differing = (weight.data.float() != expected.data.float()).float().mean()
    print(tuple(weight.data.shape), float(differing), flush=True)
    assert differing == 0


if __name__ == "__main__":
    main()
