"""What a training will need, computed from the configuration: memory a GPU, bytes between GPUs, arithmetic, days.

Shapes:  T tokens   N patches   D width   M hidden width   h heads   K classes   P parameters   n GPUs

Activations are what autograd keeps for the backward pass of this project's own `vit.py`, counted layer by layer; the
tests compare them with what PyTorch really keeps. Weights, gradients and optimizers are fp32, as in the training loop;
with bf16 the products' inputs are bf16 and the residual stream, the norms' inputs, stays fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from vitral.errors import unknown
from vitral.models.vit import ViT, ViTConfig

Strategy = Literal["ddp", "fsdp"]
GB = 10**9
GIB = 2**30
CONTEXT = 1.5 * GIB  # driver, libraries' workspaces, communication buffers; measured sizes vary from 0.5 to 2 GiB
SPARE = 0.06  # of the memory: what an allocator loses to fragments


@dataclass(frozen=True, kw_only=True)
class GPU:
    """From the makers' data sheets: dense products (no sparsity), and one direction of the links."""

    memory: float  # bytes
    bf16: float  # floating-point operations a second
    fp32: float
    link: float  # bytes a second between two GPUs of a node, one way

    @property
    def usable(self) -> float:
        return self.memory * (1 - SPARE) - CONTEXT

    def with_memory(self, memory: float) -> GPU:
        return replace(self, memory=memory)


# NVIDIA's data sheets of the SXM boards and cards; NVLink's figure there is the sum of both directions.
GPUS: dict[str, GPU] = {
    "L4": GPU(memory=24 * GB, bf16=121e12, fp32=30.3e12, link=32e9),
    "RTX-4090": GPU(memory=24 * GB, bf16=165e12, fp32=82.6e12, link=32e9),
    "A100-40": GPU(memory=40 * GB, bf16=312e12, fp32=19.5e12, link=300e9),
    "A100-80": GPU(memory=80 * GB, bf16=312e12, fp32=19.5e12, link=300e9),
    "H100": GPU(memory=80 * GB, bf16=989e12, fp32=67e12, link=450e9),
    "H200": GPU(memory=141 * GB, bf16=989e12, fp32=67e12, link=450e9),
}


def gpu_named(name: str) -> GPU:
    name = next((known for known in GPUS if known.lower() == name.lower()), name)
    if name not in GPUS:
        raise unknown("GPU", name, GPUS)
    return GPUS[name]


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many numbers a model learns, and where they are."""

    total: int
    block: int  # in one encoder block
    block_matrices: int  # of those, in matrices: Muon's
    depth: int

    @property
    def rest(self) -> int:
        """Outside the blocks: embedding, positions, last norm, head."""
        return self.total - self.depth * self.block

    @property
    def matrices(self) -> int:
        return self.depth * self.block_matrices


def count(config: ViTConfig) -> Parameters:
    """Of the real model, whose tensors have shapes and no values here."""
    with torch.device("meta"):
        model = ViT(replace(config, depth=1))  # blocks are alike
    block = [*model.encoder.blocks[0].parameters()]
    numbers = sum(p.numel() for p in block)
    rest = sum(p.numel() for p in model.parameters()) - numbers
    return Parameters(
        total=rest + config.depth * numbers,
        block=numbers,
        block_matrices=sum(p.numel() for p in block if p.ndim == 2),
        depth=config.depth,
    )


def multiply_adds(config: ViTConfig) -> int:
    """Of one image, forward: the products of matrices, and nothing else."""
    N, D, M, K = math.prod(config.grid), config.width, config.hidden_width, config.classes
    T = N + config.prefix
    block = 4 * T * D * D + 2 * T * T * D + 2 * T * D * M
    pooling = 2 * N * D * D + 2 * N * D + D * D + 2 * D * M if config.pooling == "attention" else 0
    head = D * K + (D * D if config.head == "mlp" else 0)
    return N * config.channels * config.patch_size**2 * D + config.depth * block + pooling + head


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that one image keeps until the backward pass."""

    block: int  # of one block
    block_input: int  # all that a block keeps where it is computed again in the backward pass
    rest: int  # the image itself, its patches, last norm, pooling, head
    depth: int

    @property
    def plain(self) -> int:
        return self.rest + self.depth * self.block

    @property
    def checkpointed(self) -> int:
        """Each block's input, and one block at a time in full."""
        return self.rest + self.depth * self.block_input + self.block - self.block_input


def activations(
    config: ViTConfig, precision: Literal["fp32", "bf16"] = "bf16", device: Literal["gpu", "cpu"] = "gpu"
) -> Activations:
    """Of one image. Attention is one fused kernel, which keeps no T×T matrix.

    A CPU keeps dropout's masks as numbers, a GPU as single bytes; under autocast a GPU's layer norms copy bf16 inputs
    to fp32.
    """
    s = 2 if precision == "bf16" else 4
    N, D, M, h, K = math.prod(config.grid), config.width, config.hidden_width, config.heads, config.classes
    T = N + config.prefix
    mask = (1 if device == "gpu" else s) if config.dropout else 0
    statistics = 2 * 4 * T  # a norm's mean and deviation
    norms = 2 * (4 * T * D + statistics)  # the residual stream, twice
    attention = s * T * D + 3 * s * T * D + s * T * D + 4 * h * T  # the norm's output; q, k, v; the answer; row sums
    if config.qk_norm or "rotary" in config.positions:
        attention += 3 * s * T * D  # q and k anew, beside the old ones in one piece with v; the answer copied
    if config.qk_norm:
        attention += 2 * 2 * 4 * h * T + (2 * 4 * T * D if s == 2 and device == "gpu" else 0)
    mlp = s * T * D + 2 * s * T * M  # the norm's output; GELU's input and output
    scale = 2 * s * T * D if config.layer_scale is not None else 0
    block = norms + attention + mlp + scale + mask * (2 * T * D + T * M)

    image = 4 * config.channels * math.prod(config.image_size) + s * N * config.channels * config.patch_size**2
    embedding_mask = (1 if device == "gpu" else 4) * T * D if config.dropout_embedding else 0
    last = 4 * T * D + statistics
    pooled = s * D
    if config.pooling == "class" and s == 4:
        pooled = 4 * T * D  # a view keeps the whole of the norm's output
    elif config.pooling == "attention":
        pooled = s * (N * D + 2 * N * D + 2 * D) + 4 * h + (4 * D + 8) + s * (D + 2 * M) + s * D
    head = 2 * s * D if config.head == "mlp" else 0
    rest = image + embedding_mask + last + pooled + head + 2 * 4 * K  # the loss keeps targets and log-probabilities
    return Activations(block=block, block_input=4 * T * D, rest=rest, depth=config.depth)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    averaged: float  # of the averaged weights, where there are such
    copies: float  # bf16 copies of matrices; with fsdp: the blocks that are whole at one time
    activations: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes that one GPU sends in a step; a ring sends (n-1)/n of a tensor to gather or to reduce-scatter it."""

    all_reduce: float = 0
    all_gather: float = 0
    reduce_scatter: float = 0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training as it will be; everything else follows from these fields."""

    config: ViTConfig
    gpus: int = 8
    batch: int = 1024  # images a step, all GPUs together
    accumulate: int = 1  # parts in which a GPU takes its share of the batch
    precision: Literal["fp32", "bf16"] = "bf16"
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    ema: bool = True
    gpu: GPU
    gpus_per_node: int = 8
    network: float = 50e9  # bytes a second a GPU between nodes, one way: 400 Gbit/s each
    mfu: float = (
        0.4  # share of the data sheet's peak; a compiled B/16 of timm reached 0.38 on an H200 (docs/scaling.md)
    )

    def __post_init__(self) -> None:
        for name in ("gpus", "batch", "accumulate", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu must be above 0 and at most 1, not {self.mfu}")
        if not self.network > 0:
            raise ValueError(f"network must be above 0, not {self.network}")

    @cached_property
    def parameters(self) -> Parameters:
        return count(self.config)

    @property
    def share(self) -> int:
        """Images of a step on one GPU: the largest share."""
        return math.ceil(self.batch / self.gpus)

    @property
    def at_once(self) -> int:
        return math.ceil(self.share / self.accumulate)

    def optimizer_numbers(self) -> int:
        P = self.parameters
        if self.optimizer == "muon":
            return P.matrices + 2 * (P.total - P.matrices)
        return P.total * (2 if self.optimizer == "adamw" else 1)

    def memory(self, strategy: Strategy, checkpointing: bool = False) -> Memory:
        """On one GPU, at its largest: the end of the forward pass, with last step's gradients' room taken."""
        P, s = self.parameters, 2 if self.precision == "bf16" else 4
        kept = activations(self.config, self.precision)
        n = self.gpus if strategy == "fsdp" else 1
        if strategy == "fsdp":  # what is outside the blocks, one block that computes, the next one, a block's gradients
            copies = s * (P.rest + 2.0 * P.block) + (s + 4) * P.block
        else:
            copies = 2.0 * P.total if s == 2 else 0.0
        return Memory(
            weights=4 * P.total / n,
            gradients=4 * P.total / n,
            optimizer=4 * self.optimizer_numbers() / n,
            averaged=4 * P.total / n if self.ema else 0,
            copies=copies,
            activations=self.at_once * (kept.checkpointed if checkpointing else kept.plain),
        )

    def communication(self, strategy: Strategy) -> Communication:
        """All-reduce of the gradients; or all-gather of the weights, forward and backward, and reduce-scatter."""
        ring = (self.gpus - 1) / self.gpus
        whole = 4 * self.parameters.total
        if strategy == "ddp":
            return Communication(all_reduce=2 * ring * whole)
        # Weights are gathered for each part of the batch anew, in the products' number type; gradients wait for the
        # last part. What stands outside the blocks stays whole between both passes. Muon needs whole matrices.
        s = 2 if self.precision == "bf16" else 4
        passes = self.accumulate * s * (2 * self.parameters.total - self.parameters.rest)
        muon = 4 * self.parameters.matrices if self.optimizer == "muon" else 0
        return Communication(all_gather=ring * (passes + muon), reduce_scatter=ring * whole)

    @property
    def bandwidth(self) -> float:
        """Of the slowest link of a ring, one way."""
        return self.gpu.link if self.gpus <= self.gpus_per_node else min(self.network, self.gpu.link)

    def communication_seconds(self, strategy: Strategy) -> float:
        return self.communication(strategy).total / self.bandwidth

    @property
    def flops(self) -> float:
        """Of a step, all GPUs together: forward, and twice that backward."""
        return 6.0 * multiply_adds(self.config) * self.batch

    def compute_seconds(self, checkpointing: bool = False) -> float:
        """Of a step at `mfu`; computing the blocks again is a third more."""
        peak = self.gpu.bf16 if self.precision == "bf16" else self.gpu.fp32
        busiest = self.share * self.gpus / self.batch  # where the batch does not divide, all wait for the largest share
        return self.flops * busiest / (self.gpus * peak * self.mfu) * (4 / 3 if checkpointing else 1)

    def step_seconds(self, strategy: Strategy, checkpointing: bool = False) -> tuple[float, float]:
        """With communication wholly hidden behind the backward pass, and with none of it hidden."""
        compute, sent = self.compute_seconds(checkpointing), self.communication_seconds(strategy)
        return max(compute, sent), compute + sent

    def fits(self, strategy: Strategy, checkpointing: bool = False) -> bool:
        return self.memory(strategy, checkpointing).total <= self.gpu.usable

    def choice(self, strategy: Strategy | None = None) -> tuple[Strategy, bool, str]:
        """Strategy, checkpointing and the reason: the first that fits of those that cost least."""
        tried: tuple[tuple[Strategy, bool, str], ...] = (
            ("ddp", False, "everything fits each GPU, and ddp waits for no weights"),
            ("fsdp", False, "with ddp the weights and all that goes with them leave too little room for activations"),
            ("ddp", True, "activations fit only where the blocks are computed again"),
            ("fsdp", True, "it fits only sharded, with the blocks computed again"),
        )
        for kind, checkpointing, reason in tried:
            if self.gpus == 1 and kind == "fsdp" and strategy is None:
                continue
            if strategy in (None, kind) and self.fits(kind, checkpointing):
                asked = "as asked; it fits" + (" with the blocks computed again" if checkpointing else "")
                return kind, checkpointing, asked if strategy else reason
        kind = strategy or ("fsdp" if self.gpus > 1 else "ddp")
        return kind, True, "it does not fit"

    def smallest(self, strategy: Strategy | None = None, most: int = 4096) -> tuple[int, Strategy, bool] | None:
        """The least number of GPUs, a power of two, on which this batch fits without further parts."""
        for power in range(most.bit_length()):
            plan = replace(self, gpus=min(2**power, most))
            if plan.gpus > max(self.batch, 1):
                return None
            kind, checkpointing, _ = plan.choice(strategy)
            if plan.fits(kind, checkpointing):
                return plan.gpus, kind, checkpointing
        return None

    def largest_share(self, strategy: Strategy, checkpointing: bool) -> int:
        """Images at once on one GPU."""
        kept = activations(self.config, self.precision)
        fixed = self.memory(strategy).total - self.memory(strategy).activations
        return max(0, int((self.gpu.usable - fixed) // (kept.checkpointed if checkpointing else kept.plain)))

    def days(self, images: float, strategy: Strategy, checkpointing: bool = False) -> tuple[float, float]:
        """For so many images seen, validation and reading not counted: at best and at worst."""
        best, worst = self.step_seconds(strategy, checkpointing)
        steps = images / self.batch
        return best * steps / 86_400, worst * steps / 86_400


def as_dict(plan: Plan, images: float, strategy: Strategy | None = None) -> dict[str, Any]:
    """Everything, for programs: bytes, seconds, floating-point operations."""
    chosen, checkpointing, reason = plan.choice(strategy)
    kinds: tuple[Strategy, ...] = ("ddp", "fsdp")
    least = plan.smallest(strategy)
    return {
        "parameters": plan.parameters.total,
        "tokens": math.prod(plan.config.grid) + plan.config.prefix,
        "gpus": plan.gpus,
        "batch": plan.batch,
        "images_at_once": plan.at_once,
        "precision": plan.precision,
        "flops_a_step": plan.flops,
        "gpu_memory": plan.gpu.memory,
        "usable_memory": plan.gpu.usable,
        "strategy": chosen,
        "checkpointing": checkpointing,
        "reason": reason,
        "fits": plan.fits(chosen, checkpointing),
        "images_at_once_that_fit": plan.largest_share(chosen, checkpointing),
        "smallest": None if least is None else dict(zip(("gpus", "strategy", "checkpointing"), least, strict=True)),
        "memory": {
            kind: {
                **vars(plan.memory(kind)),
                "activations_checkpointed": plan.memory(kind, True).activations,
                "total": plan.memory(kind).total,
                "total_checkpointed": plan.memory(kind, True).total,
            }
            for kind in kinds
        },
        "communication": {
            kind: {
                **vars(plan.communication(kind)),
                "total": plan.communication(kind).total,
                "seconds": plan.communication_seconds(kind),
            }
            for kind in kinds
        },
        "bandwidth": plan.bandwidth,
        "mfu": plan.mfu,
        "step_seconds": plan.step_seconds(chosen, checkpointing),
        "images": images,
        "days": plan.days(images, chosen, checkpointing),
    }
