"""Which engine computes a model's logits, and why. Benchmark results are stored next to the weights, per device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitral import bundled
from vitral.data.lazy_images import Images
from vitral.data.preprocess import Preprocessing
from vitral.data.variable_images import MapFn, map_batches
from vitral.device.cpu import available_cpus, cpu_name
from vitral.device.select import CompileOption, Hardware, PrecisionOption, select_hardware
from vitral.errors import VitralError, shell_quote
from vitral.inference.cpu_backends import (
    CpuBackend,
    PrecisionEngine,
    backend_unsupported_reason,
    build_precision_engine,
    select_backend,
    throughput_backend,
)
from vitral.inference.cpu_engine import CpuPrecision, unsupported_reason
from vitral.inference.cuda_cascade import build_fp8_cascade
from vitral.inference.cuda_engine import CudaEngine
from vitral.inference.engine import CascadeEngine, Engine, ReferenceEngine
from vitral.inference.int8_calibration import FILE_NAME as ACTIVATION_RANGES_FILE_NAME
from vitral.inference.int8_calibration import load_activation_ranges
from vitral.inference.parallel_batches import cache_batch_size, parallel_map
from vitral.models.token_merging import TokenMergingViT
from vitral.models.vit import ViT
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.progress import ProgressFn, no_progress
from vitral.utils.serialization import from_dict, to_dict

FILE_NAME = "bench.json"
CUDA_BATCH_SIZE = 256
CPU_BATCH_SIZE = 16  # without a benchmark: large enough for the GEMMs, small enough for the caches
REFERENCE_BATCH_SIZE = 512
FEATURE_BATCH_SIZE = 64  # features are also needed of models much larger than those served

EngineName = Literal["auto", "reference", "fp32", "bf16", "int8", "bf16-cascade", "int8-cascade", "fp8", "fp8-cascade"]
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Speed of one engine with one number of threads and one batch size."""

    engine: str
    threads: int
    batch_size: int
    p50_ms: float  # latency of a batch
    p95_ms: float
    p99_ms: float
    images_per_second: float
    memory_mb: float  # encoder weights
    agreement: float  # share of images with the same top-1 label as fp32
    agreement_low: float  # 95% confidence interval
    agreement_high: float
    recheck_rate: float  # share of images that a cascade computes twice


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Result of `vitral bench` on one CPU or GPU."""

    cpu: str  # or the name of the GPU
    versions: str
    date: str
    images: int  # that the agreement was measured on
    calibration_images: int  # that int8 and the cascades were calibrated on, none of them measured on
    rows: tuple[BenchRow, ...]
    margins: dict[str, float] = field(default_factory=dict)  # of the cascades, by precision of the fast engine
    backends: dict[str, CpuBackend] = field(default_factory=dict)  # the faster one, by precision
    engine: str = "fp32"  # recommended
    threads: int = 1
    batch_size: int = CPU_BATCH_SIZE
    reason: str = ""


def load_bench_results(folder: Path) -> dict[str, BenchResult]:
    """Results by name of the CPU or GPU. A file that is unreadable or of another version counts as no results."""
    try:
        values = read_json(folder / FILE_NAME)
        results = {}
        for cpu, result in values.items():
            margins = {name: float(margin) for name, margin in result.pop("margins").items()}
            rows = tuple(from_dict(BenchRow, row) for row in result.pop("rows"))
            results[cpu] = BenchResult(rows=rows, margins=margins, **result)
        return results
    except (OSError, ValueError, AttributeError, KeyError, TypeError, VitralError):
        return {}


def save_bench_result(folder: Path, result: BenchResult) -> None:
    _write_bench_results(folder, load_bench_results(folder) | {result.cpu: result})


def benched_device(hardware: Hardware) -> str:
    """The name under which results of this CPU or GPU are stored."""
    return cpu_name() if hardware.device.type == "cpu" else hardware.name


def delete_bench_result(folder: Path, device_name: str) -> BenchResult | None:
    """Delete the result of a CPU or GPU and return it; with the last result also the activation ranges of int8."""
    results = load_bench_results(folder)
    result = results.pop(device_name, None)
    if results:
        _write_bench_results(folder, results)
    else:
        for name in (FILE_NAME, ACTIVATION_RANGES_FILE_NAME):
            (folder / name).unlink(missing_ok=True)
    return result


def _write_bench_results(folder: Path, results: Mapping[str, BenchResult]) -> None:
    values = {
        cpu: to_dict(each)
        | {"margins": each.margins, "backends": each.backends, "rows": [to_dict(row) for row in each.rows]}
        for cpu, each in results.items()
    }
    atomic_write(folder / FILE_NAME, dump_json(values, indent=1) + "\n")


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
            raise VitralError(message, _bench_hint(folder))
        return build_precision_engine(model, preprocessing, precision, ranges, backend)

    precision: CpuPrecision = name.removesuffix("-cascade")  # type: ignore[assignment]
    fast = build(precision)
    if name == precision:
        return fast
    margins = bench.margins if bench is not None else {}
    if precision not in margins:
        raise VitralError(f"{name} engine unavailable: no benchmark on this CPU", _bench_hint(folder))
    accurate: PrecisionEngine | CascadeEngine = build("fp32")
    if precision == "int8" and "bf16" in margins:
        accurate = CascadeEngine(build("bf16"), accurate, margins["bf16"])
    return CascadeEngine(fast, accurate, margins[precision])


def _bench_hint(folder: Path | None) -> str:
    return f"Measure it with: vitral bench {'RUN' if folder is None else shell_quote(bundled.display_name(folder))}"


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
        raise VitralError("fp8-cascade engine unavailable: no benchmark on this GPU", _bench_hint(folder))
    try:
        engine = build_fp8_cascade(model, preprocessing, hardware, bench.margins["fp8"])
        for part in (engine.fast, engine.accurate):
            warm_up(part, preprocessing, (1, 16))
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


def warm_up(engine: Engine, preprocessing: Preprocessing, batch_sizes: Iterable[int]) -> None:
    C, (H, W) = preprocessing.channels, preprocessing.image_size
    for batch_size in batch_sizes:
        engine(torch.zeros(batch_size, C, H, W, dtype=preprocessing.torch_dtype))


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
        warm_up(engine, preprocessing, (1, 16) if hardware.use_triton else (1,))
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


def check_threads(counts: Iterable[int]) -> None:
    """Refuse thread counts far above the number of CPUs: they are not faster, and starting them can hang."""
    limit = max(64, 2 * available_cpus())
    for threads in counts:
        if not 1 <= threads <= limit:
            raise VitralError(
                f"expected threads between 1 and {limit}, got {threads}", f"This machine has {available_cpus()} CPUs"
            )
