"""Attention of 65 to 256 tokens in Triton's interpreter, in fp32, against PyTorch's own and its way back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton comes with PyTorch's builds for GPUs, and with the dev extra on Linux")

from vitral.fused import attend

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="in the interpreter, where there is no GPU; tests/test_gpu.py has one",
)

FORWARD: list[tuple[str, dict[str, Any]]] = [
    ("forward_loops", {"M": 64, "N": 64}),
    ("forward_loops", {"M": 128, "N": 32, "least_m": 64}),
    ("forward_kept", {"M": 64, "N": 64, "least_m": 64}),
]
BACKWARD: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("back_apart", {"M": 64, "N": 64}, {"M": 64, "N": 32, "least_m": 64}),
    ("back_loops", {"M": 64, "N": 32, "least_m": 64}, None),
    ("back_kept", {"M": 64, "N": 64}, None),
    ("back_once", {"M": 128, "N": 64}, None),
    ("back_parts", {"M": 128, "N": 64}, None),
]
LAUNCH = {"warps": 4, "stages": 2}


@pytest.mark.parametrize(("T", "d"), [(65, 32), (77, 64), (100, 24), (197, 64), (256, 32)])
def test_own_attention_is_attention(T: int, d: int) -> None:
    B, h = 1 if T > 100 else 2, 2
    torch.manual_seed(T)
    qkv, do = 1.5 * torch.randn(B * T, 3 * h * d), torch.randn(B * T, h * d)
    qkv[:T, : h * d] += 12 * torch.randn(1, h * d)  # far from zero: scores beyond what exp can hold
    wanted = qkv.clone().requires_grad_()
    q, k, v = wanted.view(B, T, 3, h, d).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * T, -1)
    (gradient,) = torch.autograd.grad(o, wanted, do)
    q, k, v = qkv.chunk(3, dim=1)
    for kind, how in FORWARD:
        got, lse = attend.forward(kind, q, k, v, h, T, how | LAUNCH)
        assert torch.allclose(got, o, atol=2e-5), (kind, how)
    for kind, how, other in BACKWARD:
        dqkv = attend.backward(kind, q, k, v, o.detach(), do, lse, h, T, how | LAUNCH, other and other | LAUNCH)
        assert (dqkv - gradient).abs().max() < 2e-5 * gradient.abs().max(), (kind, how)


def test_sums_over_rows_are_complete() -> None:
    x = torch.randn(37, 144)
    _, _, sums = attend.cast(x, False, rows=2, programs=3)
    assert torch.allclose(sums.sum(0), x.sum(0), atol=1e-5)
