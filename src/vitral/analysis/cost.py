"""Cost of a training run, estimated from the configuration: memory per GPU, communication volume, FLOPs and time.

Shapes:  T tokens   N patches   D width   M hidden width   h heads   K classes   P parameters   n GPUs

Activations are the tensors that autograd saves for the backward pass of `vit.py`, counted layer by layer; the tests
compare the estimate with what PyTorch saves. Weights, gradients and optimizer states are fp32. With bf16, GEMM inputs
are bf16, while the residual stream (the input of the norms) stays fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from vitral.errors import unknown_name_error
from vitral.models.uninitialized import SkipInit
from vitral.models.vit import ViT, ViTConfig

ParallelStrategy = Literal["ddp", "fsdp"]
GB = 10**9
GIB = 2**30
MAX_GPUS = 2**12  # that `min_gpus` tries
CUDA_CONTEXT = 1.5 * GIB  # driver, library workspaces, communication buffers; measured: 0.5 to 2 GiB
FRAGMENTATION = 0.06  # fraction of the memory that the allocator cannot use


@dataclass(frozen=True, kw_only=True)
class GPUSpec:
    """Data-sheet figures: dense throughput (no sparsity) and unidirectional link bandwidth."""

    memory: float  # bytes
    bf16: float  # FLOP/s
    fp32: float  # FLOP/s
    link: float  # bytes/s between two GPUs of a node, per direction

    @property
    def usable(self) -> float:
        """Bytes available to tensors."""
        return self.memory * (1 - FRAGMENTATION) - CUDA_CONTEXT

    def with_memory(self, memory: float) -> GPUSpec:
        return replace(self, memory=memory)


# NVIDIA data sheets, SXM boards where they exist. The sheets give NVLink bandwidth as the sum of both directions.
GPUS: dict[str, GPUSpec] = {
    "L4": GPUSpec(memory=24 * GB, bf16=121e12, fp32=30.3e12, link=32e9),
    "RTX-4090": GPUSpec(memory=24 * GB, bf16=165e12, fp32=82.6e12, link=32e9),
    "A100-40": GPUSpec(memory=40 * GB, bf16=312e12, fp32=19.5e12, link=300e9),
    "A100-80": GPUSpec(memory=80 * GB, bf16=312e12, fp32=19.5e12, link=300e9),
    "H100": GPUSpec(memory=80 * GB, bf16=989e12, fp32=67e12, link=450e9),
    "H200": GPUSpec(memory=141 * GB, bf16=989e12, fp32=67e12, link=450e9),
}


def gpu_spec(name: str) -> GPUSpec:
    """The GPU of this name, in upper or lower case."""
    name = next((candidate for candidate in GPUS if candidate.lower() == name.lower()), name)
    if name not in GPUS:
        raise unknown_name_error("GPU", name, GPUS)
    return GPUS[name]


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Number of parameters, in total and per encoder block."""

    total: int
    block: int  # of one encoder block
    block_matrices: int  # of one block's matrices, which Muon optimises
    depth: int

    @property
    def outside_blocks(self) -> int:
        """Parameters of embedding, positions, final norm and head."""
        return self.total - self.depth * self.block

    @property
    def matrices(self) -> int:
        return self.depth * self.block_matrices


def count_parameters(config: ViTConfig) -> ParameterCount:
    """Count the parameters of the model itself, built on the meta device."""
    with SkipInit(), torch.device("meta"):
        model = ViT(replace(config, depth=1))  # all blocks have the same size
    block_parameters = [*model.encoder.blocks[0].parameters()]
    block = sum(p.numel() for p in block_parameters)
    outside_blocks = sum(p.numel() for p in model.parameters()) - block
    return ParameterCount(
        total=outside_blocks + config.depth * block,
        block=block,
        block_matrices=sum(p.numel() for p in block_parameters if p.ndim == 2),
        depth=config.depth,
    )


def multiply_adds(config: ViTConfig) -> int:
    """Multiply-adds of the GEMMs and attention in the forward pass of one image."""
    N, D, M, K = math.prod(config.grid), config.width, config.hidden_width, config.num_classes
    T = N + config.num_prefix_tokens
    mlp = (3 if config.activation == "swiglu" else 2) * D * M  # per token
    block = 4 * T * D * D + 2 * T * T * D + T * mlp
    pooling = 2 * N * D * D + 2 * N * D + D * D + mlp if config.pooling == "attention" else 0
    head = D * K + (D * D if config.head == "mlp" else 0)
    return N * config.channels * config.patch_size**2 * D + config.depth * block + pooling + head


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes per image that are saved for the backward pass."""

    block: int  # of one block
    block_input: int  # of one block with activation checkpointing, which saves only its input
    outside_blocks: int  # image, patches, final norm, pooling, head
    depth: int

    @property
    def total(self) -> int:
        return self.outside_blocks + self.depth * self.block

    @property
    def total_with_checkpointing(self) -> int:
        """The inputs of all blocks, and all activations of the block that is being recomputed."""
        return self.outside_blocks + self.depth * self.block_input + self.block - self.block_input


def activation_bytes(
    config: ViTConfig, precision: Literal["fp32", "bf16"] = "bf16", device: Literal["gpu", "cpu"] = "gpu"
) -> ActivationBytes:
    """Activations of one image. Fused attention saves no T×T matrix.

    Dropout masks are floating-point on a CPU and one byte per element on a GPU. Under autocast, layer norms on a GPU
    copy bf16 inputs to fp32.
    """
    s = 2 if precision == "bf16" else 4
    N, D, M, h, K = math.prod(config.grid), config.width, config.hidden_width, config.heads, config.num_classes
    T = N + config.num_prefix_tokens
    mask = (1 if device == "gpu" else s) if config.dropout else 0
    statistics = 2 * 4 * T  # mean and standard deviation of a layer norm
    norms = 2 * (4 * T * D + statistics)  # residual stream, twice
    attention = s * T * D + 3 * s * T * D + s * T * D + 4 * h * T  # norm output; q, k, v; attention output; row sums
    if config.qk_norm or "rotary" in config.positions:
        attention += 3 * s * T * D  # new q and k next to the qkv tensor; a copy of the attention output
    if config.qk_norm:
        attention += 2 * 2 * 4 * h * T + (2 * 4 * T * D if s == 2 and device == "gpu" else 0)
    # Norm output; input and output of the activation. SwiGLU also saves silu(gate), the quick GELU its sigmoid.
    mlp = s * T * D + {"swiglu": 4, "quick_gelu": 3}.get(config.activation, 2) * s * T * M
    scale = 2 * s * T * D if config.layer_scale is not None else 0
    block = norms + attention + mlp + scale + mask * (2 * T * D + T * M)

    image = 4 * config.channels * math.prod(config.image_size) + s * N * config.channels * config.patch_size**2
    embedding_mask = (1 if device == "gpu" else 4) * T * D if config.dropout_embedding else 0
    outer_norms = (config.pre_norm + config.final_norm) * (4 * T * D + statistics)
    pooled = s * D
    if config.pooling == "class" and s == 4:
        pooled = 4 * T * D  # the class token is a view that keeps the whole norm output alive
    elif config.pooling == "attention":
        pooled = s * (N * D + 2 * N * D + 2 * D) + 4 * h + (4 * D + 8) + s * (D + 2 * M) + s * D
    head = 2 * s * D if config.head == "mlp" else 0
    loss = 2 * 4 * K  # targets and log-probabilities
    outside_blocks = image + embedding_mask + outer_norms + pooled + head + loss
    return ActivationBytes(block=block, block_input=4 * T * D, outside_blocks=outside_blocks, depth=config.depth)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes per GPU."""

    weights: float
    gradients: float
    optimizer: float
    ema: float
    copies: float  # bf16 copies of the weights; with FSDP, the blocks that are gathered at the same time
    activations: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class CommunicationVolume:
    """Bytes that each GPU sends per step. A ring sends (n-1)/n of a tensor to all-gather or reduce-scatter it."""

    all_reduce: float = 0
    all_gather: float = 0
    reduce_scatter: float = 0

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """The setup of a training run, and its estimated costs."""

    config: ViTConfig
    gpus: int = 8
    batch_size: int = 1024  # images per step on all GPUs together
    grad_accum: int = 1  # micro-batches per step
    precision: Literal["fp32", "bf16"] = "bf16"
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    ema: bool = True
    gpu: GPUSpec
    gpus_per_node: int = 8
    network: float = 50e9  # bytes/s per GPU between nodes, per direction: 400 Gbit/s
    mfu: float = 0.4  # model FLOPs utilisation; a compiled timm B/16 reached 0.38 on an H200

    def __post_init__(self) -> None:
        for name in ("gpus", "batch_size", "grad_accum", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu must be greater than 0 and at most 1, got {self.mfu}")
        if not self.network > 0:
            raise ValueError(f"network must be greater than 0, got {self.network}")

    @cached_property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.config)

    @property
    def batch_per_gpu(self) -> int:
        """Images per step on the GPU with the most."""
        return math.ceil(self.batch_size / self.gpus)

    @property
    def micro_batch(self) -> int:
        """Images per GPU in one forward pass."""
        return math.ceil(self.batch_per_gpu / self.grad_accum)

    def optimizer_state_size(self) -> int:
        """Number of fp32 values in the optimizer state."""
        P = self.parameters
        if self.optimizer == "muon":
            return P.matrices + 2 * (P.total - P.matrices)
        return P.total * (2 if self.optimizer == "adamw" else 1)

    def memory(self, strategy: ParallelStrategy, checkpointing: bool = False) -> MemoryEstimate:
        """Peak memory per GPU: at the end of the forward pass, with the gradients allocated."""
        P, s = self.parameters, 2 if self.precision == "bf16" else 4
        per_image = activation_bytes(self.config, self.precision)
        n = self.gpus if strategy == "fsdp" else 1
        if strategy == "fsdp":  # outside the blocks; current and prefetched block; gradients of one block
            copies = s * (P.outside_blocks + 2.0 * P.block) + (s + 4) * P.block
        else:
            copies = 2.0 * P.total if s == 2 else 0.0
        return MemoryEstimate(
            weights=4 * P.total / n,
            gradients=4 * P.total / n,
            optimizer=4 * self.optimizer_state_size() / n,
            ema=4 * P.total / n if self.ema else 0,
            copies=copies,
            activations=self.micro_batch * (per_image.total_with_checkpointing if checkpointing else per_image.total),
        )

    def communication(self, strategy: ParallelStrategy) -> CommunicationVolume:
        """DDP: all-reduce of gradients. FSDP: all-gather of weights in both passes, reduce-scatter of gradients."""
        ring = (self.gpus - 1) / self.gpus
        gradients = 4 * self.parameters.total
        if strategy == "ddp":
            return CommunicationVolume(all_reduce=2 * ring * gradients)
        # Weights are gathered in the compute dtype for every micro-batch; gradients are reduced after the last one.
        # Parameters outside the blocks stay gathered between forward and backward. Muon needs full matrices.
        s = 2 if self.precision == "bf16" else 4
        passes = self.grad_accum * s * (2 * self.parameters.total - self.parameters.outside_blocks)
        muon = 4 * self.parameters.matrices if self.optimizer == "muon" else 0
        return CommunicationVolume(all_gather=ring * (passes + muon), reduce_scatter=ring * gradients)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the slowest link of the ring, per direction."""
        return self.gpu.link if self.gpus <= self.gpus_per_node else min(self.network, self.gpu.link)

    def communication_seconds(self, strategy: ParallelStrategy) -> float:
        return self.communication(strategy).total / self.bandwidth

    @property
    def flops(self) -> float:
        """FLOPs per step on all GPUs together; the backward pass costs twice the forward pass."""
        return 6.0 * multiply_adds(self.config) * self.batch_size

    def compute_seconds(self, checkpointing: bool = False) -> float:
        """Compute time per step at `mfu`. Activation checkpointing adds a third."""
        peak = self.gpu.bf16 if self.precision == "bf16" else self.gpu.fp32
        imbalance = self.batch_per_gpu * self.gpus / self.batch_size  # all GPUs wait for the one with the most images
        return self.flops * imbalance / (self.gpus * peak * self.mfu) * (4 / 3 if checkpointing else 1)

    def step_seconds(self, strategy: ParallelStrategy, checkpointing: bool = False) -> tuple[float, float]:
        """Time per step if communication overlaps fully with compute, and if it does not overlap at all."""
        compute, sent = self.compute_seconds(checkpointing), self.communication_seconds(strategy)
        return max(compute, sent), compute + sent

    def fits(self, strategy: ParallelStrategy, checkpointing: bool = False) -> bool:
        return self.memory(strategy, checkpointing).total <= self.gpu.usable

    def recommend(self, strategy: ParallelStrategy | None = None) -> tuple[ParallelStrategy, bool, str]:
        """Strategy, activation checkpointing and the reason: the cheapest combination that fits."""
        candidates: tuple[tuple[ParallelStrategy, bool, str], ...] = (
            ("ddp", False, "everything fits on each GPU, and DDP communicates least"),
            ("fsdp", False, "with DDP, weights and optimizer states leave too little memory for activations"),
            ("ddp", True, "fits only with activation checkpointing"),
            ("fsdp", True, "fits only sharded and with activation checkpointing"),
        )
        for candidate, checkpointing, reason in candidates:
            if self.gpus == 1 and candidate == "fsdp" and strategy is None:
                continue
            if strategy in (None, candidate) and self.fits(candidate, checkpointing):
                if strategy:
                    reason = "requested; fits" + (" with activation checkpointing" if checkpointing else "")
                return candidate, checkpointing, reason
        return strategy or ("fsdp" if self.gpus > 1 else "ddp"), True, "does not fit"

    def min_gpus(self, strategy: ParallelStrategy | None = None) -> tuple[int, ParallelStrategy, bool] | None:
        """The smallest power of two of GPUs on which this batch fits without more gradient accumulation."""
        for power in range(MAX_GPUS.bit_length()):
            estimate = replace(self, gpus=2**power)
            if estimate.gpus > max(self.batch_size, 1):
                return None
            recommended, checkpointing, _ = estimate.recommend(strategy)
            if estimate.fits(recommended, checkpointing):
                return estimate.gpus, recommended, checkpointing
        return None

    def max_micro_batch(self, strategy: ParallelStrategy, checkpointing: bool) -> int:
        """The largest number of images per GPU in one forward pass that fits."""
        activations = activation_bytes(self.config, self.precision)
        per_image = activations.total_with_checkpointing if checkpointing else activations.total
        fixed = self.memory(strategy).total - self.memory(strategy).activations
        return max(0, int((self.gpu.usable - fixed) // per_image))

    def days(self, images: float, strategy: ParallelStrategy, checkpointing: bool = False) -> tuple[float, float]:
        """Best and worst duration of training on this many images, without validation and data loading."""
        best, worst = self.step_seconds(strategy, checkpointing)
        steps = images / self.batch_size
        return best * steps / 86_400, worst * steps / 86_400


def ddp_memory(
    config: ViTConfig,
    *,
    gpu_memory_bytes: float,
    world_size: int,
    batch_size: int,
    grad_accum: int,
    precision: Literal["fp32", "bf16"],
    optimizer: Literal["adamw", "sgd", "muon"],
    ema: bool,
    activation_checkpointing: bool,
) -> tuple[float, float]:
    """Bytes per GPU that training with DDP needs, and that a GPU with `gpu_memory_bytes` has available."""
    estimate = CostEstimate(
        config=config,
        gpus=world_size,
        batch_size=batch_size,
        grad_accum=grad_accum,
        precision=precision,
        optimizer=optimizer,
        ema=ema,
        gpu=GPUS["H100"].with_memory(gpu_memory_bytes),
    )
    return estimate.memory("ddp", activation_checkpointing).total, estimate.gpu.usable


def cost_as_dict(estimate: CostEstimate, images: float, strategy: ParallelStrategy | None = None) -> dict[str, Any]:
    """The estimate as JSON: bytes, seconds and FLOPs."""
    recommended, checkpointing, reason = estimate.recommend(strategy)
    strategies: tuple[ParallelStrategy, ...] = ("ddp", "fsdp")
    min_gpus = estimate.min_gpus(strategy)
    min_gpus_keys = ("gpus", "strategy", "activation_checkpointing")
    return {
        "parameters": estimate.parameters.total,
        "tokens": math.prod(estimate.config.grid) + estimate.config.num_prefix_tokens,
        "gpus": estimate.gpus,
        "batch_size": estimate.batch_size,
        "micro_batch": estimate.micro_batch,
        "precision": estimate.precision,
        "flops_per_step": estimate.flops,
        "gpu_memory": estimate.gpu.memory,
        "usable_memory": estimate.gpu.usable,
        "strategy": recommended,
        "activation_checkpointing": checkpointing,
        "reason": reason,
        "fits": estimate.fits(recommended, checkpointing),
        "max_micro_batch": estimate.max_micro_batch(recommended, checkpointing),
        "min_gpus": None if min_gpus is None else dict(zip(min_gpus_keys, min_gpus, strict=True)),
        "memory": {
            name: {
                **vars(estimate.memory(name)),
                "activations_checkpointed": estimate.memory(name, True).activations,
                "total": estimate.memory(name).total,
                "total_checkpointed": estimate.memory(name, True).total,
            }
            for name in strategies
        },
        "communication": {
            name: {
                **vars(estimate.communication(name)),
                "total": estimate.communication(name).total,
                "seconds": estimate.communication_seconds(name),
            }
            for name in strategies
        },
        "bandwidth": estimate.bandwidth,
        "mfu": estimate.mfu,
        "step_seconds": estimate.step_seconds(recommended, checkpointing),
        "images": images,
        "days": estimate.days(images, recommended, checkpointing),
    }
