"""What the tests of Triton kernels share: they run on a CPU, in Triton's interpreter, and pretend that it is a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from vitral.hardware import Hardware

pytest.importorskip("triton", reason="Triton comes with PyTorch's builds for GPUs, and with the dev extra on Linux")

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="in the interpreter, where there is no GPU; tests/test_gpu.py has one",
)


def a_gpu(**changes: Any) -> Hardware:
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    settings: dict[str, Any] = {"precision": "bf16", "compile": False, "fused": True} | changes
    return Hardware(device=torch.device("cpu"), reasons=reasons, **settings)
