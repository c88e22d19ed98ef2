"""Patch dropout in the fused training pass, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.triton_interpreter import relative_difference, requires_interpreter, small_model
from vitral.kernels.encoder import FusedEncoder

pytestmark = [requires_interpreter, pytest.mark.slow]


@pytest.mark.parametrize("positions", ["learned", "learned+rotary"])
def test_the_fused_encoder_trains_on_the_kept_patches_like_the_reference(positions: Any) -> None:
    model, tokens = small_model(16, depth=2, positions=positions, patch_drop=0.5)
    model.train()
    kept_tokens, kept = model.drop_patches(tokens, model.config.grid)
    assert kept is not None
    assert kept_tokens.shape[1] == 9
    results = []
    for encoder in (FusedEncoder(model.encoder, dtype=torch.float32), model.encoder):
        inputs = kept_tokens.clone().requires_grad_()
        out = encoder(inputs, model.config.grid, kept_BT=kept)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), [inputs, *model.encoder.parameters()])))
    for actual, expected in zip(*results, strict=True):
        assert relative_difference(actual, expected) < 1e-3
