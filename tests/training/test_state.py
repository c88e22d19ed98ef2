from __future__ import annotations

import torch
from torch import Tensor

from vitral.device.select import Hardware
from vitral.recipes.schema import Recipe
from vitral.training.state import init_state, rank_seed


def test_the_seed_determines_weights_and_augmentation(recipe: Recipe, cpu: Hardware) -> None:
    def draws(seed: int) -> tuple[Tensor, Tensor]:
        state = init_state(recipe.with_overrides({"seed": seed}), cpu, 10)
        return state.vit.patch_embedding.project.weight, torch.rand(4, generator=state.augment_rng)

    assert all(torch.equal(a, b) for a, b in zip(draws(3), draws(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(draws(3), draws(4), strict=True))


def test_rank_seeds_differ_and_rank_0_keeps_the_seed() -> None:
    seeds = [rank_seed(5, rank) for rank in range(64)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_eval_model_has_the_ema_weights(recipe: Recipe, cpu: Hardware) -> None:
    assert (state := init_state(recipe, cpu, 10)).eval_model is state.model
    averaged = init_state(recipe.with_overrides({"ema": 0.5}), cpu, 10)
    assert averaged.ema is not None
    assert averaged.eval_model is averaged.ema.model
