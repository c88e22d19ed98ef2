"""Inference engines: uint8 images to logits. `ReferenceEngine` defines what is correct; the others are faster.

Shapes:  B images   K classes   D features
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.preprocess import Preprocessing
from vitral.data.variable_images import MapFn, map_batches
from vitral.device.select import Hardware
from vitral.inference.forward import compute_features, compute_logits
from vitral.inference.parallel_batches import parallel_map
from vitral.models.vit import ViT
from vitral.utils.progress import ProgressFn, no_progress

if TYPE_CHECKING:
    from vitral.inference.cpu_backends import CpuBackend

EngineName = Literal["auto", "reference", "fp32", "bf16", "int8", "bf16-cascade", "int8-cascade", "fp8", "fp8-cascade"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)
REFERENCE_BATCH_SIZE = 512
FEATURE_BATCH_SIZE = 64  # features are also needed of models much larger than those served


class Engine(Protocol):
    """Forward pass on uint8 images (B, C, H, W) of the model's input size. May be called from any thread."""

    def __call__(self, images_BCHW: Tensor, /) -> Tensor:
        """Logits (B, K), fp32, on the CPU."""

    def features(self, images_BCHW: Tensor, /) -> Tensor:
        """Pooled features (B, D), the input of the head, fp32, on the CPU."""


class ReferenceEngine:
    """The module itself, in fp32."""

    def __init__(self, model: ViT, preprocessing: Preprocessing, hardware: Hardware) -> None:
        self.model, self.preprocessing, self.hardware = model, preprocessing, hardware

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return compute_logits(self.model, images_BCHW, self.preprocessing, self.hardware).cpu()

    def features(self, images_BCHW: Tensor) -> Tensor:
        return compute_features(self.model, images_BCHW, self.preprocessing, self.hardware)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine in use, how it is called and why it was selected."""

    name: str
    precision: str
    device: str  # "cpu" or "cuda"
    batch_size: int
    reason: str
    engine: Engine
    threads: int | None = None  # CPU only
    backend: CpuBackend | None = None  # library of a CPU engine

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    def info(self) -> dict[str, Any]:
        """What is recorded with every result."""
        names = ("name", "precision", "device", "threads", "backend")
        info = {name: getattr(self, name) for name in names}
        return {key: value for key, value in info.items() if value is not None}

    def logits(self, images_NCHW: Images, progress: ProgressFn = no_progress) -> Tensor:
        """Logits (N, K) of uint8 images of the model's input size, in batches; N must not be 0."""
        return map_batches(images_NCHW, self.engine, self._batch_size(images_NCHW), progress, self._map_fn)

    def features(self, images_NCHW: Images, progress: ProgressFn = no_progress) -> Tensor:
        """Pooled features (N, D), the input of the head."""
        batch_size = min(self._batch_size(images_NCHW), FEATURE_BATCH_SIZE)
        return map_batches(images_NCHW, self.engine.features, batch_size, progress, self._map_fn)

    @property
    def _is_parallel(self) -> bool:
        """Batches in parallel on a CPU. The reference engine computes one after the other, with all threads."""
        return self.device == "cpu" and self.name != "reference"

    @property
    def _map_fn(self) -> MapFn:
        return parallel_map if self._is_parallel else map

    def _batch_size(self, images_NCHW: Images) -> int:
        """The batch size of the engine, or less if there would not be a batch for each thread."""
        threads = torch.get_num_threads() if self._is_parallel else 1
        return max(min(self.batch_size, -(-len(images_NCHW) // threads)), 1)


def reference_engine(model: ViT, preprocessing: Preprocessing, hardware: Hardware, reason: str) -> EngineChoice:
    """The module itself, on the hardware it is on."""
    return EngineChoice(
        name="reference",
        precision=hardware.precision,
        device=hardware.device.type,
        threads=torch.get_num_threads() if hardware.device.type == "cpu" else None,
        batch_size=REFERENCE_BATCH_SIZE,
        reason=reason,
        engine=ReferenceEngine(model, preprocessing, hardware),
    )
