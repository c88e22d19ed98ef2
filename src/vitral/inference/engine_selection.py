"""Select and build the engine that computes a model's logits: the one that `vitral bench` recommends, or a default."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import available_cpus, cpu_name
from vitral.device.select import CompileOption, Hardware
from vitral.errors import VitralError
from vitral.inference.bench_results import BenchResult, bench_hint, load_bench_results
from vitral.inference.cascade import CascadeEngine
from vitral.inference.cpu_backends import (
    CpuBackend,
    PrecisionEngine,
    backend_unsupported_reason,
    build_precision_engine,
    select_backend,
    throughput_backend,
)
from vitral.inference.cpu_engine import CpuPrecision, unsupported_reason
from vitral.inference.engine import ENGINE_NAMES, EngineChoice, EngineName, reference_engine
from vitral.inference.gpu_selection import select_gpu_engine
from vitral.inference.int8_calibration import load_activation_ranges
from vitral.inference.parallel_batches import cache_batch_size
from vitral.models.token_merging import TokenMergingViT
from vitral.models.vit import ViT


def select_engine(
    model: ViT,
    preprocessing: Preprocessing,
    hardware: Hardware,
    name: EngineName = "auto",
    *,
    folder: Path | None = None,
    threads: int | None = None,
    compile: CompileOption = "no",
    throughput: bool = False,
    tome_r: int = 0,
) -> EngineChoice:
    """Select and build the engine of a model. `hardware` is the fp32 hardware that the module itself runs on.

    `tome_r`: tokens that each block merges (models/token_merging.py). Stored benchmarks are those of the plain model.
    """
    if tome_r:
        merging = with_token_merging(model, tome_r)
        choice = select_engine(
            merging, preprocessing, hardware, name, threads=threads, compile=compile, throughput=throughput
        )
        reason = f"merges {tome_r} tokens per block; {choice.reason}"
        return replace(choice, name=f"{choice.name}+tome{tome_r}", reason=reason)
    if name not in ENGINE_NAMES:
        raise VitralError(
            f"expected engine to be one of {', '.join(ENGINE_NAMES)}, got {name!r}",
            "Use auto for the engine that vitral bench recommends",
        )
    if hardware.device.type == "cpu":
        return select_cpu_engine(model, preprocessing, hardware, folder, name, threads, throughput)
    if name == "reference":
        return reference_engine(model, preprocessing, hardware, "requested")
    return select_gpu_engine(model, preprocessing, hardware, name, folder, compile, throughput)


def with_token_merging(model: ViT, r: int) -> ViT:
    try:
        return TokenMergingViT.from_model(model, r)
    except ValueError as error:
        raise VitralError(f"token merging is unavailable: {error}", "Omit --tome-r") from error


def select_cpu_engine(
    model: ViT,
    preprocessing: Preprocessing,
    hardware: Hardware,
    folder: Path | None,
    name: EngineName = "auto",
    threads: int | None = None,
    throughput: bool = False,
) -> EngineChoice:
    """The requested engine; for "auto" the one that `vitral bench` recommends on this CPU, or fp32.

    `throughput` allows backends that take time to start. `folder` holds the benchmark results and activation ranges.
    Sets the number of threads of the process to `threads`, or to the recommended number unless OMP_NUM_THREADS is set.
    """
    if name in ("fp8", "fp8-cascade"):
        raise VitralError(f"{name} engine unavailable: CPUs have no FP8 units", "Use --engine auto")
    if threads is not None:
        check_threads((threads,))
    bench = load_bench_results(folder).get(cpu_name()) if folder is not None else None
    if threads is not None:
        torch.set_num_threads(threads)
    elif bench is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(bench.threads)
    if name == "reference":
        return reference_engine(model, preprocessing, hardware, "requested")
    if reason := unsupported_reason(model):
        if name not in ("auto", "fp32"):
            raise VitralError(f"{name} engine unavailable: {reason}", "Use --engine reference")
        return reference_engine(model, preprocessing, hardware, reason)

    def choice(selected: str, reason: str, backends: Mapping[str, CpuBackend]) -> EngineChoice:
        engine = build_engine(model, preprocessing, selected, folder, bench, backends)
        precision: CpuPrecision = selected.removesuffix("-cascade")  # type: ignore[assignment]
        return EngineChoice(
            name=selected,
            precision=precision,
            backend=select_backend(model, preprocessing, precision, backends),
            device="cpu",
            threads=torch.get_num_threads(),
            batch_size=bench.batch_size if bench is not None else cache_batch_size(model.config),
            reason=reason,
            engine=engine,
        )

    if name != "auto":  # a backend that is gone is replaced
        backends = bench.backends if bench is not None else {}
        return choice(name, "requested", usable_backends(model, preprocessing, backends))
    if bench is None:
        backend: CpuBackend = throughput_backend(model, preprocessing) if throughput else "pytorch"
        library = "OpenVINO, " if backend == "openvino" else ""
        return choice("fp32", f"{library}no benchmark on this CPU; run vitral bench", {"fp32": backend})
    try:
        return choice(bench.engine, bench.reason, bench.backends)
    except VitralError as error:  # ranges were deleted, OpenVINO uninstalled, or this build of torch lacks an operator
        return choice("fp32", f"{bench.engine} was fastest, but {error.what}", {})


def usable_backends(
    model: ViT, preprocessing: Preprocessing, backends: Mapping[str, CpuBackend]
) -> dict[str, CpuBackend]:
    """Those backends that support their precision here."""
    precisions: Mapping[CpuPrecision, CpuBackend] = backends  # type: ignore[assignment]
    return {
        precision: backend
        for precision, backend in precisions.items()
        if backend_unsupported_reason(backend, model, preprocessing, precision) is None
    }


def build_engine(
    model: ViT,
    preprocessing: Preprocessing,
    name: str,
    folder: Path | None,
    bench: BenchResult | None,
    backends: Mapping[str, CpuBackend],
) -> PrecisionEngine | CascadeEngine:
    """Build the CPU engine with this name, or raise a VitralError that names what is missing."""

    def build(precision: CpuPrecision) -> PrecisionEngine:
        backend = select_backend(model, preprocessing, precision, backends)
        ranges = load_activation_ranges(folder) if precision == "int8" and folder is not None else None
        is_supported = backend_unsupported_reason(backend, model, preprocessing, precision) is None
        if precision == "int8" and ranges is None and is_supported:
            message = "int8 engine unavailable: its activation ranges have not been measured"
            raise VitralError(message, bench_hint(folder))
        return build_precision_engine(model, preprocessing, precision, ranges, backend)

    precision: CpuPrecision = name.removesuffix("-cascade")  # type: ignore[assignment]
    fast = build(precision)
    if name == precision:
        return fast
    margins = bench.margins if bench is not None else {}
    if precision not in margins:
        raise VitralError(f"{name} engine unavailable: no benchmark on this CPU", bench_hint(folder))
    accurate: PrecisionEngine | CascadeEngine = build("fp32")
    if precision == "int8" and "bf16" in margins:
        accurate = CascadeEngine(build("bf16"), accurate, margins["bf16"])
    return CascadeEngine(fast, accurate, margins[precision])


def check_threads(counts: Iterable[int]) -> None:
    """Refuse thread counts far above the number of CPUs: they are not faster, and starting them can hang."""
    limit = max(64, 2 * available_cpus())
    for threads in counts:
        if not 1 <= threads <= limit:
            raise VitralError(
                f"expected threads between 1 and {limit}, got {threads}", f"This machine has {available_cpus()} CPUs"
            )
