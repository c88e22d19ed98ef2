"""Buckets of gradients: when each is reduced. How they are reduced is tested with two ranks (test_collectives.py)."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from vitral.distributed.gradients import GradientReducer, split_by_bytes


class RecordingBucket:
    """Notes when it is reduced, and with which gradients."""

    def __init__(self, name: str, parameters: list[Tensor], log: list[str]) -> None:
        self.name, self.parameters, self.log = name, parameters, log
        self.grads: list[Tensor | None] = []

    def start(self) -> None:
        self.log.append(f"start {self.name}")
        self.grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]

    def finish(self) -> None:
        self.log.append(f"finish {self.name}")


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))


def make_reducer(model: nn.Sequential, log: list[str]) -> tuple[GradientReducer, list[RecordingBucket]]:
    """One bucket per layer, in the order of the backward pass."""
    buckets = [RecordingBucket(str(i), list(model[i].parameters()), log) for i in (2, 1, 0)]
    return GradientReducer(buckets), buckets


def test_buckets_start_during_the_backward_pass_in_order(model: nn.Sequential) -> None:
    log: list[str] = []
    reducer, buckets = make_reducer(model, log)
    model[1].register_full_backward_hook(lambda *_: log.append("backward of layer 1"))
    with reducer.sync(is_last=True):
        model(torch.randn(2, 3)).sum().backward()
        log.append("backward ends")
    during, after = log[: log.index("backward ends")], log[log.index("backward ends") + 1 :]
    assert [entry for entry in during if entry.startswith("start")] == ["start 2", "start 1", "start 0"]
    assert during.index("start 2") < during.index("backward of layer 1") < during.index("start 0")
    assert after == ["finish 2", "finish 1", "finish 0"]
    for bucket in buckets:
        for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True):
            assert grad is not None
            assert torch.equal(grad, parameter.grad)  # type: ignore[arg-type]


def test_only_the_last_micro_batch_is_reduced_with_the_sum_of_all(model: nn.Sequential) -> None:
    log: list[str] = []
    reducer, buckets = make_reducer(model, log)
    first, second = torch.randn(2, 2, 3)
    with reducer.sync(is_last=False):
        model(first).sum().backward()
    assert log == []
    with reducer.sync(is_last=True):
        model(second).sum().backward()
    reduced = buckets[0].grads[0]
    model.zero_grad()
    model(torch.cat([first, second])).sum().backward()
    assert reduced is not None
    torch.testing.assert_close(reduced, model[2].weight.grad)


def test_a_gradient_reported_early_is_added_to_earlier_micro_batches(model: nn.Sequential) -> None:
    """As the fused encoder does: it passes gradients to the reducer instead of returning them to autograd."""
    log: list[str] = []
    reducer, buckets = make_reducer(model, log)
    weight, bias = model[2].parameters()
    weight.grad = torch.ones_like(weight)
    assert not reducer.is_active
    with reducer.sync(is_last=True):
        assert reducer.is_active
        reducer.collect(weight, 2 * torch.ones_like(weight))
        assert log == []
        reducer.collect(bias, torch.ones_like(bias))
        assert log == ["start 2"]
    assert torch.equal(buckets[0].grads[0], 3 * torch.ones_like(weight))
    assert log[1:3] == ["start 1", "start 0"], "ranks must agree on the collectives even if gradients are missing"
    assert buckets[1].grads == [None, None]


def test_an_error_in_the_backward_pass_starts_no_collective(model: nn.Sequential) -> None:
    log: list[str] = []
    reducer, _ = make_reducer(model, log)
    with pytest.raises(ZeroDivisionError), reducer.sync(is_last=True):
        raise ZeroDivisionError
    assert log == []
    assert not reducer.is_active


def test_a_discarded_reducer_is_freed_and_its_hooks_are_removed(model: nn.Sequential) -> None:
    log: list[str] = []
    reference = weakref.ref(make_reducer(model, log)[0])
    gc.collect()
    assert reference() is None
    model(torch.randn(2, 3)).sum().backward()
    assert log == []


def test_buckets_end_when_they_are_full() -> None:
    parameters = [torch.empty(n) for n in (10, 1, 9, 30, 2)]
    groups = split_by_bytes(parameters, itemsize=4, bucket_bytes=44)
    assert [[parameter.numel() for parameter in group] for group in groups] == [[10, 1], [9, 30], [2]]
