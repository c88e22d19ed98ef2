"""Output options shared by all benchmarks: a CSV file with one row per measurement, and a JSON file with everything.

`--save` adds the CSV to benchmarks/results/ under a name that states benchmark, hardware, dtype, versions and date,
such as gpu_throughput-h200-torch2.11-timm1.0.29-2026-11-16.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--csv", type=Path, metavar="PATH", help="write one row per measurement")
    group.add_argument("--json", type=Path, metavar="PATH", help="write all measurements and the environment")
    group.add_argument("--save", action="store_true", help=f"write the CSV file to {RESULTS.parent.name}/results/")


def write_results(
    args: argparse.Namespace,
    rows: Sequence[Row],
    details: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    packages: Sequence[str] = ("torch",),
) -> None:
    """Write the requested files. May be called after every measurement: files are replaced."""
    benchmark = Path(sys.argv[0]).stem
    content = {"benchmark": benchmark, "environment": environment(packages), **(details or {}), "rows": list(rows)}
    if args.json is not None:
        _replace(args.json, json.dumps(content, indent=1) + "\n")
    paths = [args.csv] if args.csv is not None else []
    if args.save:
        paths.append(RESULTS / result_name(benchmark, hardware_slug(), dtype, packages))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, to_csv(rows))


def to_csv(rows: Sequence[Row]) -> str:
    """One column per key, in order of first occurrence. Floats keep 6 significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return text.getvalue()


def result_name(benchmark: str, hardware: str, dtype: str | None, packages: Sequence[str]) -> str:
    """benchmark-hardware[-dtype]-versions-date.csv"""
    versions = [f"{name}{version}" for name, version in package_versions(packages).items()]
    parts = [benchmark, hardware, *([dtype] if dtype else []), *versions, time.strftime("%Y-%m-%d")]
    return "-".join(parts) + ".csv"


def environment(packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """Command, date, hardware and versions, for the header of a result."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu_name(),
        "cpu": _cpu_model(),
        "cpus": _num_cpus(),
        "python": platform.python_version(),
        "versions": package_versions(packages, full=True),
    }


def package_versions(packages: Sequence[str], full: bool = False) -> dict[str, str]:
    """Installed versions; without `full`, torch and triton are cut to major.minor, as in file names."""
    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name).partition("+")[0]
            short = name in ("torch", "triton", "torchvision", "onnxruntime", "pillow")
            versions[name] = version if full or not short else ".".join(version.split(".")[:2])
    return versions


def hardware_slug() -> str:
    """ "h200" for a GPU, "epyc9004-2cores" for a CPU."""
    if (gpu := gpu_name()) is not None:
        words = [word for word in re.findall(r"[a-z0-9]+", gpu.lower()) if word not in ("nvidia", "tesla", "geforce")]
        return "-".join(words[:2] if words[0] == "rtx" else words[:1])
    words = re.findall(r"[a-z0-9]+", re.sub(r"\d+-core", "", _cpu_model().lower().partition("@")[0]))
    skipped = ("amd", "intel", "r", "tm", "cpu", "processor", "core", "cores", "with")
    model = "".join(word for word in words if word not in skipped)
    return f"{model or platform.machine()}-{_num_cpus()}cores"


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _num_cpus() -> int:
    from vitral.device.cpu import available_cpus

    return available_cpus()


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
