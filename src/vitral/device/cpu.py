"""CPUs: the number available to this process, their instruction sets and their current load."""

from __future__ import annotations

import contextlib
import os
import platform
from functools import cache
from pathlib import Path

from vitral.utils.text import count_text

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_cpus(cgroup_root: Path = CGROUP_ROOT) -> int:
    """CPUs this process may use: the smaller of its affinity mask and its cgroup's CPU quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup_root)
    return affinity if quota is None else min(affinity, max(round(quota), 1))


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the cgroup grants, from v2's cpu.max or v1's cfs files; None if it sets no limit."""
    with contextlib.suppress(OSError, ValueError):  # v2: "<quota> <period>" in µs, or "max <period>"
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):  # v1: a quota of -1 means unlimited
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    return None


@cache
def cpu_has_bf16() -> bool:
    """Whether the CPU has AVX-512-BF16 or AMX. Without them, bf16 is emulated and slower than fp32."""
    return _has_instructions("avx512_bf16", "amx_bf16")


@cache
def cpu_has_int8() -> bool:
    """Whether the CPU has AVX-512-VNNI or AMX. Without them, int8 GEMMs are slower and may overflow on older CPUs."""
    import torch

    return _has_instructions("avx512_vnni", "amx_int8") and hasattr(torch.ops.onednn, "qlinear_pointwise")


@cache
def cpu_has_packed_linear() -> bool:
    """Whether oneDNN offers the prepacked linear operators that torch.compile uses for frozen models."""
    import torch

    operators = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operators)


def _has_instructions(*names: str) -> bool:
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in names)


@cache
def cpu_name() -> str:
    """Model, family and number of CPUs. Benchmark results are only reused on a CPU of the same name."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = fields.get("model name") or platform.processor() or platform.machine()
    family = f" {fields['cpu family']}/{fields['model']}" if {"cpu family", "model"} <= fields.keys() else ""
    cpus = available_cpus()
    return f"{model}{family}, {count_text(cpus, 'core')}"


def busy_warning() -> str | None:
    """A warning if the load average exceeds the CPUs available to this process; None otherwise or if unknown."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cpus = available_cpus()
    return f"this machine is busy (load {load:.1f} on {cpus} cores); timings will be too long" if load > cpus else None
