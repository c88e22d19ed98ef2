"""The libraries that run the CPU engines: OpenVINO where `vitral bench` measured it to be faster, otherwise PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
