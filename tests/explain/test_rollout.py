"""Attention rollout with known attention matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.explain import METHODS, rescale_for_display
from vitral.models.vit import Trace, ViT, ViTConfig


def rollout(model: ViT, images_BCHW: Tensor, **options: Any) -> Tensor:
    return rescale_for_display(METHODS["rollout"](model, images_BCHW, **options))


def model_with_attention(monkeypatch: pytest.MonkeyPatch, attention: list[Tensor], **settings: Any) -> ViT:
    """A model for one row of three one-pixel patches, whose trace has the given attention."""
    config = ViTConfig(image_size=(1, 3), patch_size=1, channels=1, width=4, depth=1, heads=1, **settings)
    model = ViT(config)
    trace = Trace(
        grid=(1, 3), num_prefix_tokens=config.num_prefix_tokens, patches=torch.zeros(1), tokens=[], attention=attention
    )
    monkeypatch.setattr(model, "trace", lambda images: trace)
    return model


def test_one_block_gives_the_attention_of_the_class_token(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = torch.full((1, 1, 4, 4), 0.25)
    attention[0, 0, 0] = torch.tensor([0.1, 0.4, 0.2, 0.3])
    heat = rollout(model_with_attention(monkeypatch, [attention]), torch.zeros(1, 1, 1, 3))
    torch.testing.assert_close(heat, torch.tensor([[[1.0, 0.0, 0.5]]]))


def test_heads_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = torch.full((1, 2, 4, 4), 0.25)
    attention[0, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    attention[0, 1, 0] = torch.tensor([0.0, 0.0, 0.5, 0.5])
    heat = rollout(model_with_attention(monkeypatch, [attention]), torch.zeros(1, 1, 1, 3))
    torch.testing.assert_close(heat, torch.tensor([[[1.0, 0.0, 0.0]]]))


def test_mean_pooling_gives_the_mean_attention_of_the_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.6, 0.4, 0.0], [0.3, 0.1, 0.6, 0.0], [0.0, 0.5, 0.5, 0.0]])
    model = model_with_attention(monkeypatch, [attention[None, None]], pooling="mean", registers=1)
    heat = rollout(model, torch.zeros(1, 1, 1, 3))
    torch.testing.assert_close(heat, torch.tensor([[[1.2 / 1.5, 1.0, 0.0]]]))


def test_blocks_are_multiplied_with_the_residual_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    first, second = torch.rand(2, 1, 1, 4, 4).softmax(-1)
    first[0, 0, 2] = torch.tensor([0.0, 0.0, 0.0, 1.0])  # the second patch copies the third
    second[0, 0, 0] = torch.tensor([0.0, 0.0, 1.0, 0.0])  # then the class token reads the second
    heat = rollout(model_with_attention(monkeypatch, [first, second]), torch.zeros(1, 1, 1, 3))
    row = [0.25 * first[0, 0, 0, j] + (0.25 if j in (2, 3) else 0) for j in (1, 2, 3)]
    low, high = min(row), max(row)
    torch.testing.assert_close(heat[0, 0], torch.stack([(value - low) / (high - low) for value in row]))


def test_uniform_attention_gives_a_constant_map(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = rollout(model_with_attention(monkeypatch, [torch.full((1, 1, 4, 4), 0.25)]), torch.zeros(1, 1, 1, 3))
    torch.testing.assert_close(heat, torch.zeros(1, 1, 3))


def test_attention_matrices_are_multiplied_without_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    blocks = list(torch.randn(3, 1, 2, 4, 4).softmax(-1))
    first, second, third = (block.mean(dim=1)[0] for block in blocks)
    heat = METHODS["rollout"](model_with_attention(monkeypatch, blocks), torch.zeros(1, 1, 3), residual=False)
    torch.testing.assert_close(heat[0], (third @ second @ first)[0, 1:])


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_head_fusion(monkeypatch: pytest.MonkeyPatch, fusion: str) -> None:
    torch.manual_seed(0)
    blocks = list(torch.randn(3, 1, 2, 4, 4).softmax(-1))
    product = torch.eye(4)
    for block in blocks:
        fused = {"mean": block.mean(1), "max": block.max(1).values, "min": block.min(1).values}[fusion][0]
        product = (fused / fused.sum(1, keepdim=True) + torch.eye(4)) / 2 @ product
    heat = METHODS["rollout"](model_with_attention(monkeypatch, blocks), torch.zeros(1, 1, 3), fusion=fusion)
    torch.testing.assert_close(heat[0], product[0, 1:])


@pytest.mark.parametrize("pooling", ["class", "mean", "attention"])
@pytest.mark.parametrize("registers", [0, 2])
def test_heatmap_has_the_image_size_and_ranges_from_zero_to_one(pooling: Any, registers: int) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(12, 20), patch_size=4, width=16, depth=3, heads=2, pooling=pooling, registers=registers
    )
    model: Any = ViT(config).eval()
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight.mul_(4)
    images = torch.rand(3, 3, 12, 20)
    heat = rollout(model, images)
    assert heat.shape == (3, 12, 20)
    assert not heat.requires_grad
    torch.testing.assert_close(heat.amin((1, 2)), torch.zeros(3))
    torch.testing.assert_close(heat.amax((1, 2)), torch.ones(3))
    torch.testing.assert_close(rollout(model, images[1:2]), heat[1:2], rtol=1e-4, atol=1e-5)


def test_bf16_model_gives_a_finite_heatmap() -> None:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=(8, 8), patch_size=4, width=16, depth=1, heads=2)).eval().bfloat16()
    heat = rollout(model, torch.rand(1, 3, 8, 8).bfloat16())
    assert heat.isfinite().all()
