"""Select device, precision and compilation for a run, with the reason for each choice.

`select_hardware` has no side effects; with several processes, `vitral.distributed.world.init_distributed` joins them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

from vitral.device.cpu import available_cpus, cpu_has_bf16
from vitral.device.cpu_attention import bf16_autocast
from vitral.device.cuda_graphs import GraphedStep
from vitral.device.memory import gpu_memory_bytes
from vitral.distributed.world import SINGLE_PROCESS, World, world_from_env
from vitral.errors import VitralError
from vitral.utils.progress import LogFn, no_log
from vitral.utils.text import count_text

DeviceOption = Literal["auto", "cpu", "gpu", "cuda"]  # cuda: the same as gpu
PrecisionOption = Literal["auto", "fp32", "bf16", "fp8"]
CompileOption = Literal["auto", "yes", "no"]

# On a CPU with bf16 instructions, conversions cost more than the faster GEMMs save below this width: fp32 was 2.6x
# faster at width 64, equal at 192, and 1.7x slower at 384 (AMD EPYC 9004, two cores, torch 2.13).
MIN_WIDTH_BF16 = 192

# FP8 against bf16 in training on an H200, by tokens·width²: width 384: 0.86x at 0.9e9, 1.03x at 3.7e9, 1.09x at 15e9;
# width 768: 0.99x at 3.7e9, 1.24x at 15e9, 1.26x at 30e9; width 1024: 1.28x at 26e9; width 192, with earlier kernels:
# 0.96x at 7.4e9. docs/explanation/results/fp8.md compares the learning curves.
MIN_WIDTH_FP8, MIN_GEMM_SIZE_FP8 = 384, 7e9

# Compilation takes about a minute, more than it saves in a shorter run.
MIN_STEPS_TO_COMPILE = 3000


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a run computes on. `reasons` explains each choice in one phrase."""

    device: torch.device
    precision: Literal["fp32", "bf16"]
    compile: bool
    reasons: dict[str, str]
    cuda_graphs: bool = False  # capture the training step once and replay it
    use_triton: bool = False  # compute the encoder with the fused kernels of vitral.kernels
    fp8: bool = False  # run large GEMMs in FP8; `precision` is then bf16
    fp8_is_auto: bool = False  # FP8 was selected automatically; fall back to bf16 if it is unavailable
    world: World = SINGLE_PROCESS

    def autocast(self) -> AbstractContextManager[object]:
        """Autocast to bf16 if `precision` is bf16: weights, norms and loss stay in fp32."""
        is_eager_bf16 = self.precision == "bf16" and not self.compile and not self.use_triton
        if self.device.type == "cpu" and is_eager_bf16 and cpu_has_bf16():
            return bf16_autocast()
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def maybe_compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function) if self.compile else function

    def capture_step(self, step: Callable[..., None], generator: torch.Generator) -> Callable[..., None]:
        """The step as a replayed CUDA graph if `cuda_graphs` is set. It takes tensors and draws from `generator`."""
        return GraphedStep(step, generator) if self.cuda_graphs else step

    def synchronize(self) -> None:
        """Wait for the device, for example before reading a clock."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def without_fp8(self, reason: str) -> Hardware:
        """The same hardware with bf16 instead of FP8 GEMMs."""
        return replace(
            self, fp8=False, fp8_is_auto=False, reasons=self.reasons | {"precision": f"FP8 is unavailable: {reason}"}
        )

    def without_cuda_graphs(self, reason: str) -> Hardware:
        """The same hardware with every step launched kernel by kernel."""
        return replace(self, cuda_graphs=False, reasons=self.reasons | {"cuda_graphs": f"no CUDA graphs: {reason}"})

    def rng_state(self) -> dict[str, torch.Tensor]:
        """States of PyTorch's default generators."""
        states = {"cpu": torch.get_rng_state()}
        if self.is_gpu:
            states["gpu"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_rng_state(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self.is_gpu and "gpu" in states:
            torch.cuda.set_rng_state(states["gpu"], self.device)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """ "2 CPU cores", or the name of the GPU."""
        if self.is_gpu:
            return torch.cuda.get_device_name(self.device)
        cores = available_cpus()
        return count_text(cores, "CPU core")

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Total memory of the GPU; None on a CPU."""
        return gpu_memory_bytes(self.device)

    def __str__(self) -> str:
        count = f"{self.world.size} x " if self.world.size > 1 else ""
        reasons = [self.reasons[name] for name in ("device", "world", "triton") if name in self.reasons]
        threads = f", {self.reasons['threads']}" if "threads" in self.reasons else ""
        return f"{count}{self.name}{threads}, {self.precision} ({self.reasons['precision']}); {'; '.join(reasons)}"


def fallback_from_fp8(hardware: Hardware, reason: str, log: LogFn = no_log) -> Hardware:
    """The hardware without FP8 where FP8 was selected automatically; an error where the user requested it."""
    if not hardware.fp8:
        return hardware
    if not hardware.fp8_is_auto:
        raise VitralError(f"FP8 is unavailable: {reason}", "Use --precision bf16 or auto")
    log(f"using bf16 instead of FP8: {reason}")
    return hardware.without_fp8(reason)


def select_hardware(
    *,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    compile: CompileOption = "auto",
    width: int | None = None,
    steps: int | None = None,
    fp8_tokens: int = 0,
) -> Hardware:
    """The fastest safe choice for a model of this width and a run of this many steps; explicit options win.

    `fp8_tokens`: of all ranks in a step of a training that may select FP8 automatically; 0 if it may not.
    """
    world = world_from_env()
    torch_device, device_reason = _select_device(device, world)
    if precision == "fp8":
        _require_fp8(torch_device)
    dtype, precision_reason = _select_precision(torch_device, precision, width)
    compiled, compile_reason = _select_compile(torch_device, compile, steps)
    reasons = {"device": device_reason, "precision": precision_reason, "compile": compile_reason}
    if world.size > 1:
        reasons["world"] = f"{world.size} processes over {'nccl' if torch_device.type == 'cuda' else 'gloo'}"
    cuda_graphs = torch_device.type == "cuda" and compile != "no"
    if cuda_graphs:
        reasons["cuda_graphs"] = "each step is one replayed CUDA graph"
    use_triton = cuda_graphs and dtype == "bf16" and find_spec("triton") is not None
    if use_triton:
        reasons["triton"] = "fused Triton kernels"
    elif precision == "fp8":
        raise VitralError(
            "FP8 requires a GPU, Triton and --compile auto or yes",
            "Use --precision bf16 or auto",
        )
    fp8_is_auto = use_triton and precision == "auto" and _fp8_is_faster(torch_device, width, fp8_tokens // world.size)
    if fp8_is_auto:
        reasons["precision"] = "large GEMMs in FP8: faster, same learning curves"
    return Hardware(
        device=torch_device,
        precision=dtype,
        compile=compiled,
        reasons=reasons,
        cuda_graphs=cuda_graphs,
        use_triton=use_triton,
        fp8=precision == "fp8" or fp8_is_auto,
        fp8_is_auto=fp8_is_auto,
        world=world,
    )


def gpu_is_available() -> bool:
    return torch.cuda.is_available()


def _select_device(option: DeviceOption, world: World) -> tuple[torch.device, str]:
    if option not in get_args(DeviceOption):
        raise VitralError(
            f"no device named {option!r}; expected one of {', '.join(get_args(DeviceOption))}",
            "CUDA_VISIBLE_DEVICES=1 in front of the command selects the second GPU",
        )
    available = gpu_is_available()
    if option in ("gpu", "cuda") and not available:
        raise VitralError("no GPU found that PyTorch can use", "Use --device cpu or auto")
    if option == "cpu":
        return torch.device("cpu"), "--device cpu"
    if not available:
        return torch.device("cpu"), "no GPU found"
    if world.size > 1 and world.local_rank >= (count := torch.cuda.device_count()):
        raise VitralError(
            f"no GPU for local rank {world.local_rank}: PyTorch finds {count} on this machine",
            f"Start at most {count} processes per machine: torchrun --nproc-per-node {count} ...",
        )
    return torch.device("cuda", world.local_rank), "GPU found"


def _select_precision(
    device: torch.device, option: PrecisionOption, width: int | None
) -> tuple[Literal["fp32", "bf16"], str]:
    if option == "fp8":
        return "bf16", "large GEMMs in FP8, --precision fp8"
    if option != "auto":
        return option, f"--precision {option}"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "supported by the GPU"
        return "fp32", "the GPU does not support bf16"
    if not cpu_has_bf16():
        return "fp32", "the CPU has no bf16 instructions"
    if width is not None and not bf16_is_faster(device, width):
        return "fp32", f"faster than bf16 at width {width}"
    return "bf16", "the CPU has bf16 instructions"


def _select_compile(device: torch.device, option: CompileOption, steps: int | None) -> tuple[bool, str]:
    if option != "auto":
        return option == "yes", f"--compile {option}"
    if device.type != "cuda":
        return False, "compilation takes longer than it saves on a CPU"
    if steps is not None and steps < MIN_STEPS_TO_COMPILE:
        return False, f"{steps} steps are too few to amortise compilation"
    return True, "faster kernels from torch.compile"


def _require_fp8(device: torch.device) -> None:
    """FP8 tensor cores exist from compute capability 8.9 (Ada) on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        name = "a CPU" if device.type == "cpu" else f"the {torch.cuda.get_device_name(device)}"
        raise VitralError(f"FP8 is not supported on {name}", "Use --precision bf16 or auto")


def _fp8_is_faster(device: torch.device, width: int | None, tokens: int) -> bool:
    """On Hopper or newer, for large GEMMs; see MIN_GEMM_SIZE_FP8."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    is_large = width is not None and width >= MIN_WIDTH_FP8 and tokens * width**2 >= MIN_GEMM_SIZE_FP8
    return is_hopper and is_large


def bf16_is_faster(device: torch.device, width: int) -> bool:
    """Whether GEMMs of matrices with this many columns are faster in bf16 than in fp32."""
    return device.type == "cuda" or (width >= MIN_WIDTH_BF16 and cpu_has_bf16())


def can_run_triton(device: torch.device) -> bool:
    """Whether Triton kernels can be launched on this device, which must be the process's current GPU."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return device.index in (None, torch.cuda.current_device())
