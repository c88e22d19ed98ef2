"""What the tests of Triton kernels share: they run on a CPU, in Triton's interpreter, and pretend that it is a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.device.hardware import Hardware
from vitral.models.vit import ViT, ViTConfig

pytest.importorskip("triton", reason="Triton comes with PyTorch's builds for GPUs, and with the dev extra on Linux")

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="in the interpreter, where there is no GPU; tests/test_gpu.py has one",
)


def a_gpu(**changes: Any) -> Hardware:
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}
    settings: dict[str, Any] = {"precision": "bf16", "compile": False, "fused": True} | changes
    return Hardware(device=torch.device("cpu"), reasons=reasons, **settings)


def a_model(image: int, **changes: Any) -> tuple[ViT, Tensor]:
    """And tokens for it."""
    settings = {"image_size": (image, image), "patch_size": 4, "classes": 2, "width": 48, "heads": 2, "mlp_width": 64}
    torch.manual_seed(0)
    model = ViT(ViTConfig(**settings | {"depth": 1} | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, model.embed(torch.randn(2, 3, image, image), model.config.grid).detach()


def products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Products of FP8 need a GPU: here they are of the same numbers in fp32. Which of them there were."""
    seen: list[tuple[int, ...]] = []

    def scaled(x: Any, w: Any, bias: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Any]:
        seen.append((*x.numbers.shape, len(w.numbers)))
        product = (x.numbers.float() * x.scales) @ (w.numbers.float() * w.scales).t()
        product = product if bias is None else product + bias
        return product if out is None else out.copy_(product), (x.norms, w.norms)

    def by_columns(dy: Tensor, x: Tensor, scale_dy: Tensor, scale_x: Tensor) -> Tensor:
        seen.append((len(dy), dy.shape[1], len(x)))
        assert not any(scale.data_ptr() % 16 for scale in (scale_dy, scale_x)), "as GPUs' products read them"
        return (dy.float() * scale_dy) @ (x.float() * scale_x).t()

    monkeypatch.setattr("vitral.kernels.linear.scaled", scaled)
    monkeypatch.setattr("vitral.kernels.fp8_wgrad.op.product", by_columns)
    return seen
