"""Memory helpers on a CPU; their GPU behaviour is covered by the GPU tests."""

from __future__ import annotations

import math

import torch

from vitral.device.memory import dataset_budget_bytes, defragment, gpu_memory_bytes, to_pinned_cpu

CPU = torch.device("cpu")


def test_defragment_preserves_values_and_requires_grad() -> None:
    layer, tensor = torch.nn.Linear(3, 4), torch.arange(5.0)
    expected = [t.detach().clone() for t in (*layer.parameters(), tensor)]
    defragment([*layer.parameters(), tensor], CPU)
    assert all(map(torch.equal, (*layer.parameters(), tensor), expected))
    assert layer.weight.requires_grad


def test_cpu_has_no_memory_limit_and_needs_no_copy() -> None:
    tensor = torch.arange(5)
    assert to_pinned_cpu(tensor) is tensor
    assert dataset_budget_bytes(CPU) == math.inf
    assert gpu_memory_bytes(CPU) is None
