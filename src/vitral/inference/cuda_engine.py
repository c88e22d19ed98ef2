"""A ViT prepared for GPU inference: fp32, bf16, fp16 or FP8 weights, fused kernels where supported, CUDA graphs."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.cuda_graphs import GraphPool, capture_forward
from vitral.device.memory import to_pinned_cpu
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.models.token_merging import TokenMergingViT
from vitral.models.vit import ViT

# Batches are padded to one of these; one graph is captured for each.
BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Up to this many images, the copy of the logits to the host is part of the graph, which saves two launches.
MAX_BATCH_TO_HOST = 16
# Hidden MLP activations of a whole batch (256 images for B/16). Larger batches are not faster and use more memory.
MAX_HIDDEN_ACTIVATIONS = 160_000_000


class Uint8Model(nn.Module):
    """Normalisation and forward pass in the engine's precision: uint8 images (B, C, H, W) to fp32 logits (B, K)."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: ViT, preprocessing: Preprocessing, hardware: Hardware, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        scale = preprocessing.pixel_scale
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) * scale for v in (preprocessing.mean, preprocessing.std))
        self.register_buffer("mean", mean.to(hardware.device))
        self.register_buffer("std", std.to(hardware.device))
        self.dtype = dtype or (torch.bfloat16 if hardware.precision == "bf16" else torch.float32)
        self.model = copy.deepcopy(model).eval().requires_grad_(False).to(hardware.device, self.dtype)
        self.head: nn.Module | None = None
        self.fused_features: Callable[[Tensor], Tensor] | None = None
        self.fused_unsupported: str | None = None
        if hardware.use_triton:
            from vitral.kernels import token_merging
            from vitral.kernels.encoder_checks import unsupported_reason
            from vitral.kernels.inference import make_inference_forward

            self.fused_unsupported = unsupported_reason(self.model, hardware, training=False)
            if self.fused_unsupported is None and isinstance(model, TokenMergingViT):
                self.fused_unsupported = token_merging.unsupported_reason(self.model, hardware)
            if preprocessing.resize == "native":
                self.fused_unsupported = "native inputs have several patch grids"
            if self.fused_unsupported is None:
                self.fused_features = make_inference_forward(self.model, preprocessing, hardware, self.normalise)
                # The head is applied separately, so that features and logits share the fused forward pass.
                self.head, self.model.head = self.model.head, nn.Identity()
            elif hardware.fp8:
                raise VitralError(f"fp8 engine unavailable: {self.fused_unsupported}", "Use --engine bf16 or auto")

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 to the engine's dtype without an fp32 copy, which would be the largest tensor of the forward pass."""
        if images_BCHW.dtype != torch.uint8:
            return ((images_BCHW.float() - self.mean) / self.std).to(self.dtype)
        normalised = torch.empty_like(images_BCHW, dtype=self.dtype)
        torch.sub(images_BCHW, self.mean, out=normalised)
        return normalised.div_(self.std)

    def features(self, images_BCHW: Tensor) -> Tensor:
        if self.fused_features is not None:
            return self.fused_features(images_BCHW).float()
        return self.model.features(self.normalise(images_BCHW)).float()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        if self.fused_features is not None and self.head is not None:
            return cast(Tensor, self.head(self.fused_features(images_BCHW))).float()
        return cast(Tensor, self.model(self.normalise(images_BCHW))).float()


class CudaEngine:
    """`CudaEngine(model, preprocessing, hardware)(images)`: uint8 images (B, C, H, W) to logits (B, K) on the CPU.

    `dtype` replaces the dtype that follows from the hardware's precision, which has no fp16.
    """

    def __init__(
        self, model: ViT, preprocessing: Preprocessing, hardware: Hardware, dtype: torch.dtype | None = None
    ) -> None:
        self.model = Uint8Model(model, preprocessing, hardware, dtype).to(hardware.device)
        self.hardware = hardware
        is_fused = self.model.fused_features is not None
        is_compiled = hardware.compile and not is_fused and preprocessing.resize != "native"
        self.description = "fused kernels" if is_fused else "compiled" if is_compiled else "PyTorch kernels"
        if self.model.fused_unsupported is not None:
            self.description += f" (no fused kernels: {self.model.fused_unsupported})"
        # Native inputs have dozens of shapes: captures of all of them would take longer than they save.
        self.use_graphs = preprocessing.resize != "native"
        self.description += "" if self.use_graphs else "; no CUDA graphs for native inputs"
        self.forward: Callable[[Tensor], Tensor] = (
            torch.compile(self.model, dynamic=False) if is_compiled else self.model
        )
        self.graphs: dict[tuple[int, bool], Callable[[Tensor], Tensor]] = {}  # (batch size, logits on the host)
        self.pool = GraphPool(hardware.device)
        # Recorded now: FP8 frees the unquantized weights.
        self.weight_shapes = [weight.shape for weight in model.encoder.parameters()]
        hidden = model.config.num_tokens * model.config.hidden_width
        self.max_batch_size = max(size for size in BATCH_SIZES if size == 1 or size * hidden <= MAX_HIDDEN_ACTIVATIONS)
        self.lock = threading.Lock()  # a captured graph has a single input buffer

    @torch.no_grad()  # tensors of inference mode could not be used in later gradients
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        if len(images_BCHW) <= min(MAX_BATCH_TO_HOST, self.max_batch_size):
            return to_pinned_cpu(self._replay(images_BCHW.to(self.hardware.device, non_blocking=True), to_host=True))
        return to_pinned_cpu(self.compute(images_BCHW))

    @torch.inference_mode()
    def compute(self, images_BCHW: Tensor) -> Tensor:
        """Logits (B, K), fp32, on the GPU, without waiting for them."""
        batches = images_BCHW.split(self.max_batch_size)
        logits = [self._replay(batch.to(self.hardware.device, non_blocking=True)) for batch in batches]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.inference_mode()
    def features(self, images_BCHW: Tensor) -> Tensor:
        """Computed by the same kernels as the logits, without CUDA graphs."""
        batches = images_BCHW.split(self.max_batch_size)
        with self.lock:
            features = [self.model.features(batch.to(self.hardware.device)) for batch in batches]
        return to_pinned_cpu(torch.cat(features))

    @torch.inference_mode()
    def head(self, features_BD: Tensor) -> Tensor:
        """Logits (B, K) of pooled features, fp32, on the CPU."""
        head: nn.Module = self.model.head or self.model.model.head
        return cast(Tensor, head(features_BD.to(self.hardware.device, self.model.dtype))).float().cpu()

    @property
    def nbytes(self) -> int:
        """Size of the encoder's weights in bytes."""
        width = 1 if self.hardware.fp8 else self.model.dtype.itemsize
        return sum(math.prod(shape) for shape in self.weight_shapes) * width

    def _replay(self, images_BCHW: Tensor, to_host: bool = False) -> Tensor:
        B = len(images_BCHW)
        if not self.use_graphs:
            return self.forward(images_BCHW)
        size = next(size for size in BATCH_SIZES if size >= B)
        padded = images_BCHW if size == B else F.pad(images_BCHW, (0, 0) * 3 + (0, size - B))
        with self.lock:
            if (size, to_host) not in self.graphs:
                example = torch.zeros_like(padded)
                self.graphs[size, to_host] = capture_forward(self.forward, example, self.pool, to_host)
            return self.graphs[size, to_host](padded)[:B]
