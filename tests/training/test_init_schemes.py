"""Weight initialisations: the property that each one promises holds before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig, patchify
from vitral.recipes.builtin import cifar10, cifar10_94, cifar10_patch
from vitral.recipes.schema import Recipe
from vitral.training.init_schemes import OFFSETS, apply_init_schemes
from vitral.training.state import init_state

CIFAR: dict[str, Any] = {
    "image_size": (32, 32), "patch_size": 4, "num_classes": 10, "width": 256, "depth": 6, "heads": 4,
    "pooling": "mean", "positions": "learned+rotary", "qk_norm": True,
}  # fmt: skip


def make_model(**overrides: Any) -> ViT:
    torch.manual_seed(0)
    return ViT(ViTConfig(**CIFAR | overrides)).eval()


def test_identity_blocks_leave_the_tokens_unchanged() -> None:
    model = make_model()
    apply_init_schemes(("identity",), model)
    tokens = model.trace(torch.randn(2, 3, 32, 32)).tokens
    assert all(torch.equal(layer, tokens[0]) for layer in tokens)


@pytest.mark.parametrize("heads", [4, 8])
def test_local_heads_attend_to_their_offset(heads: int) -> None:
    """On average over images, each head of an untrained model attends most to query position + offset."""
    model = make_model(heads=heads)
    images = torch.randn(8, 3, 32, 32)
    before = model.trace(images).attention
    apply_init_schemes(("local_heads",), model)
    y, x = torch.meshgrid(torch.arange(2, 6), torch.arange(2, 6), indexing="ij")  # away from the border
    query = (y * 8 + x).flatten()
    for layer, attention in enumerate(model.trace(images).attention):
        for head in range(heads):
            down, right = OFFSETS[(layer + head // 4) % 4][head % 4]
            key = ((y + down) * 8 + x + right).flatten()
            mean = attention[:, head].mean(0)
            assert torch.equal(mean[query].argmax(dim=1), key)
            assert mean[query, key].mean() > 4 * before[layer][:, head].mean(0)[query, key].mean()


def test_qk_similar_correlates_keys_with_queries_and_keeps_their_scale() -> None:
    model = make_model()
    scales = [block.get_parameter("attention.qkv.weight").chunk(3)[1].std() for block in model.encoder.blocks]
    apply_init_schemes(("qk_similar",), model)
    for block, scale in zip(model.encoder.blocks, scales, strict=True):
        q, k, _ = (part.detach().flatten() for part in block.get_parameter("attention.qkv.weight").chunk(3))
        assert torch.corrcoef(torch.stack([q, k]))[0, 1] == pytest.approx(0.5, abs=0.02)
        assert k.std() == pytest.approx(scale.item(), rel=0.02)


@pytest.mark.parametrize("width", [32, 256])
def test_whitened_patches_have_equal_variance_in_all_directions(width: int) -> None:
    """Patches of smooth images vary mostly in brightness; their whitened projections do not."""
    model = make_model(width=width)
    images = torch.nn.functional.interpolate(torch.randn(400, 3, 8, 8), size=32, mode="bilinear")
    images += 0.2 * torch.randn_like(images)
    patches = patchify(images, 4).flatten(0, 1)

    def singular_values() -> torch.Tensor:
        values = torch.linalg.svdvals(model.patch_embedding.project(patches)[:20_000].detach())
        return values[: min(width, 48)]

    before = singular_values()
    apply_init_schemes(("whitened_patches",), model, images)
    after = singular_values()
    assert before[0] / before[-1] > 5
    assert after[0] / after[-1] < 1.5
    assert model.patch_embedding.project(patches).detach().std() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"model.positions": "learned"}, "rotary positions"),
        ({"model.qk_norm": False}, "qk_norm"),
        ({"model.qkv_bias": False}, "qkv_bias"),
    ],
)
def test_local_heads_are_refused_for_unsupported_models(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(VitralError, match=reason):
        cifar10().with_overrides(overrides)


def test_whitened_patches_are_refused_for_convolutional_stems() -> None:
    with pytest.raises(VitralError, match="pixel patches"):
        cifar10_94().with_overrides({"init_schemes": ("whitened_patches",)})
    assert "whitened_patches" in cifar10_patch().init_schemes


@pytest.mark.parametrize("num_classes", [2, 4, 1000, 21_843])
def test_a_sigmoid_head_starts_at_equal_probabilities(num_classes: int, recipe: Recipe, cpu: Hardware) -> None:
    state = init_state(recipe.with_overrides({"loss": "sigmoid", "model.num_classes": num_classes}), cpu, 10)
    bias = state.model.get_parameter("head.out.bias")
    torch.testing.assert_close(bias.sigmoid(), torch.full((num_classes,), 1 / num_classes))
    if num_classes in (1000, 21_843):
        assert bias[0].item() == pytest.approx(-6.9 if num_classes == 1000 else -10.0, abs=0.02)


def test_a_trained_sigmoid_head_keeps_its_bias(recipe: Recipe, cpu: Hardware) -> None:
    weights = init_state(recipe, cpu, 10).model.state_dict()
    weights["head.out.weight"] += 1
    state = init_state(recipe.with_overrides({"loss": "sigmoid"}), cpu, 10, weights)
    assert state.model.get_parameter("head.out.bias").abs().max() == 0
