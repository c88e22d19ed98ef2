"""Masked autoencoding: targets and loss against loops, an encoder that sees only visible patches, and the decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from support.common import unpatchify
from support.pretraining import TINY, VIT, draw_batch, preprocessing_of, random_images, tiny_method
from vitral.distributed.world import SINGLE_PROCESS
from vitral.errors import VitralError
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig, HybridViT
from vitral.models.vit import ViT, ViTConfig
from vitral.ssl.mae import MAE, MAEConfig, encode_seen, masked_mse, patch_targets
from vitral.ssl.masking import split_patches

KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean": {"pooling": "mean"},
    "sincos": {"positions": "sincos"},
    "rotary": {"positions": "rotary"},
    "learned and rotary, registers": {"positions": "learned+rotary", "registers": 2},
    "registers with positions": {"registers": 2, "register_positions": True},
    "pre-norm": {"pre_norm": True},
    "non-square": {"image_size": (8, 24), "positions": "rotary"},
}


def make_mae(vit: ViTConfig = VIT, **options: Any) -> MAE:
    method = tiny_method("mae", vit, options=options)
    assert isinstance(method, MAE)
    return method


def test_targets_have_mean_0_and_standard_deviation_1_per_patch() -> None:
    images = torch.randn(2, 3, 16, 16) * 5 + 3
    targets = patch_targets(ViT(VIT), images).numpy()
    for b in range(2):
        for row in range(4):
            for column in range(4):
                pixels = images[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].double().numpy().flatten()
                expected = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)  # as in the paper's code
                np.testing.assert_allclose(targets[b, 4 * row + column], expected, rtol=1e-4, atol=1e-5)


def test_targets_of_constant_patches_are_zero() -> None:
    assert not patch_targets(ViT(VIT), torch.full((1, 3, 16, 16), 7.0)).any()


def test_the_loss_is_the_mean_squared_error_of_masked_patches_only() -> None:
    rng = Generator().manual_seed(0)
    predicted, targets = torch.randn(3, 16, 48, generator=rng), torch.randn(3, 16, 48, generator=rng)
    mask = split_patches(3, 16, 12, rng, torch.device("cpu")).mask
    losses = masked_mse(predicted, targets, mask)
    for b in range(3):
        errors = [((predicted[b, n] - targets[b, n]) ** 2).mean().item() for n in range(16) if mask[b, n]]
        assert len(errors) == 12
        assert losses[b].item() == pytest.approx(np.mean(errors), rel=1e-5)
    visible = ~mask[:, :, None]
    torch.testing.assert_close(masked_mse(predicted + 9 * visible, targets, mask), losses)


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_all_patches_equals_the_ordinary_encoder(kind: str) -> None:
    config = replace(VIT, **KINDS[kind])
    torch.manual_seed(0)
    vit, images = ViT(config).eval(), torch.randn(3, 3, *config.image_size)
    grid = vit.patch_grid(images)
    order = split_patches(3, grid[0] * grid[1], 0, Generator().manual_seed(0), torch.device("cpu")).visible_indices
    tokens, expected = encode_seen(vit, images, grid, order), vit.encoder(vit.embed(images, grid), grid)
    num_prefix = config.num_prefix_tokens
    torch.testing.assert_close(tokens[:, :num_prefix], expected[:, :num_prefix])
    patches = expected[:, num_prefix:].gather(1, order[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(tokens[:, num_prefix:], patches)


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_does_not_see_masked_patches(kind: str) -> None:
    config = replace(VIT, **KINDS[kind])
    torch.manual_seed(0)
    vit, images = ViT(config), torch.randn(3, 3, *config.image_size)
    grid = config.grid
    split = split_patches(3, grid[0] * grid[1], 8, Generator().manual_seed(0), torch.device("cpu"))
    pixels = split.mask.view(3, 1, *grid).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    changed = torch.where(pixels, torch.randn(images.shape), images)
    tokens = encode_seen(vit, images, grid, split.visible_indices)
    assert tokens.shape[1] == config.num_prefix_tokens + split.visible_indices.shape[1]
    assert torch.equal(encode_seen(vit, changed, grid, split.visible_indices), tokens)
    brighter = torch.where(pixels, images, images + 1)
    assert not torch.equal(encode_seen(vit, brighter, grid, split.visible_indices), tokens)


def test_the_prediction_depends_on_visible_patches_only_and_is_in_the_order_of_the_image() -> None:
    method = make_mae(mask_ratio=0.5)
    images, seen, restore, mask = draw_batch(method, random_images())
    grid = (4, 4)
    tokens = encode_seen(method.student.vit, images, grid, seen)[:, 1:]
    decoder = method.decoder
    predicted = decoder(tokens, restore, grid)
    assert predicted.shape == (6, 16, 48)
    # by hand: put each token at its place
    placed = decoder.mask_token.expand(6, 16, -1).clone()
    for b in range(6):
        for index, patch in enumerate(seen[b].tolist()):
            assert not mask[b, patch]
            placed[b, patch] = decoder.embed(tokens[b, index])
    expected = decoder.pixels(decoder.encoder(placed + decoder.positions.table, grid))
    torch.testing.assert_close(predicted, expected)


def test_a_perfect_decoder_has_no_loss_and_explains_all_variance() -> None:
    method = make_mae()
    batch = draw_batch(method, random_images())
    targets = patch_targets(method.student.vit, batch[0])
    method.decoder = Fixed(targets)  # type: ignore[assignment]
    loss, score = method(*batch)
    assert loss.item() == 0
    assert score.item() == 6
    method.decoder = Fixed(torch.zeros_like(targets))  # type: ignore[assignment]
    assert method(*batch)[1].item() / 6 == pytest.approx(0, abs=0.05)  # the mean of each patch explains nothing


class Fixed(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any) -> Tensor:
        return self.output


def test_an_untrained_model_has_the_initial_loss() -> None:
    method = make_mae()
    loss, _ = method(*draw_batch(method, random_images()))
    assert loss.item() / 6 == pytest.approx(method.initial_loss, rel=1)


def test_images_are_cropped_and_flipped_but_their_colours_stay() -> None:
    method = make_mae()
    flat = torch.randint(0, 255, (6, 3, 1, 1), generator=Generator().manual_seed(0), dtype=torch.uint8)
    crops = draw_batch(method, flat.expand(-1, -1, 16, 16).contiguous())[0]
    expected = ((flat / 255 - 0.5) / 0.25).expand_as(crops)
    torch.testing.assert_close(crops, expected, rtol=0, atol=1e-5)


def test_each_image_has_its_own_mask_with_the_same_number_of_patches() -> None:
    _, seen, restore, mask = draw_batch(make_mae(), random_images())
    assert seen.shape == (6, 4)
    assert (mask.sum(dim=1) == 12).all()
    assert len(mask.unique(dim=0)) > 3
    assert restore.sort(dim=1).values.equal(torch.arange(16).expand(6, 16))


def test_predicted_pixels_form_an_image() -> None:
    """A decoder that predicts the targets restores the normalised image: both use the same layout of patches."""
    images = torch.randn(1, 3, 16, 16)
    targets = unpatchify(patch_targets(ViT(VIT), images), (4, 4), 4)
    block, expected = targets[0, :, 4:8, 8:12], images[0, :, 4:8, 8:12]
    torch.testing.assert_close(block, (expected - expected.mean()) / expected.std(), rtol=1e-4, atol=1e-4)


def test_the_decoder_is_initialised_as_in_the_paper() -> None:
    decoder = make_mae().decoder
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            assert not module.bias.any()
            bound = (6 / (module.in_features + module.out_features)) ** 0.5  # Xavier-uniform
            assert 0.9 * bound < module.weight.abs().max() <= bound
    assert 0.01 < decoder.mask_token.std() < 0.03


def test_models_with_a_stem_are_refused_in_two_lines() -> None:
    vit = HybridViT(HybridConfig(**vars(VIT), conv=ConvStemConfig(widths=(8, 8), strides=(2, 2))))
    with pytest.raises(VitralError) as error:
        MAE(MAEConfig(), vit, preprocessing_of(vit.config), TINY.views, SINGLE_PROCESS)
    assert "stem" in error.value.what
    assert "--method" in error.value.hint


def test_attention_pooling_is_refused_because_it_would_stay_random() -> None:
    with pytest.raises(VitralError, match="attention pooling") as error:
        make_mae(replace(VIT, pooling="attention"))
    assert "--model.pooling mean" in error.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("mask_ratio", 0.0), ("mask_ratio", 1.0), ("decoder_width", 48), ("decoder_width", 0), ("decoder_depth", 0)],
)
def test_invalid_options_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^mae\.{name} must be .*, got {value}$"):
        MAEConfig(**{name: value})
