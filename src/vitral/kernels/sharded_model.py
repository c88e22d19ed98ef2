"""The fused forward pass of a model that FSDP shards.

    sharded parameters (DTensors, fp32)
      ├─ matrices of the blocks ─▶ bf16 or FP8 ─▶ gathered block by block (`sharded_weights`) ─┐
      └─ everything else, fp32 ─▶ gathered once per forward pass ─▶ parameters of `vit` ───────┴─▶ fused forward pass
    gradients of each block ─▶ reduce-scatter during the backward pass ─▶ gradients of the sharded parameters

FSDP2's own hooks still serve everything else: validation, checkpoints, export.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitral.device.select import Hardware
from vitral.distributed.dtensor import is_sharded
from vitral.distributed.gather import GatherRing, ShardGather, ShardSpec
from vitral.distributed.gradients import ReduceDtype, make_fsdp_reducer
from vitral.kernels.encoder import unsupported_architecture
from vitral.kernels.linear import layer_scales, linear_layers
from vitral.models.lora import LoRALinear
from vitral.models.vit import QKVLinear, ViT

CHECK_DEPTH = 2  # blocks of the model for self-checks


class ShardedModel:
    """A ViT with the shapes of a sharded one, whose parameters hold values only while they are needed.

    vit: its block matrices are placeholders; all other parameters are full after `gather`.
    check_model: a shallow model with random weights and the same shapes, for comparing kernels with the reference.
    reducer: turns gradients of `vit` into gradients of the sharded parameters.
    """

    def __init__(self, model: ViT, hardware: Hardware, reduce_dtype: ReduceDtype) -> None:
        self.world, device = hardware.world, hardware.device
        sharded: dict[str, Any] = dict(model.named_parameters())
        self.vit = make_empty_copy(model, device)
        self.shards: dict[Tensor, Any] = {parameter: sharded[name] for name, parameter in self.vit.named_parameters()}
        matrices = {layer.weight for block in self.vit.encoder.blocks for layer in linear_layers(block)}
        self.vectors: list[Tensor] = [parameter for parameter in self.vit.parameters() if parameter not in matrices]
        specs = [ShardSpec(tuple(parameter.shape), parameter.dtype) for parameter in self.vectors]
        self.vector_gather = GatherRing([ShardGather(specs, self.world, device)], num_slots=1)
        self.reducer = make_fsdp_reducer(list(self.shards), list(self.shards.values()), self.world, reduce_dtype)
        self.check_model = make_check_model(model, hardware)
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Gather all parameters except the matrices of the blocks, in fp32."""
        self.vector_gather.discard()
        (group,) = self.vector_gather.groups
        torch._foreach_copy_(group.shards, [self.shards[parameter].to_local() for parameter in self.vectors])
        torch._foreach_copy_(self.vectors, self.vector_gather.fetch(0))


def sharding_unsupported_reason(model: ViT) -> str | None:
    """Why the fused forward pass cannot be used for a model that FSDP shards, or None."""
    blocks: list[Any] = list(model.encoder.blocks)
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        return "LoRA's low-rank updates are not merged into sharded weights"
    if any(layer_scales(block) for block in blocks):
        return "layer scale is not merged into sharded weights"
    if any(isinstance(block.attention.qkv, QKVLinear) for block in blocks):
        return "keys without a bias are not supported in sharded weights"
    if model.encoder.activation_checkpointing:
        return "blocks are gathered once per pass and cannot be computed again"
    if not all(is_sharded(parameter) and parameter.dtype == torch.float32 for parameter in model.parameters()):
        return "the parameters are not sharded fp32 tensors"
    with torch.device("meta"):
        return unsupported_architecture(unsharded_class(model)(model.config))


def make_empty_copy(model: ViT, device: torch.device) -> ViT:
    """A copy of an FSDP model with its buffers and without its values; block matrices have no storage of their own."""
    with torch.device("meta"):
        vit = unsharded_class(model)(model.config)
    placeholder = torch.zeros(1, device=device)
    matrices = {layer.weight for block in vit.encoder.blocks for layer in linear_layers(block)}
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in list(vit.named_parameters()):
        is_matrix = parameter in matrices
        values = placeholder.expand(parameter.shape) if is_matrix else torch.zeros(parameter.shape, device=device)
        replace_tensor(vit, name, nn.Parameter(values, requires_grad[name]))
    for name, buffer in model.named_buffers():
        replace_tensor(vit, name, buffer)
    vit.accepts_any_grid = model.accepts_any_grid
    return vit.train()


def make_check_model(model: ViT, hardware: Hardware) -> ViT:
    rng_state = hardware.rng_state()
    torch.manual_seed(0)
    vit: ViT = unsharded_class(model)(replace(model.config, depth=min(model.config.depth, CHECK_DEPTH)))
    blocks: list[Any] = list(model.encoder.blocks)
    for block, like in zip(vit.encoder.blocks, (blocks[0], blocks[-1]), strict=False):
        for parameter, sharded in zip(block.parameters(), like.parameters(), strict=True):
            parameter.requires_grad_(sharded.requires_grad)
    requires_grad = {name: p.requires_grad for name, p in model.named_parameters() if ".blocks." not in name}
    for name, value in requires_grad.items():
        vit.get_parameter(name).requires_grad_(value)
    with torch.no_grad():
        for parameter in vit.parameters():  # biases that are not 0, norms whose weights are not 1
            parameter.add_(0.02 * torch.randn_like(parameter))
    hardware.set_rng_state(rng_state)
    vit.accepts_any_grid = model.accepts_any_grid
    return vit.to(hardware.device).train()


def unsharded_class(model: ViT) -> type[ViT]:
    """The class of a model before `fully_shard` changed it."""
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(model).__mro__ if issubclass(cls, ViT) and not issubclass(cls, FSDPModule))


def replace_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        setattr(module, attribute, tensor)
    else:
        module._buffers[attribute] = tensor
