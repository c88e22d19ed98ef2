"""Select and build the engine of a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.select import CompileOption, Hardware, PrecisionOption, select_hardware
from vitral.errors import VitralError
from vitral.inference.bench_results import BenchResult, bench_hint, benched_device, load_bench_results
from vitral.inference.cuda_cascade import build_fp8_cascade
from vitral.inference.cuda_engine import CudaEngine
from vitral.inference.engine import EngineChoice, EngineName, reference_engine
from vitral.models.vit import ViT

CUDA_BATCH_SIZE = 256


def select_gpu_engine(
    model: ViT,
    preprocessing: Preprocessing,
    hardware: Hardware,
    name: EngineName,
    folder: Path | None,
    compile: CompileOption = "no",
    throughput: bool = False,
) -> EngineChoice:
    """The requested engine; for "auto" the one that `vitral bench` recommends on this GPU, or bf16."""
    bench = load_bench_results(folder).get(benched_device(hardware)) if folder is not None else None
    if name == "fp8-cascade":
        return select_fp8_cascade(model, preprocessing, hardware, bench, folder, "requested")
    cuda = cuda_hardware(name, compile, throughput)
    if name != "auto":
        return select_cuda_engine(model, preprocessing, cuda, name)
    if bench is None or bench.engine != "fp8-cascade":
        choice = select_cuda_engine(model, preprocessing, cuda)
        return replace(choice, reason=f"{choice.reason}; {bench.reason}") if bench is not None else choice
    try:
        return select_fp8_cascade(model, preprocessing, hardware, bench, folder, bench.reason)
    except VitralError as error:  # another version of Triton, or a busy GPU without memory for two copies
        choice = select_cuda_engine(model, preprocessing, cuda)
        return replace(choice, reason=f"{choice.reason}; fp8-cascade was fastest, but {error.what}")


def select_fp8_cascade(
    model: ViT,
    preprocessing: Preprocessing,
    hardware: Hardware,
    bench: BenchResult | None,
    folder: Path | None,
    reason: str,
) -> EngineChoice:
    """FP8 with the margin that was calibrated on this GPU, or a VitralError that names what is missing."""
    if bench is None or "fp8" not in bench.margins:
        raise VitralError("fp8-cascade engine unavailable: no benchmark on this GPU", bench_hint(folder))
    try:
        engine = build_fp8_cascade(model, preprocessing, hardware, bench.margins["fp8"])
        for part in (engine.fast, engine.accurate):
            warm_up(part.compute, preprocessing, engine.fast.hardware.device, (1, 16))
    except RuntimeError as error:
        raise VitralError(f"fp8-cascade engine unavailable: {_first_line(error)}", "Use --engine bf16") from error
    return EngineChoice(
        name="fp8-cascade",
        precision="fp8",
        device=hardware.device.type,
        batch_size=CUDA_BATCH_SIZE,
        reason=reason,
        engine=engine,
    )


def warm_up(
    compute: Callable[[Tensor], Tensor], preprocessing: Preprocessing, device: torch.device, batch_sizes: Iterable[int]
) -> None:
    C, (H, W) = preprocessing.channels, preprocessing.image_size
    for batch_size in batch_sizes:
        compute(torch.zeros(batch_size, C, H, W, dtype=preprocessing.torch_dtype, device=device))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["unknown error"])[0]


def cuda_hardware(name: EngineName, compile: CompileOption, throughput: bool) -> Hardware:
    """Hardware for a CUDA engine. `throughput` allows fused kernels, `compile` the kernels of torch.compile."""
    precision: PrecisionOption = name if name in ("fp32", "bf16", "fp8") else "auto"
    allow_kernels = throughput or precision == "fp8"
    hardware = select_hardware(device="gpu", precision=precision, compile="auto" if allow_kernels else compile)
    return replace(hardware, compile=False) if compile == "no" else hardware


def select_cuda_engine(
    model: ViT, preprocessing: Preprocessing, hardware: Hardware, name: EngineName = "auto"
) -> EngineChoice:
    """bf16 where the GPU supports it, captured as CUDA graphs; the reference engine if the capture fails."""
    if name not in ("auto", "fp32", "bf16", "fp8"):
        raise VitralError(
            f"{name} engine unavailable: it runs on CPUs only", "Use --engine bf16, fp8, fp8-cascade or fp32 on a GPU"
        )
    try:
        engine = CudaEngine(model, preprocessing, hardware)
        # Fused kernels have a separate code path for token counts that are multiples of 16.
        warm_up(engine, preprocessing, hardware.device, (1, 16) if hardware.use_triton else (1,))
    except RuntimeError as error:
        message = _first_line(error)
        if hardware.fp8:
            raise VitralError(f"fp8 engine unavailable: {message}", "Use --engine bf16 or auto") from error
        fp32 = replace(hardware, precision="fp32", compile=False)
        return reference_engine(model, preprocessing, fp32, f"CUDA graph capture failed: {message}")
    precision = "fp8" if hardware.fp8 else hardware.precision
    return EngineChoice(
        name=precision,
        precision=precision,
        device=hardware.device.type,
        batch_size=CUDA_BATCH_SIZE,
        reason=f"{hardware.reasons['precision']}; {engine.description}",
        engine=engine,
    )
