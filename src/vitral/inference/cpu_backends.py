"""The libraries that run the CPU engines: OpenVINO where `vitral bench` measured it to be faster, otherwise PyTorch.

Without a benchmark, fp32 of a long-running process runs on OpenVINO too (see `throughput_backend`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.inference.cpu_engine import CpuEngine, CpuPrecision, cpu_unsupported_reason, unsupported_reason
from vitral.inference.int8_calibration import ActivationRanges
from vitral.inference.openvino_engine import (
    OpenVinoEngine,
    openvino_cpu_unsupported_reason,
    openvino_unsupported_reason,
)
from vitral.models.vit import ViT

CpuBackend = Literal["pytorch", "openvino"]
CPU_BACKENDS: tuple[CpuBackend, ...] = ("pytorch", "openvino")
BACKEND_TITLES: dict[CpuBackend, str] = {"pytorch": "PyTorch", "openvino": "OpenVINO"}
PrecisionEngine = CpuEngine | OpenVinoEngine
FP32_TOLERANCE = 1e-3  # largest difference of the logits of two backends, relative to their standard deviation
NUM_CHECK_IMAGES = 4


def backend_unsupported_reason(
    backend: CpuBackend, model: ViT, preprocessing: Preprocessing, precision: CpuPrecision
) -> str | None:
    """Why a backend cannot run a model in this precision on this CPU, or None if it can."""
    if backend == "pytorch":
        return unsupported_reason(model) or cpu_unsupported_reason(precision)
    return openvino_unsupported_reason(model, preprocessing) or openvino_cpu_unsupported_reason(precision)


def select_backend(
    model: ViT, preprocessing: Preprocessing, precision: CpuPrecision, measured: Mapping[str, CpuBackend]
) -> CpuBackend:
    """The backend that was measured to be faster or, without a measurement, the first that supports the precision."""
    if precision in measured:
        return measured[precision]
    for backend in CPU_BACKENDS:
        if backend_unsupported_reason(backend, model, preprocessing, precision) is None:
            return backend
    return "pytorch"


def build_precision_engine(
    model: ViT,
    preprocessing: Preprocessing,
    precision: CpuPrecision,
    ranges: ActivationRanges | None,
    backend: CpuBackend,
) -> PrecisionEngine:
    """Build an engine, or raise a VitralError that says what is missing. `ranges` is required for int8."""
    if backend == "pytorch":
        return CpuEngine(model, preprocessing, precision, ranges)
    return OpenVinoEngine(model, preprocessing, precision, ranges)


def throughput_backend(model: ViT, preprocessing: Preprocessing) -> CpuBackend:
    """The backend of fp32 for a process that will compute many images, without a benchmark.

    OpenVINO takes about 0.8 of PyTorch's time per image and 0.3 to 1 s to start (Ti/16 to B/16, Zen 5), which pays off
    from about 100 (B/16) to 300 images (Ti/16) on. Its logits must be those of PyTorch on a few random images.
    """
    if backend_unsupported_reason("openvino", model, preprocessing, "fp32") is not None:
        return "pytorch"
    C, (H, W) = preprocessing.channels, preprocessing.image_size
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (NUM_CHECK_IMAGES, C, H, W), dtype=torch.uint8, generator=generator)
    expected_NK = CpuEngine(model, preprocessing, "fp32")(images)
    actual_NK = OpenVinoEngine(model, preprocessing, "fp32")(images)
    return "openvino" if fp32_difference(actual_NK, expected_NK) is None else "pytorch"


def fp32_difference(actual_NK: Tensor, expected_NK: Tensor) -> float | None:
    """The largest difference of two backends' fp32 logits if it exceeds rounding, otherwise None."""
    max_abs_diff = float((actual_NK - expected_NK).abs().max())
    return None if max_abs_diff <= FP32_TOLERANCE * float(expected_NK.std()) else max_abs_diff
