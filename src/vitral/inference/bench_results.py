"""Benchmark results of a model, stored next to its weights, per CPU and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitral import bundled
from vitral.device.cpu import cpu_name
from vitral.device.select import Hardware
from vitral.errors import VitralError, shell_quote
from vitral.inference.cpu_backends import CpuBackend
from vitral.inference.int8_calibration import FILE_NAME as ACTIVATION_RANGES_FILE_NAME
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.serialization import from_dict, to_dict

FILE_NAME = "bench.json"
CPU_BATCH_SIZE = 16  # without a benchmark: large enough for the GEMMs, small enough for the caches


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
    atomic_write(folder / FILE_NAME, dump_json(to_dict(results), indent=1) + "\n")


def bench_hint(folder: Path | None) -> str:
    return f"Measure it with: vitral bench {'RUN' if folder is None else shell_quote(bundled.display_name(folder))}"
