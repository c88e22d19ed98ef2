"""Training a part of the weights: exact resume, small checkpoints, and refusals that name the flag."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.common import Command, Fit, identical
from support.training import (
    ALL_RANDOMNESS,
    final_weights,
    interrupt_and_resume,
    load_newest_checkpoint,
    metrics_without_timing,
)
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import Recipe, recipe_from_dict
from vitral.runs.model_io import load_model
from vitral.training.state import init_state
from vitral.training.trainer import Trainer
from vitral.training.tuning import count_trained
from vitral.utils.serialization import to_dict
from vitral.weights.adapter import BaseWeights

TUNES = ("lora", "bias", "head", "last-1")


@pytest.mark.parametrize("tune", ["lora", pytest.param("last-1", marks=pytest.mark.slow)])
def test_resume_of_partial_tuning_is_bit_exact(train_tiny: Fit, tune: str) -> None:
    overrides = ALL_RANDOMNESS | {"tune": tune, "optim.layer_decay": 0.8, "optim.weight_decay": 0.1}
    if tune == "lora":
        overrides |= {"lora.rank": 2, "lora.dropout": 0.2}
    reference = train_tiny("reference", **overrides)
    resumed = interrupt_and_resume(train_tiny, "resumed", [4, 5], **overrides)
    assert identical(final_weights(reference), final_weights(resumed))
    assert metrics_without_timing(reference) == metrics_without_timing(resumed)


@pytest.mark.parametrize("tune", TUNES)
def test_optimizer_ema_and_checkpoint_hold_only_what_trains(tune: str, train_tiny: Fit, recipe: Recipe) -> None:
    run = train_tiny("run", tune=tune, ema=0.2, epochs=1)
    saved = load_newest_checkpoint(run)
    trained, _ = count_trained(replace(recipe, tune=tune))
    assert sum(tensor.numel() for tensor in saved["model"].values()) == trained
    assert saved["ema"].keys() == saved["model"].keys()
    moments = [state["exp_avg"] for optimizer in saved["optimizers"] for state in optimizer["state"].values()]
    assert sum(moment.numel() for moment in moments) == trained
    assert load_model(run.path)[0].state_dict().keys() == final_weights(run).keys()


@pytest.mark.parametrize("tune", TUNES)
def test_only_what_trains_changes_and_it_learns(tune: str, train_tiny: Fit, recipe: Recipe, cpu: Hardware) -> None:
    run = train_tiny("run", tune=tune, **{"optim.lr": 2e-2})
    before, after = init_state(replace(recipe, tune=tune), cpu, 1).model.state_dict(), final_weights(run)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    matrices = ("qkv.weight", "project.weight", "expand.weight", "contract.weight")
    expected = {
        "head": lambda name: False,
        "bias": lambda name: name.endswith("bias"),
        "lora": lambda name: "blocks." in name and name.endswith(matrices),
        "last-1": lambda name: name.startswith(("encoder.blocks.1.", "encoder.norm.")),
    }[tune]
    assert changed == {name for name in after if name.startswith("head.") or expected(name)}
    losses = [row["train_loss"] for row in run.load_metrics()]
    assert losses[-1] < losses[0]


def test_the_ema_shares_the_frozen_weights(recipe: Recipe, cpu: Hardware) -> None:
    state = init_state(replace(recipe, tune="head", ema=0.2), cpu, 10)
    assert state.ema is not None
    for name, parameter in state.model.named_parameters():
        averaged = state.ema.model.get_parameter(name)
        assert (averaged is parameter) == (not parameter.requires_grad), name


def test_a_changed_base_is_refused_on_resume(train_tiny: Fit) -> None:
    def trainer_on(sha256: str) -> type[Trainer]:
        class TrainerOnBase(Trainer):
            def setup(self) -> None:
                self.base = BaseWeights(source="vit.safetensors", sha256=sha256)
                super().setup()

        return TrainerOnBase

    interrupted = {"tune": "head", "epochs": 2}
    train_tiny("run", trainer_class=trainer_on("aaa"), **interrupted)
    with pytest.raises(VitralError, match=r"the weights of vit\.safetensors have changed since this run started"):
        train_tiny("run", trainer_class=trainer_on("bbb"), **interrupted)


@pytest.mark.parametrize(
    ("freeze", "tune"), [("", "full"), ("backbone", "head"), ("0", "last-2"), ("1", "last-1"), ("2", "last-0")]
)
def test_recipes_with_freeze_still_load(freeze: str, tune: str, recipe: Recipe) -> None:
    values = {name: value for name, value in to_dict(recipe).items() if name not in ("tune", "lora")}
    old = recipe_from_dict({**values, "freeze": freeze})
    assert old.tune == tune
    assert old.has_result_fields({**recipe.result_fields(), "freeze": freeze, "tune": tune})
    assert "freeze" not in old.to_toml()


def test_an_invalid_freeze_in_an_old_recipe_is_refused(recipe: Recipe) -> None:
    with pytest.raises(VitralError, match=r"tune must be .* got '7'"):
        recipe_from_dict({**to_dict(recipe), "freeze": "7"})


def test_freeze_is_refused_and_tune_named(recipe: Recipe, command: Command) -> None:
    with pytest.raises(VitralError, match=r"freeze was replaced by tune\n.*--tune head"):
        recipe.with_overrides({"freeze": "backbone"})
    code, _, err = command("train", "digits", "--freeze", "backbone")
    assert code == 2
    assert "no flag '--freeze'. It was replaced by --tune: --tune head trains only the head" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tune", "lra"), "--tune must be full, head, lora, bias or last-N (the last N blocks), got 'lra'"),
        (("--tune", "lora"), "--tune lora needs a checkpoint"),
        (("--lora.rank", "4"), "lora.rank has no effect with tune 'full'"),
        (("--tune", "lora", "--lora.rank", "1000"), "lora.rank must be at most"),
        (("--tune", "lora", "--lora.targets", "query"), "--lora.targets: expected one of qkv, project"),
        (("--adapter", "missing.safetensors"), "--adapter needs the weights that it was trained on"),
    ],
)
def test_errors_are_two_lines(words: tuple[str, ...], message: str, command: Command, tmp_path: Path) -> None:
    code, _, err = command("train", "digits", *words, "--out", tmp_path / "run")
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 2
    assert not (tmp_path / "run").exists()


def test_lora_trains_a_few_percent_of_a_base_model(recipe: Recipe) -> None:
    large = replace(recipe, model=ViTConfig(num_classes=2), tune="lora")
    trained, total = count_trained(large)
    D, rank = 768, 8
    factors = 12 * rank * ((D + 3 * D) + (D + D) + (D + 4 * D) + (4 * D + D))
    assert trained == factors + 2 * D + 2
    assert trained < 0.02 * total
