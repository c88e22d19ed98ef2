"""FP8 on a GPU, with close calls computed again in fp16: `fp8-cascade`.

FP8 rounds weights and activations to four significant bits, which changes the top-1 label of a few percent of the
images: those whose two largest logits are close. They are computed again in fp16, whose rounding errors are an eighth
of bf16's at the same speed. Where fp16 overflows, the logits are NaN and the fp32 module computes them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.memory import to_pinned_cpu
from vitral.device.select import Hardware, select_hardware
from vitral.inference.cascade import CascadeEngine
from vitral.inference.cuda_engine import CudaEngine
from vitral.inference.engine import ReferenceEngine
from vitral.inference.forward import compute_logits
from vitral.models.vit import ViT


class Fp32Module(ReferenceEngine):
    """The fp32 module that the predictor holds anyway, as the last engine of a cascade."""

    nbytes = 0  # its weights belong to the predictor

    def compute(self, images_BCHW: Tensor) -> Tensor:
        """Logits (B, K) on the module's device."""
        return compute_logits(self.model, images_BCHW, self.preprocessing, self.hardware)


class CudaCascadeEngine(CascadeEngine):
    """A cascade whose images and logits stay on the GPU until the last of its engines has finished."""

    fast: CudaEngine
    accurate: CudaCascadeEngine | CudaEngine | Fp32Module

    def __init__(self, fast: CudaEngine, accurate: CudaCascadeEngine | CudaEngine | Fp32Module, margin: float) -> None:
        super().__init__(fast, accurate, margin)

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return to_pinned_cpu(self.compute(images_BCHW.to(self.fast.hardware.device, non_blocking=True)))

    @torch.inference_mode()
    def compute(self, images_BCHW: Tensor) -> Tensor:
        """Logits (B, K) of images on the GPU."""
        logits_BK = self.fast.compute(images_BCHW)
        ambiguous = self.is_ambiguous(logits_BK).nonzero().flatten()  # waits for the logits
        if len(ambiguous):
            logits_BK[ambiguous] = self.accurate.compute(images_BCHW[ambiguous])
        return logits_BK


def fp8_hardware() -> Hardware:
    """Raises VitralError where the GPU has no FP8 units."""
    return replace(select_hardware(device="gpu", precision="fp8"), compile=False)


def build_fp8_cascade(model: ViT, preprocessing: Preprocessing, hardware: Hardware, margin: float) -> CudaCascadeEngine:
    """FP8, then fp16, then the fp32 module. `hardware` is the fp32 hardware that the module itself runs on."""
    fast = CudaEngine(model, preprocessing, fp8_hardware())
    return CudaCascadeEngine(fast, build_recheck_engine(model, preprocessing, hardware), margin)


def build_recheck_engine(model: ViT, preprocessing: Preprocessing, hardware: Hardware) -> CudaCascadeEngine:
    """fp16 with fused kernels; NaN logits, of images that overflow fp16, are computed by the fp32 module."""
    bf16 = replace(select_hardware(device="gpu", precision="bf16"), compile=False)
    fp16 = CudaEngine(model, preprocessing, bf16, dtype=torch.float16)
    return CudaCascadeEngine(fp16, Fp32Module(model, preprocessing, hardware), margin=0.0)
