"""Token merging: matching and merging on cases computed by hand, and equalities with plain attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.models.token_merging import (
    Matching,
    TokenMergingViT,
    attend_by_size,
    match_tokens,
    merge_tokens,
    tokens_per_block,
)
from vitral.models.vit import ViT, ViTConfig


def make_model(**overrides: Any) -> ViT:
    settings: dict[str, Any] = {"image_size": (16, 16), "patch_size": 4, "num_classes": 5, "width": 32, "heads": 2}
    torch.manual_seed(0)
    model = ViT(ViTConfig(**settings | {"depth": 3} | overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_the_most_similar_pair_is_matched_and_prefix_tokens_never() -> None:
    """Class token, then patches 0 to 4. With one prefix token, A is patches 1 and 3, B is patches 0, 2 and 4."""
    keys = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, 0.5], [-1.0, 0.0]]])
    kept, merged, target, b = match_tokens(keys, r=1, num_prefix_tokens=1)
    assert b.tolist() == [0, 2, 4]
    assert (merged.tolist(), target.tolist()) == ([[1]], [[0]])  # patch 1 into patch 0, which points the same way
    assert kept.tolist() == [[3]]


def test_merging_averages_by_size() -> None:
    """Patches 1 (size 3) and 3 (size 1) of values 10 and 50 are both merged into patch 0 (size 1) of value 2."""
    tokens = torch.tensor([[[7.0], [2.0], [10.0], [4.0], [50.0]]])
    sizes = torch.tensor([[1.0, 1.0, 3.0, 2.0, 1.0]])
    none = torch.empty(1, 0, dtype=torch.long)
    matching = Matching(none, torch.tensor([[1, 3]]), torch.tensor([[0, 0]]), torch.tensor([0, 2]))
    merged, size = merge_tokens(tokens, sizes, matching, num_prefix_tokens=1)
    assert merged.flatten().tolist() == pytest.approx([7.0, (2 + 3 * 10 + 50) / 5, 4.0])
    assert size.tolist() == [[1.0, 5.0, 2.0]]


def test_attention_by_size_equals_attention_to_duplicated_tokens() -> None:
    q, k, v = torch.randn(3, 2, 4, 3, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    repeats = torch.tensor([1, 4, 2])
    duplicated_k, duplicated_v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, duplicated_k, duplicated_v)
    torch.testing.assert_close(attend_by_size(q, k, v, repeats.float().expand(2, 3)), expected)


@pytest.mark.parametrize("overrides", [{}, {"pooling": "mean"}, {"registers": 2, "qk_norm": True}], ids=str)
def test_without_merging_the_model_is_unchanged(overrides: dict[str, Any], images: Tensor) -> None:
    model = make_model(**overrides)
    with torch.inference_mode():
        assert torch.equal(TokenMergingViT.from_model(model, r=0)(images), model(images))


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_merging_equal_patches_changes_nothing(pooling: Any) -> None:
    """Without positions all tokens of a constant image are equal, and the mean of equal tokens is the token."""
    model = make_model(pooling=pooling, positions="none")
    images = torch.randn(2, 3, 1, 1).expand(-1, -1, 16, 16)
    with torch.inference_mode():
        merged = TokenMergingViT.from_model(model, r=5)(images)
        torch.testing.assert_close(merged, model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("r", "expected"), [(0, [17, 17, 17]), (3, [17, 14, 11]), (100, [17, 9, 5])])
def test_each_block_merges_r_tokens_but_at_most_half_of_the_patches(
    r: int, expected: list[int], images: Tensor
) -> None:
    model = make_model()
    seen: list[int] = []
    blocks: Any = model.encoder.blocks
    for block in blocks:
        block.norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    with torch.inference_mode():
        tokens, size = TokenMergingViT.from_model(model, r).encode(model.embed(images, (4, 4)))
    assert seen == expected == tokens_per_block((4, 4), 1, 3, r)
    if size is not None:
        assert size.shape == tokens.shape[:2]
        torch.testing.assert_close(size.sum(dim=1), torch.full((3,), 17.0))  # no patch is lost
        assert size[:, 0].tolist() == [1.0] * 3


def test_the_weights_are_shared() -> None:
    model = make_model()
    merging = TokenMergingViT.from_model(model, r=2)
    assert merging.encoder is model.encoder
    assert type(model) is ViT


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [({"positions": "rotary"}, "no position of its own"), ({"pooling": "attention"}, "attention pooling")],
)
def test_models_whose_tokens_cannot_be_merged_are_refused(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TokenMergingViT.from_model(make_model(**overrides), r=2)


def test_untouched_tokens_keep_their_bits() -> None:
    tokens, sizes = torch.randn(2, 9, 4), torch.randint(1, 4, (2, 9)).float()
    matching = match_tokens(torch.randn(2, 9, 3), r=2, num_prefix_tokens=1)
    merged, _ = merge_tokens(tokens, sizes, matching, num_prefix_tokens=1)
    assert torch.equal(merged[:, 0], tokens[:, 0])
    kept = tokens[:, 1:].gather(1, matching.kept[..., None].expand(-1, -1, 4))
    assert torch.equal(merged[:, 1 : 1 + kept.shape[1]], kept)
