"""Device, number type, compilation, processes: what this machine offers, what is used of it, and why.

The only file that says "cuda". Models, data and the training loop are handed a `Hardware` and ask nothing themselves.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitral.distributed.world import ALONE, World, from_environment, join
from vitral.errors import VitralError

T = TypeVar("T")
Device = Literal["auto", "cpu", "gpu"]
Precision = Literal["auto", "fp32", "bf16", "fp8"]
Compile = Literal["auto", "yes", "no"]

# On a CPU with bf16 instructions, conversions cost more than the faster products save below this width: fp32 was 2.6
# times faster at width 64, equal at 192, and 1.7 times slower at 384 (AMD EPYC 9004, two cores, torch 2.13).
WIDTH_WORTH_BF16 = 192

# On an H200 FP8 trained 1.26 times as fast as bf16 at width 768, 1.28 times at 1024, 1.09 times at 384; at 192, with
# earlier kernels, 0.96 times. That it learns as much was shown for 768 (docs/results.md).
WIDTH_WORTH_FP8 = 512

# Compiling costs about a minute; a training shorter than this many steps does not earn it back.
STEPS_WORTH_COMPILING = 3000


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a run computes on. `reasons` says why, one sentence a choice."""

    device: torch.device
    precision: Literal["fp32", "bf16"]
    compile: bool
    reasons: dict[str, str]
    graph: bool = False  # whether a training step is recorded once and then replayed
    fused: bool = (
        False  # whether the encoder's blocks are computed with kernels of our own (vitral.kernels.fused_model)
    )
    fp8: bool = False  # whether these multiply large matrices as 8-bit numbers; `precision` is bf16 then
    yields: bool = False  # FP8, where its kernels cannot be used, to bf16: nobody asked for it
    world: World = ALONE  # the processes that work together; it has a reason only where there are several

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 where it is safe, fp32 where it is not (weights, norms, softmax, loss)."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function) if self.compile else function

    def forward(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The model for training. On a GPU in bf16 all of it is computed in bf16, from weights that stay in fp32:
        a rounded copy is made in each step, and gradients reach the weights in fp32. Half the bytes of autocast's
        fp32 norms and residuals."""
        if not (self.graph and self.precision == "bf16"):
            return self.compiled(model)

        def forward(images_BCHW: Tensor) -> Tensor:
            rounded = {name: tensor.bfloat16() for name, tensor in model.named_parameters()}
            rounded |= {name: t.bfloat16() for name, t in model.named_buffers() if name.endswith("embedding.table")}
            return functional_call(model, rounded, (images_BCHW.bfloat16(),))

        return self.compiled(forward)

    def recorded(self, step: Callable[..., None], generator: torch.Generator) -> Callable[..., None]:
        """The step, or one that is recorded and then replayed. It takes tensors, and draws from `generator`."""
        return Replayed(step, generator) if self.graph else step

    def synchronize(self) -> None:
        """Wait for the device, before a clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fetched(self, tensor: Tensor) -> Tensor:
        """On the CPU, when it is there: a GPU writes to memory that cannot move several times as fast as to other."""
        if tensor.device.type != "cuda":
            return tensor.cpu()
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return here

    def without_fp8(self, reason: str) -> Hardware:
        reasons = self.reasons | {"precision": f"without products in FP8: {reason}"}
        return replace(self, fp8=False, yields=False, reasons=reasons)

    def gather(self, tensors: Sequence[Tensor]) -> None:
        """Side by side in memory, by way of the computer's: a GPU's is given back in pieces, each as a whole, so that
        one tensor that stays would hold all that was let go of beside it."""
        copies = [tensor.data.cpu() for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data = copy.to(self.device)

    def room(self) -> float:
        """Bytes that a data set may take on the device: half of what is free. On a CPU it is read where it lies."""
        return torch.cuda.mem_get_info(self.device)[0] / 2 if self.device.type == "cuda" else torch.inf

    def replayed(
        self, function: Callable[[Tensor], Tensor], example: Tensor, shared: Shared
    ) -> Callable[[Tensor], Tensor]:
        """A function of tensors of one shape whose kernels are launched as one; on a CPU, the function itself.

        `example` becomes the place that it reads: one call at a time, also of others with the same `shared` memory.
        """
        if self.device.type != "cuda":
            return function
        shared.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(shared.stream):
            for _ in range(3):  # what is set up on a first call must not be recorded
                function(example)
        torch.cuda.current_stream(self.device).wait_stream(shared.stream)
        graph = torch.cuda.CUDAGraph()
        own = "thread_local"  # other threads may go on asking for memory, as `fetched` does
        with torch.cuda.graph(graph, pool=shared.handle, stream=shared.stream, capture_error_mode=own):
            answer = function(example)

        def replay(given: Tensor) -> Tensor:
            example.copy_(given)
            graph.replay()
            return answer.clone()

        return replay

    def random_state(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["gpu"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_random_state(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "gpu" in states:
            torch.cuda.set_rng_state(states["gpu"], self.device)

    @property
    def name(self) -> str:
        """For people: "2 cores" or the name of the GPU."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"{threads} core{'s' if threads != 1 else ''}"

    @property
    def memory(self) -> int | None:
        """Bytes of the GPU; None on a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else None

    def __str__(self) -> str:
        several = f"{self.world.size} × " if self.world.size > 1 else ""
        why = [self.reasons[name] for name in ("device", "world", "fused") if name in self.reasons]
        return f"{several}{self.name}, {self.precision} ({self.reasons['precision']}) · {' · '.join(why)}"


class Shared:
    """Memory on a GPU in which several recorded calls compute, never two at once. Libraries keep some for each stream,
    so they are recorded on one."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


class Replayed:
    """A training step as one CUDA graph: Python launches it once, not its thousand kernels one by one.

    The first calls are real steps too, in which libraries and compiler warm up; the next one is recorded and, like
    all that follow, replayed. Tensors that it is called with are copied to where the graph reads them.
    """

    WARM_UP = 3

    def __init__(self, step: Callable[..., None], generator: torch.Generator) -> None:
        self.step, self.generator, self.calls = step, generator, 0
        self.inputs: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if not self.inputs:
            self.inputs = tuple(tensor.clone() for tensor in tensors)
        if any(kept.shape != given.shape for kept, given in zip(self.inputs, tensors, strict=True)):
            self.step(*tensors)  # a batch of another size
            return
        for kept, given in zip(self.inputs, tensors, strict=True):
            kept.copy_(given)
        if self.calls < self.WARM_UP:
            self.calls += 1
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self.step(*self.inputs)
            torch.cuda.current_stream().wait_stream(beside)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)
            with torch.cuda.graph(self.graph):
                self.step(*self.inputs)
        self.graph.replay()


class Aside:
    """Work that a GPU does beside what it is asked for next, until somebody waits for it. On a CPU: at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, work: Callable[[], T], after: Moment | None = None) -> T:
        """When all is done that was asked for until now or, with `after`, until then."""
        if self.stream is None:
            return work()
        self.stream.wait_event((after or Moment()).event)
        with torch.cuda.stream(self.stream):
            return work()

    def wait(self) -> None:
        """What is asked for from now on comes after it; Python does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Moment:
    """On a GPU: when all is done that it was asked for until now."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()


@cache
def asides(device: torch.device, count: int) -> list[Aside]:
    return [Aside(device) for _ in range(count)]


class Staging:
    """Buffers of uint8 from which a GPU fetches batches by itself, beside what it computes; as many there as here.

    `here[place]` is written, sent, and not written again before `wait`; what `send` gives may be read until `used`.
    """

    def __init__(self, device: torch.device, shape: tuple[int, ...], count: int = 3) -> None:
        self.here = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self.there = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(count)]
        self.sent = [torch.cuda.Event(blocking=True) for _ in range(count)]
        self.read = [torch.cuda.Event() for _ in range(count)]
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # whose memory it was may still be at work

    def send(self, place: int) -> Tensor:
        """Begin to fetch; what the device is asked to do from now on waits for it, Python does not."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.read[place])
            self.there[place].copy_(self.here[place], non_blocking=True)
            self.sent[place].record()
        torch.cuda.current_stream(self.device).wait_event(self.sent[place])
        return self.there[place]

    def used(self, place: int) -> None:
        """All that reads this batch has been asked of the device."""
        self.read[place].record(torch.cuda.current_stream(self.device))

    def wait(self, place: int) -> int:
        """Until the batch has left this buffer."""
        self.sent[place].synchronize()
        return place


def choose(
    *,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = "auto",
    width: int | None = None,
    steps: int | None = None,
    scratch: bool = False,
) -> Hardware:
    """The fastest safe choice on this machine for a model of `width` and a run of `steps`, unless told otherwise;
    `scratch` says that the run is a training from scratch."""
    world = from_environment()
    chosen, why_device = _device(device, world)
    fp8 = precision == "fp8"
    if fp8:
        _check_fp8(chosen)
    number, why_precision = _precision(chosen, precision, width)
    compiled, why_compile = _compile(chosen, compile, steps)
    reasons = {"device": why_device, "precision": why_precision, "compile": why_compile}
    if world.size > 1:
        backend, reasons["world"] = _backend(chosen, world)
        join(world, backend)
    graph = chosen.type == "cuda" and compile != "no" and world.size == 1
    if graph:
        reasons["graph"] = "a step is one graph that the GPU replays without Python"
    fused = graph and number == "bf16" and find_spec("triton") is not None
    yields = fused and precision == "auto" and scratch and _is_worth_fp8(chosen, width)
    if yields:
        reasons["precision"] = "with large products in FP8: faster, and at width 768 it learned as much"
    if fused:
        reasons["fused"] = "one kernel for all that stands between two matrix products"
    elif fp8:
        raise VitralError(
            "FP8 is for one process with a GPU, PyTorch's Triton and --compile auto or yes", "--precision bf16, or auto"
        )
    return Hardware(
        device=chosen,
        precision=number,
        compile=compiled,
        reasons=reasons,
        graph=graph,
        fused=fused,
        fp8=fp8 or yields,
        yields=yields,
        world=world,
    )


def _is_worth_fp8(device: torch.device, width: int | None) -> bool:
    """Where it is faster by far; see WIDTH_WORTH_FP8."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return hopper and width is not None and width >= WIDTH_WORTH_FP8


def _check_fp8(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        what = "on a CPU" if device.type == "cpu" else f"on the {torch.cuda.get_device_name(device)}"
        raise VitralError(f"there are no FP8 units {what}", "--precision bf16, or auto")


def _backend(device: torch.device, world: World) -> tuple[str, str]:
    """Which library carries tensors between the processes. What lies on the CPU, flags and names, goes by gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return "cpu:gloo,cuda:nccl", f"{world.size} processes, which talk through nccl"
    return "gloo", f"{world.size} processes, which talk through gloo"


def _device(wish: Device, world: World = ALONE) -> tuple[torch.device, str]:
    available = torch.cuda.is_available()
    if wish == "gpu" and not available:
        raise VitralError("no GPU that PyTorch can use was found", "use --device cpu, or leave it at auto")
    if wish == "cpu":
        return torch.device("cpu"), "on the CPU, as asked"
    if available:
        if world.size > 1 and world.local_rank >= (count := torch.cuda.device_count()):
            raise VitralError(
                f"process {world.local_rank} on this machine has no GPU of its own: PyTorch sees {count}",
                f"torchrun --nproc-per-node {count} …",
            )
        return torch.device("cuda", world.local_rank), "GPU found"
    return torch.device("cpu"), "no GPU found, computing on the CPU"


def _precision(device: torch.device, wish: Precision, width: int | None) -> tuple[Literal["fp32", "bf16"], str]:
    if wish == "fp8":
        return "bf16", "with large products in FP8, as asked"
    if wish != "auto":
        return wish, "as asked"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "the GPU has bf16 units"
        return "fp32", "the GPU has no bf16 units"
    if not cpu_has_bf16():
        return "fp32", "the CPU has no bf16 instructions"
    if width is not None and not bf16_is_faster(device, width):
        return "fp32", f"at width {width} a CPU is faster in fp32"
    return "bf16", "the CPU has bf16 instructions"


def bf16_is_faster(device: torch.device, width: int) -> bool:
    """For products of matrices with this many columns."""
    return device.type == "cuda" or (width >= WIDTH_WORTH_BF16 and cpu_has_bf16())


def runs_triton(device: torch.device) -> bool:
    """Whether kernels of our own can be launched there: on the GPU that this process works with."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return device.index in (None, torch.cuda.current_device())


@cache
def cpu_has_bf16() -> bool:
    """AVX-512-BF16 or AMX: without them bf16 on a CPU is emulated, and slower than fp32."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


@cache
def cpu_has_int8() -> bool:
    """AVX-512-VNNI or AMX: without them 8-bit products are slower, and on older CPUs they overflow."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has = any(capabilities.get(name, False) for name in ("avx512_vnni", "amx_int8"))
    return has and hasattr(torch.ops.onednn, "qlinear_pointwise")


@cache
def cpu_packs_matrices() -> bool:
    """oneDNN with the operators that PyTorch's own compiler calls for frozen models."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@cache
def cpu_name() -> str:
    """The CPU and what matters about it for speed: measurements on one are not applied on another."""
    said: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = said.get("model name") or platform.processor() or platform.machine()
    number = f" {said['cpu family']}/{said['model']}" if {"cpu family", "model"} <= said.keys() else ""
    return f"{model}{number}, {cores()} core{'s' if cores() != 1 else ''}"


def is_busy() -> str:
    """A sentence about other work on this machine; empty where there is little, or nobody can tell."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return (
        f"this machine is busy (load {load:.1f} on {cores()} cores): times will be too long" if load > cores() else ""
    )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(device: torch.device, wish: Compile, steps: int | None) -> tuple[bool, str]:
    if wish != "auto":
        return wish == "yes", "as asked"
    if device.type != "cuda":
        return False, "on a CPU compiling takes longer than it saves"
    if steps is not None and steps < STEPS_WORTH_COMPILING:
        return False, f"{steps} steps are too few to earn it back"
    return True, "the compiler's kernels"
