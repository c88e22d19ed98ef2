"""CUDA graphs: a training step or a forward pass captured once and replayed with a single launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from vitral.distributed.world import communication_backend


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


def collective_capture_failure(device: torch.device, world_size: int) -> str | None:
    """Why a CUDA graph with a collective in it does not work here, or None. All ranks must call this."""
    if (backend := communication_backend(device)) != "nccl":
        return f"{backend} collectives cannot be captured"
    try:
        ones = torch.ones(64, device=device)
        dist.all_reduce(ones.clone())  # creates the communicator, which must not be captured
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(graph, capture_error_mode=capture_error_mode()):
            total = ones.clone()
            work = dist.all_reduce(total, async_op=True)
            work.wait()
        ones.fill_(2)
        graph.replay()
        is_correct = bool((total == 2 * world_size).all())
    except RuntimeError as error:
        return f"capturing a collective failed: {str(error).splitlines()[0]}"
    return None if is_correct else "a captured collective returned a wrong result"


class GraphPool:
    """A memory pool and a stream shared by graphs that never run at the same time.

    Libraries keep a workspace per stream, so all graphs of a pool are captured on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


def capture_forward(
    function: Callable[[Tensor], Tensor], example: Tensor, pool: GraphPool
) -> Callable[[Tensor], Tensor]:
    """Capture a function of tensors with the shape of `example` as a CUDA graph; on a CPU, return it unchanged.

    `example` becomes the graph's static input, so calls must not overlap, including calls to other graphs of `pool`.
    """
    if example.device.type != "cuda":
        return function
    current = torch.cuda.current_stream(example.device)
    pool.stream.wait_stream(current)
    with torch.cuda.stream(pool.stream):
        for _ in range(3):  # one-time initialisation must not be captured
            function(example)
    current.wait_stream(pool.stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads may allocate pinned memory during the capture (see to_pinned_cpu).
    with (
        no_garbage_collection(),
        torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"),
    ):
        output = function(example)

    def replay(tensor: Tensor) -> Tensor:
        example.copy_(tensor)
        graph.replay()
        return output.clone()

    return replay
