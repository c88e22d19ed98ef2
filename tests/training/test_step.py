"""One optimizer step: loss, gradients, clipping, gradient accumulation, learning rate, mixing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.common import Fit
from support.training import model_with_weights
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.tasks.losses import balanced_class_weights
from vitral.training.backend import ReferenceBackend, make_backend
from vitral.training.hardware import parallel_plan
from vitral.training.state import TrainState, init_state
from vitral.training.step import StepContext, StepRunner, train_step


def initial_state(recipe: Recipe, cpu: Hardware) -> TrainState:
    """A state with a random head, which otherwise starts at zero."""
    state = init_state(recipe, cpu, 10)
    with torch.no_grad():
        state.model.get_parameter("head.out.weight").normal_(generator=torch.Generator().manual_seed(0))
    return state


def make_context(
    state: TrainState, recipe: Recipe, preprocessing: Preprocessing, cpu: Hardware, weights_K: Tensor | None = None
) -> StepContext:
    parallel = parallel_plan(recipe, cpu)
    backend = make_backend(state.vit, recipe, preprocessing, cpu, parallel, class_weights_K=weights_K)
    return StepContext(recipe, backend)


def one_step(recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware) -> tuple[TrainState, ViT]:
    """The state after one step on 16 images, and the model before it."""
    state = initial_state(recipe, cpu)
    before = model_with_weights(recipe, {name: tensor.clone() for name, tensor in state.model.state_dict().items()})
    context = make_context(state, recipe, preprocessing, cpu)
    train_step(state, dataset.train.images[:16], dataset.train.labels[:16], context)
    return state, before


def update_norm(state: TrainState, before: ViT) -> float:
    pairs = zip(state.model.parameters(), before.parameters(), strict=True)
    return torch.cat([(a - b).flatten() for a, b in pairs]).norm().item()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_the_label_smoothed_cross_entropy(
    smoothing: float, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    recipe = recipe.with_overrides({"label_smoothing": smoothing})
    state, before = one_step(recipe, dataset, preprocessing, cpu)
    labels = dataset.train.labels[:16]
    log_p = before(preprocessing.normalise(dataset.train.images[:16])).double().log_softmax(dim=1)
    targets = torch.full((16, 4), smoothing / 4, dtype=torch.float64)
    targets[torch.arange(16), labels] += 1 - smoothing
    loss, num_correct, num_images = state.epoch_sums.tolist()
    assert loss / 16 == pytest.approx(-(targets * log_p).sum(dim=1).mean().item(), rel=1e-5)
    assert num_correct == (log_p.argmax(dim=1) == labels).sum().item()
    assert num_images == 16


def test_the_first_adamw_step_is_lr_times_the_sign_of_the_gradient(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    recipe = recipe.with_overrides({"optim.lr": 0.01, "optim.weight_decay": 0.0, "optim.grad_clip": 0.0})
    state, before = one_step(recipe, dataset, preprocessing, cpu)
    F.cross_entropy(before(preprocessing.normalise(dataset.train.images[:16])), dataset.train.labels[:16]).backward()
    for old, new in zip(before.parameters(), state.model.parameters(), strict=True):
        assert old.grad is not None
        expected = old - 0.01 * old.grad / (old.grad.abs() + 1e-8)
        torch.testing.assert_close(new, expected, rtol=1e-3, atol=1e-4)
        assert new.grad is None


def test_gradients_are_clipped_to_the_maximum_norm(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    def norm_with(grad_clip: float) -> float:
        sgd = {"optim.name": "sgd", "optim.lr": 1.0, "optim.weight_decay": 0.0, "optim.grad_clip": grad_clip}
        return update_norm(*one_step(recipe.with_overrides(sgd), dataset, preprocessing, cpu))

    unclipped = norm_with(0.0)
    for clip in (0.01, 0.5):
        assert unclipped > clip
        assert norm_with(clip) == pytest.approx(clip, rel=1e-3)
    assert norm_with(1e6) == unclipped


MIXING = {"augment.mixup": 0.5, "augment.cutmix": 0.5, "augment.erase": 0.3, "augment.rotate": 10.0}


@pytest.mark.parametrize("grad_accum", [2, 3, 5, 16])
@pytest.mark.parametrize(
    "overrides",
    [
        {"optim.name": "sgd", "optim.lr": 0.5, "optim.grad_clip": 0.0},
        {"optim.name": "sgd", "optim.lr": 0.5, "optim.grad_clip": 0.1, "loss": "sigmoid", **MIXING},
        {"optim.name": "sgd", "optim.lr": 0.5, "class_weights": "balanced", "label_smoothing": 0.1, **MIXING},
    ],
    ids=["sgd", "sigmoid with clipping", "class weights with mixing"],
)
def test_gradient_accumulation_equals_the_full_batch(
    grad_accum: int, overrides: dict[str, Any], recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing,
    cpu: Hardware,
) -> None:  # fmt: skip
    """Also with micro-batches of different sizes, one of which has all images of the rare classes."""
    labels = torch.tensor([0] * 12 + [1, 2, 3, 3])

    def state_after_two_steps(grad_accum: int) -> TrainState:
        changed = recipe.with_overrides({**overrides, "grad_accum": grad_accum})
        state = initial_state(changed, cpu)
        weights_K = balanced_class_weights(labels, 4) if changed.class_weights == "balanced" else None
        context = make_context(state, changed, preprocessing, cpu, weights_K)
        for _ in range(2):
            train_step(state, dataset.train.images[:16], labels, context)
        return state

    full, accumulated = state_after_two_steps(1), state_after_two_steps(grad_accum)
    for expected, actual in zip(full.model.parameters(), accumulated.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(accumulated.epoch_sums, full.epoch_sums, rtol=1e-5, atol=1e-5)
    assert update_norm(full, init_state(recipe, cpu, 10).vit) > 0.05


def test_the_step_runner_follows_the_schedule(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    schedule = {"optim.lr": 0.01, "optim.warmup": 2.0, "optim.schedule": "linear", "optim.name": "muon"}
    recipe = recipe.with_overrides(schedule)
    state = init_state(recipe, cpu, 5)
    runner = StepRunner(state, make_context(state, recipe, preprocessing, cpu), total_steps=5)
    rates = []
    for _ in range(5):
        runner.run(dataset.train.images[:16], dataset.train.labels[:16])
        rates.append([group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups])
        state.step += 1
    assert all(len(set(per_group)) == 1 for per_group in rates)
    expected = [0.01 / 3, 0.02 / 3, 0.01, 0.02 / 3, 0.01 / 3]
    assert [per_group[0] for per_group in rates] == pytest.approx(expected)


def test_mix_off_last_disables_mixing_at_the_end_of_the_run(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[bool] = []
    augment = ReferenceBackend.augment

    def record(self: ReferenceBackend, images: Tensor, labels: Tensor, rng: Any, mix_enabled: Tensor | None) -> Any:
        assert mix_enabled is not None
        flags.append(bool(mix_enabled))
        return augment(self, images, labels, rng, mix_enabled)

    monkeypatch.setattr(ReferenceBackend, "augment", record)
    train_tiny(**{"epochs": 4, "augment.cutmix": 1.0, "augment.mix_off_last": 0.25})
    assert flags == [True] * 18 + [False] * 6
