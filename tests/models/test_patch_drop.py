"""Patch dropout: which tokens are kept, and equality with a forward pass over exactly those tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitral.models.vit import ViT, ViTConfig


def make_model(**overrides: Any) -> ViT:
    settings: dict[str, Any] = {"image_size": (16, 16), "patch_size": 4, "num_classes": 5, "width": 32, "heads": 2}
    torch.manual_seed(0)
    model = ViT(ViTConfig(**settings | {"depth": 2, "patch_drop": 0.25} | overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("overrides", [{}, {"pooling": "mean"}, {"registers": 2}], ids=str)
def test_a_share_of_the_patches_and_every_prefix_token_is_kept(overrides: dict[str, Any]) -> None:
    model = make_model(**overrides).train()
    p = model.config.num_prefix_tokens
    tokens, kept = model.drop_patches(torch.arange(16.0 + p).view(1, -1, 1).expand(6, -1, -1), (4, 4))
    assert kept is not None
    assert torch.equal(tokens[..., 0], kept.float())
    assert kept.shape == (6, p + 12)
    assert kept[:, :p].tolist() == [list(range(p))] * 6
    assert all(row == sorted(set(row)) for row in kept.tolist())
    assert len({tuple(row) for row in kept.tolist()}) > 1, "one draw per image"


def test_evaluation_and_a_rate_of_zero_keep_all_patches() -> None:
    images = torch.randn(2, 3, 16, 16)
    model, plain = make_model(), make_model(patch_drop=0.0)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), plain.eval()(images))
        assert torch.equal(plain.train()(images), plain.eval()(images))


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "learned+rotary"])
def test_dropped_patches_have_no_influence_and_kept_ones_keep_their_positions(positions: Any) -> None:
    """An image whose dropped patches hold other pixels has the same logits."""
    model = make_model(positions=positions).train()
    images = torch.randn(3, 3, 16, 16)
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    _, kept = model.drop_patches(torch.zeros(3, 17, 32), (4, 4))
    assert kept is not None
    changed = images.clone()
    for image, row in zip(changed, kept.tolist(), strict=True):
        for patch in set(range(16)) - {index - 1 for index in row}:
            y, x = divmod(patch, 4)
            image[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = 9.0
    assert not torch.equal(changed, images)
    torch.manual_seed(1)
    torch.testing.assert_close(model(changed), expected)
    tokens = model.embed(images, (4, 4)).gather(1, kept[..., None].expand(-1, -1, 32))
    rope = None if model.encoder.rotary_position is None else model.encoder.rotary_position((4, 4))[:, kept][:, :, None]
    for block in model.encoder.blocks:
        tokens = block(tokens, rope)
    torch.testing.assert_close(model.head(model.pool(model.encoder.norm(tokens))), expected)


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_invalid_rates_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="patch_drop must be at least 0 and less than 1"):
        make_model(patch_drop=rate)
