"""CUDA graphs: a training step or a forward pass captured once and replayed with a single launch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from vitral.distributed.world import World, communication_backend
from vitral.errors import VitralError

REPLAY_SECONDS = 60.0  # for a small all-reduce; a longer one waits for a rank that does not take part


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside the block: destroying another CUDA graph invalidates a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphedStep:
    """A training step that is captured as CUDA graphs and replayed, which removes the launch overhead of Python.

    There is one graph per batch shape, up to `MAX_SHAPES`; batches of further shapes run eagerly. The graphs share a
    memory pool, because nothing that a step allocates outlives it.
    """

    MAX_SHAPES = 2 * 9  # native resizing: two batch sizes in each bucket

    def __init__(self, step: Callable[..., None], generator: torch.Generator) -> None:
        self.step, self.generator = step, generator
        self.shapes: dict[tuple[torch.Size, ...], _ShapeGraph] = {}

    def __call__(self, *tensors: Tensor) -> None:
        shapes = tuple(tensor.shape for tensor in tensors)
        graph = self.shapes.get(shapes)
        if graph is None:
            if len(self.shapes) == self.MAX_SHAPES:
                self.step(*tensors)
                return
            first = next(iter(self.shapes.values()), None)
            graph = self.shapes[shapes] = _ShapeGraph(self.step, self.generator, tensors, first)
        graph(*tensors)


class _ShapeGraph:
    """A step on batches of one shape.

    The first `WARM_UP` calls run eagerly (they are real steps) while libraries and the compiler initialise. The next
    call captures the step; it and all later calls replay the graph. Arguments are copied into the captured inputs.
    """

    WARM_UP = 3

    def __init__(
        self,
        step: Callable[..., None],
        generator: torch.Generator,
        tensors: tuple[Tensor, ...],
        shares_pool_with: _ShapeGraph | None,
    ) -> None:
        self.step, self.generator, self.calls = step, generator, 0
        self.inputs = tuple(tensor.clone() for tensor in tensors)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.pool_owner = shares_pool_with

    def __call__(self, *tensors: Tensor) -> None:
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        if self.calls < self.WARM_UP:
            self._warm_up()
            return
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            owner = None if self.pool_owner is None else self.pool_owner.graph
            pool = None if owner is None else owner.pool()
            with no_garbage_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode=capture_error_mode()):
                self.step(*self.inputs)
            self.graph = graph
        self.graph.replay()

    def _warm_up(self) -> None:
        """Run one step on a side stream, as capture requires."""
        self.calls += 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)


def capture_error_mode() -> str:
    """Whether all threads or only this one must not synchronise with the GPU during a capture: NCCL's watchdog does."""
    return "thread_local" if dist.is_initialized() else "global"


def collective_capture_failure(device: torch.device, world: World) -> str | None:
    """Why a CUDA graph with a collective in it does not work on some rank, or None. All ranks must call this."""
    if (backend := communication_backend(device)) != "nccl":
        return f"{backend} collectives cannot be captured"
    dist.all_reduce(torch.ones(64, device=device))  # creates the communicator, which must not be captured
    torch.cuda.synchronize(device)
    return check_collective_capture(world, partial(_capture_all_reduce, device, world.size))


def check_collective_capture(world: World, capture: Callable[[], Callable[[], bool]]) -> str | None:
    """The first rank's reason against capturing collectives, or None. All ranks must call this.

    `capture` captures a collective and returns a function that replays it and returns whether its result is correct.
    It is replayed only if all ranks have captured it: a rank would wait for the others without an end. If a replay
    fails on any rank, all raise VitralError, because the collective may block the devices of the others.
    """
    replay, failure, is_correct = None, None, False
    try:
        replay = capture()
    except RuntimeError as error:
        failure = f"capturing a collective failed: {_first_line(error)}"
    if (reason := world.first_reason(failure)) is not None or replay is None:
        return reason
    try:
        is_correct = replay()
    except (RuntimeError, TimeoutError) as error:
        failure = f"replaying a captured collective failed on rank {world.rank}: {_first_line(error)}"
    if (reason := world.first_reason(failure)) is not None:
        raise VitralError(reason, "Train without CUDA graphs: --compile no")
    return world.first_reason(None if is_correct else "a captured collective returned a wrong result")


def _capture_all_reduce(device: torch.device, world_size: int) -> Callable[[], bool]:
    ones = torch.ones(64, device=device)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph, capture_error_mode=capture_error_mode()):
        total = ones.clone()
        work = dist.all_reduce(total, async_op=True)
        work.wait()

    def replay() -> bool:
        ones.fill_(2)
        graph.replay()
        finished = torch.cuda.Event()
        finished.record()
        wait_until(finished.query, REPLAY_SECONDS)
        return bool((total == 2 * world_size).all())

    return replay


def wait_until(is_finished: Callable[[], bool], seconds: float) -> None:
    """Poll until `is_finished`. Raises TimeoutError after this time; NCCL has no time limit for captured work."""
    deadline = time.monotonic() + seconds
    while not is_finished():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not finished after {seconds:g} s")
        time.sleep(0.001)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class GraphPool:
    """A memory pool and a stream shared by graphs that never run at the same time.

    Libraries keep a workspace per stream, so all graphs of a pool are captured on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


def capture_forward(
    function: Callable[[Tensor], Tensor], example: Tensor, pool: GraphPool, to_host: bool = False
) -> Callable[[Tensor], Tensor]:
    """Capture a function of tensors with the shape of `example` as a CUDA graph; on a CPU, return it unchanged.

    `example` becomes the graph's static input, so calls must not overlap, including calls to other graphs of `pool`.
    With `to_host`, the graph also copies the result to the host, and a call waits for it.
    """
    if example.device.type != "cuda":
        return function
    current = torch.cuda.current_stream(example.device)
    pool.stream.wait_stream(current)
    with torch.cuda.stream(pool.stream):
        for _ in range(3):  # one-time initialisation must not be captured
            output = function(example)
    current.wait_stream(pool.stream)
    pinned = torch.empty(output.shape, dtype=output.dtype, pin_memory=True) if to_host else None
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads may allocate pinned memory during the capture (see to_pinned_cpu).
    with (
        no_garbage_collection(),
        torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"),
    ):
        output = function(example)
        if pinned is not None:
            pinned.copy_(output, non_blocking=True)

    def replay(tensor: Tensor) -> Tensor:
        with torch.inference_mode():  # the capture may have been in this mode, whose tensors change in it only
            example.copy_(tensor)
        graph.replay()
        if pinned is None:
            return output.clone()
        torch.cuda.current_stream(tensor.device).synchronize()
        return pinned.clone()

    return replay
