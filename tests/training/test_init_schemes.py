"""First weights: what each is for can be seen before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig, patchify
from vitral.recipes.builtin import cifar10, cifar10_94, cifar10_patch
from vitral.training.init_schemes import OFFSETS, apply_init_schemes

CIFAR: dict[str, Any] = {
    "image_size": (32, 32), "patch_size": 4, "classes": 10, "width": 256, "depth": 6, "heads": 4, "pooling": "mean",
    "positions": "learned+rotary", "qk_norm": True,
}  # fmt: skip


def a_model(**changes: Any) -> ViT:
    torch.manual_seed(0)
    return ViT(ViTConfig(**CIFAR | changes)).eval()


def test_identity_leaves_the_tokens_as_they_are() -> None:
    model = a_model()
    apply_init_schemes(("identity",), model)
    tokens = model.trace(torch.randn(2, 3, 32, 32)).tokens
    assert all(torch.equal(after, tokens[0]) for after in tokens)


@pytest.mark.parametrize("heads", [4, 8])
def test_local_heads_look_at_their_neighbours(heads: int) -> None:
    """The place that a head of an untrained model looks at, on average over images, is the query's plus its offset."""
    model = a_model(heads=heads)
    images = torch.randn(8, 3, 32, 32)
    before = model.trace(images).attention
    apply_init_schemes(("local_heads",), model)
    for layer, attention in enumerate(model.trace(images).attention):
        for head in range(heads):
            down, across = OFFSETS[(layer + head // 4) % 4][head % 4]
            y, x = torch.meshgrid(torch.arange(2, 6), torch.arange(2, 6), indexing="ij")  # their neighbours exist
            query, key = (y * 8 + x).flatten(), ((y + down) * 8 + x + across).flatten()
            mean = attention[:, head].mean(0)
            assert torch.equal(mean[query].argmax(dim=1), key)
            assert mean[query, key].mean() > 4 * before[layer][:, head].mean(0)[query, key].mean()


def test_alike_keys_resemble_queries_and_keep_their_size() -> None:
    model = a_model()
    sizes = [block.get_parameter("attention.qkv.weight").chunk(3)[1].std() for block in model.encoder.blocks]
    apply_init_schemes(("qk_similar",), model)
    for block, size in zip(model.encoder.blocks, sizes, strict=True):
        q, k, _ = (part.detach().flatten() for part in block.get_parameter("attention.qkv.weight").chunk(3))
        assert torch.corrcoef(torch.stack([q, k]))[0, 1] == pytest.approx(0.5, abs=0.02)
        assert k.std() == pytest.approx(size.item(), rel=0.02)


@pytest.mark.parametrize("width", [32, 256])
def test_whitened_patches_have_no_favourite_direction(width: int) -> None:
    """Smooth images give patches whose brightness hides the rest; after the projection all directions are equal."""
    model = a_model(width=width)
    images = torch.nn.functional.interpolate(torch.randn(400, 3, 8, 8), size=32, mode="bilinear")
    images += 0.2 * torch.randn_like(images)
    patches = patchify(images, 4).flatten(0, 1)

    def directions() -> torch.Tensor:
        values = torch.linalg.svdvals(model.patch_embedding.project(patches)[:20_000].detach())
        return values[: min(width, 48)]

    before = directions()
    apply_init_schemes(("whitened_patches",), model, images)
    after = directions()
    assert before[0] / before[-1] > 5
    assert after[0] / after[-1] < 1.5
    assert model.patch_embedding.project(patches).detach().std() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.positions": "learned"}, "rotary positions"),
        ({"model.qk_norm": False}, "qk_norm"),
        ({"model.qkv_bias": False}, "qkv_bias"),
    ],
)
def test_a_start_that_cannot_be_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(VitralError, match=reason):
        cifar10().with_overrides(change)


def test_whitened_is_for_pixels() -> None:
    with pytest.raises(VitralError, match="patches of pixels"):
        cifar10_94().with_overrides({"init_schemes": ("whitened_patches",)})
    assert "whitened_patches" in cifar10_patch().init_schemes
