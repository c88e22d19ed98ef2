"""Capturing CUDA graphs. The captures themselves are tested on a GPU (tests/kernels/test_gpu.py)."""

from __future__ import annotations

import gc
import weakref

import pytest

from vitral.device.cuda_graphs import no_garbage_collection


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_no_cycle_is_freed_inside_the_block() -> None:
    before = weakref.ref(Cycle())
    with no_garbage_collection():
        assert before() is None
        inside = weakref.ref(Cycle())
        for _ in range(10_000):
            Cycle()
        assert inside() is not None
    assert gc.isenabled()


def test_garbage_collection_is_enabled_again_after_an_error() -> None:
    with pytest.raises(RuntimeError), no_garbage_collection():
        raise RuntimeError("capture failed")
    assert gc.isenabled()
