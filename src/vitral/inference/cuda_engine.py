"""A ViT for asking on a GPU: weights in bf16, or FP8 for the large products; kernels of our own between these; and all
kernels of a call launched as one, so that none waits for Python."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware, Shared
from vitral.errors import VitralError
from vitral.models.vit import ViT

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batches are filled up to one of these: each is recorded once
HIDDEN = 160_000_000  # of an MLP, for a whole batch: 256 images of B/16. More gain nothing, and need as much memory


class _Whole(nn.Module):
    """From 8-bit pixels to logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: ViT, preprocessing: Preprocessing, hardware: Hardware) -> None:
        super().__init__()
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) * 255 for v in (preprocessing.mean, preprocessing.std))
        self.register_buffer("mean", mean.to(hardware.device))
        self.register_buffer("std", std.to(hardware.device))
        self.dtype = torch.bfloat16 if hardware.precision == "bf16" else torch.float32
        self.model = copy.deepcopy(model).eval().requires_grad_(False).to(hardware.device, self.dtype)
        self.fused: Callable[[Tensor], Tensor] | None = None
        self.why_not = ""  # fused
        if hardware.fused:
            from vitral.kernels import fused_model as fused

            self.why_not = fused.why_not(self.model, hardware, learning=False)
            if not self.why_not:
                self.fused = fused.answering(self.model, preprocessing, hardware, self.seen)
            elif hardware.fp8:
                raise VitralError(f"no FP8 products: {self.why_not}", "use --precision bf16, or auto")

    def seen(self, images_BCHW: Tensor) -> Tensor:
        """As the model takes them; pixels as fp32 would be the largest tensor of all."""
        seen = torch.empty_like(images_BCHW, dtype=self.dtype)
        torch.sub(images_BCHW, self.mean, out=seen)
        return seen.div_(self.std)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return (self.model(self.seen(images_BCHW)) if self.fused is None else self.fused(images_BCHW)).float()


class GpuEngine:
    """`GpuEngine(model, preprocessing, hardware)(images)`: uint8 images, B C H W → logits, B K, on the CPU."""

    def __init__(self, model: ViT, preprocessing: Preprocessing, hardware: Hardware) -> None:
        whole = _Whole(model, preprocessing, hardware).to(hardware.device)
        self.hardware = hardware
        compiled = hardware.compile and whole.fused is None
        without = f" (without fused kernels: {whole.why_not})" if whole.why_not else ""
        self.how = ", fused kernels" if whole.fused else (", compiled" if compiled else "") + without
        self.call: Callable[[Tensor], Tensor] = torch.compile(whole, dynamic=False) if compiled else whole
        self.recorded: dict[int, Callable[[Tensor], Tensor]] = {}
        self.memory = Shared(hardware.device)
        config = model.config
        hidden = (config.prefix + config.grid[0] * config.grid[1]) * config.hidden_width
        self.most = max(size for size in SIZES if size == 1 or size * hidden <= HIDDEN)
        self.lock = threading.Lock()  # a recorded call has one place for its input

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        parts = images_BCHW.split(self.most)
        answers = [self._ask(part.to(self.hardware.device, non_blocking=True)) for part in parts]
        return self.hardware.fetched(torch.cat(answers))

    def _ask(self, images_BCHW: Tensor) -> Tensor:
        B = len(images_BCHW)
        size = next(size for size in SIZES if size >= B)
        filled = images_BCHW if size == B else F.pad(images_BCHW, (0, 0) * 3 + (0, size - B))
        with self.lock:
            if size not in self.recorded:
                self.recorded[size] = self.hardware.replayed(self.call, torch.zeros_like(filled), self.memory)
            return self.recorded[size](filled)[:B]
