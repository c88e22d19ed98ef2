"""Attention in bf16 on a CPU, against PyTorch's fused kernel in fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.device import cpu_attention
from vitral.device.cpu_attention import MAX_TOKENS, bf16_autocast
from vitral.device.select import Hardware
from vitral.models.vit import ViT, ViTConfig
from vitral.training.activation_checkpointing import checkpoint_activations


def operands(tokens: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    qkv = torch.randn(3, 2, 3, tokens, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.requires_grad_() for part in qkv)
    return q, k, v


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def test_outputs_and_gradients_are_those_of_the_fused_kernel() -> None:
    results = []
    for context in (torch.autocast("cpu", enabled=False), bf16_autocast()):
        inputs = operands()
        with context:
            out = F.scaled_dot_product_attention(*inputs)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert results[1][0].dtype == torch.bfloat16
    for reference, value in zip(*results, strict=True):
        assert relative_error(value.float(), reference) < 0.02


@pytest.mark.parametrize(
    ("tokens", "options", "is_explicit"),
    [
        (50, {}, True),
        (50, {"dropout_p": 0.0}, True),
        (50, {"dropout_p": 0.1}, False),
        (50, {"is_causal": True}, False),
        (50, {"attn_mask": torch.ones(50, 50, dtype=torch.bool)}, False),
        (MAX_TOKENS + 1, {}, False),
    ],
)
def test_what_is_not_supported_is_left_to_pytorch(tokens: int, options: dict[str, Any], is_explicit: bool) -> None:
    with mock.patch.object(cpu_attention, "explicit_attention", wraps=cpu_attention.explicit_attention) as explicit:
        with bf16_autocast():
            F.scaled_dot_product_attention(*operands(tokens), **options)
        assert explicit.called == is_explicit
        F.scaled_dot_product_attention(*operands())  # after the context, it is PyTorch's again
        assert explicit.call_count == int(is_explicit)


@pytest.mark.parametrize("context", [bf16_autocast, lambda: torch.autocast("cpu", enabled=False)])
def test_activation_checkpointing_recomputes_the_same_attention(
    context: Callable[[], AbstractContextManager[object]],
) -> None:
    config = ViTConfig(image_size=(16, 16), patch_size=4, channels=1, num_classes=3, width=32, depth=2, heads=2)
    gradients = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = ViT(config)
        torch.nn.init.normal_(model.get_parameter("head.out.weight"))
        if checkpoints:
            checkpoint_activations(model)
        with context():
            loss = model(torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))).square().sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_hardware_uses_it_in_bf16_only(cpu: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.device.select.cpu_has_bf16", lambda: True)
    for hardware, calls in ((replace(cpu, precision="fp32"), 0), (replace(cpu, precision="bf16"), 1)):
        with mock.patch.object(cpu_attention, "explicit_attention", wraps=cpu_attention.explicit_attention) as explicit:
            with hardware.autocast():
                F.scaled_dot_product_attention(*operands())
            assert explicit.call_count == calls
