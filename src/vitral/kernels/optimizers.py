"""Fused kernels for Muon and AdamW, on every NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from vitral.device.select import Hardware
from vitral.kernels.adamw import op as adamw_op
from vitral.kernels.muon import op as muon_op
from vitral.kernels.precompile import precompile
from vitral.kernels.self_check import max_relative_error, self_check_failure
from vitral.utils.progress import LogFn, no_log

OPTIMIZER_KERNELS: dict[str, tuple[Any, float]] = {  # module and tolerance
    "muon": (muon_op, 0.1),  # bf16 Newton-Schulz iterations amplify rounding
    "adamw": (adamw_op, 1e-4),
}


class KernelOptimizer(Protocol):
    """An optimizer that can use fused kernels: Muon and AdamW of vitral.training.optim."""

    kernel_name: ClassVar[str]
    kernels: Any

    def kernel_check(self, kernels: Any, device: torch.device) -> tuple[Tensor, Tensor]: ...

    def launch_kernels(self, kernels: Any) -> None: ...


class OptimizerKernels:
    """Gives the optimizers of a run their kernels before the first update, after comparing each with the reference.

    overlap_muon: let Muon start before the backward pass ends, in captured steps.
    overrides: receives the names of the kernels in use.
    """

    def __init__(self, hardware: Hardware, *, overlap_muon: bool, overrides: set[str], log: LogFn = no_log) -> None:
        self.device, self.world, self.log, self.overrides = hardware.device, hardware.world, log, overrides
        self.overlap_muon = overlap_muon and hardware.cuda_graphs
        self.is_prepared = False

    def prepare(self, optimizers: Sequence[Any]) -> None:
        """Call this on all ranks after the first backward pass: the kernels are compiled for the gradients."""
        if self.is_prepared:
            return
        self.is_prepared = True
        for optimizer in optimizers:
            if hasattr(optimizer, "kernel_name"):
                self._enable(optimizer)
            if self.overlap_muon and hasattr(optimizer, "overlap_with_backward"):
                optimizer.overlap_with_backward()

    def _enable(self, optimizer: KernelOptimizer) -> None:
        kernels, tolerance = OPTIMIZER_KERNELS[optimizer.kernel_name]

        def dry_run() -> None:
            optimizer.kernel_check(kernels, self.device)
            optimizer.launch_kernels(kernels)

        def error() -> float:
            fused, reference = optimizer.kernel_check(kernels, self.device)
            return max_relative_error([fused], [reference])

        precompile(dry_run)
        if (reason := self.world.first_reason(self_check_failure(error, tolerance))) is not None:
            self.log(f"{optimizer.kernel_name} in PyTorch: {reason}")
        else:
            self.overrides.add(optimizer.kernel_name)
            optimizer.kernels = kernels
