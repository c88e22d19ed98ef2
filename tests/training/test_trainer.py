"""The training loop: it learns, repeats itself, goes on where it was, keeps the best, and says what it did."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.common import Fit, identical, textures
from vitral.data.augment import Augment
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.evaluation.metrics import logits_of, measure
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import Run, load_model, load_weights
from vitral.training import checkpoint
from vitral.training import trainer as loop
from vitral.training.callbacks import Watch
from vitral.training.loss import balanced_weights, losses
from vitral.training.signals import Interrupted
from vitral.training.state import State, begin
from vitral.training.trainer import Task, train_step

KEYS = {
    "epoch", "step", "lr", "train_loss", "train_top1", "validation_loss", "validation_top1", "best", "seconds",
    "training_seconds", "images_per_second",
}  # fmt: skip
TIMES = ("seconds", "training_seconds", "images_per_second")

# Everything that draws random numbers or carries state from step to step.
EVERYTHING: dict[str, Any] = {
    "epochs": 3,
    "ema": 0.2,
    "label_smoothing": 0.1,
    "model.dropout": 0.1,
    "model.dropout_attention": 0.1,
    "model.dropout_embedding": 0.1,
    "model.drop_path": 0.3,
    "augment.shift": 1,
    "augment.rotate": 15.0,
    "augment.erase": 0.3,
    "augment.mixup": 0.4,
    "augment.cutmix": 0.5,
}


def weights(run: Run) -> dict[str, Tensor]:
    return load_weights(run.model / "weights.safetensors")


def without_times(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in run.metrics()]


def newest(run: Run) -> dict[str, Any]:
    path = checkpoint.newest(run.checkpoints)
    assert path is not None
    return checkpoint.load(path)


def model_of(recipe: Recipe, state: dict[str, Tensor]) -> ViT:
    model = ViT(recipe.model)
    model.load_state_dict(state)
    return model.eval()


class PressCtrlC(Watch):
    """Once so many steps are done in this process."""

    def __init__(self, after: int, times: int = 1) -> None:
        self.after, self.times, self.steps = after, times, 0

    def step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == self.after:
            for _press in range(self.times):
                signal.raise_signal(signal.SIGINT)


# ── it learns ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": 0.1},
        {"optim.name": "muon"},
        {"optim.name": "sgd", "optim.lr": 0.1, "epochs": 6},
        {"augment.shift": 1, "label_smoothing": 0.1},
        {"loss": "sigmoid", "accumulate": 4, "class_weights": "balanced"},
    ],
    ids=str,
)
def test_a_run_learns_what_can_be_learned(train_tiny: Fit, unread: Dataset, changes: dict[str, Any]) -> None:
    run = train_tiny(dataset=unread, **changes)
    rows = run.metrics()
    best = max(rows, key=lambda row: (row["validation_top1"], -row["validation_loss"]))
    assert best["validation_top1"] > 0.95
    model, card = load_model(run.path)
    assert card.epoch == best["epoch"]
    assert card.classes == unread.classes
    assert (card.trained_on, card.architecture) == ("textures", model.config)


def test_fit_never_reads_the_test_set(train_tiny: Fit, unread: Dataset) -> None:
    run = train_tiny(dataset=unread, epochs=2)
    assert not run.test_file.exists()
    with pytest.raises(AssertionError, match="was read"):
        _ = unread.test


def test_the_rows_of_metrics_have_the_documented_keys_and_count_up(train_tiny: Fit) -> None:
    run = train_tiny(epochs=3)
    rows = [json.loads(line) for line in run.metrics_file.read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() == KEYS for row in rows)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [6, 12, 18]
    assert rows[0]["seconds"] <= rows[1]["seconds"] <= rows[2]["seconds"]
    assert all(row["images_per_second"] > 0 for row in rows)
    assert rows[0]["best"] is True


def test_the_watch_sees_every_step_and_every_epoch(train_tiny: Fit) -> None:
    seen: list[tuple[int, int]] = []
    rows: list[dict[str, Any]] = []

    class Note(Watch):
        def step(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None:
            assert loss > 0
            assert images_per_second > 0
            assert seconds_left >= 0
            seen.append((epoch, step))

        def epoch(self, row: dict[str, Any], seconds_left: float) -> None:
            rows.append(row)

    run = train_tiny(watch=Note(), epochs=2)
    assert seen == [(epoch, step) for epoch in (1, 2) for step in range(1, 7)]
    assert rows == run.metrics()


# ── it repeats itself ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_same_seed_gives_the_same_bits(train_tiny: Fit, name: str) -> None:
    one = train_tiny("one", **EVERYTHING, **{"optim.name": name})
    torch.rand(3)  # what was drawn before must not matter
    two = train_tiny("two", **EVERYTHING, **{"optim.name": name})
    assert identical(weights(one), weights(two))
    assert without_times(one) == without_times(two)


def test_another_seed_gives_another_run(train_tiny: Fit) -> None:
    one, two = train_tiny("one"), train_tiny("two", seed=1)
    assert not identical(weights(one), weights(two))
    assert without_times(one) != without_times(two)


def test_the_seed_decides_the_start_and_the_augmentation(recipe: Recipe, cpu: Hardware) -> None:
    def starts(seed: int) -> tuple[Tensor, Tensor]:
        state = begin(recipe.changed({"seed": seed}), cpu, 10)
        return state.model.patch_embedding.project.weight, torch.rand(4, generator=state.draws)

    assert all(torch.equal(a, b) for a, b in zip(starts(3), starts(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(starts(3), starts(4), strict=True))


# ── it goes on where it was ────────────────────────────────────────────────────────────────────────────────────


def interrupt_and_resume(train_tiny: Fit, name: str, after: list[int], **changes: Any) -> Run:
    """Ctrl-C after so many steps of each sitting, then on to the end; other random numbers are drawn in between."""
    for sitting in after:
        with pytest.raises(Interrupted) as caught:
            train_tiny(name, watch=PressCtrlC(sitting), **changes)
        assert "--resume" in caught.value.hint
        torch.manual_seed(999)
        torch.rand(17)
    return train_tiny(name, **changes)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("adamw", [8]),  # in the middle of the second epoch
        ("adamw", [6]),  # after the last step of the first epoch, before its validation
        ("adamw", [18]),  # after the very last step
        ("adamw", [1] * 17),  # after every step
        ("sgd", [8]),
        ("sgd", [12]),
        ("muon", [8]),
        ("muon", [12]),
    ],
)
def test_an_interrupted_run_ends_like_one_that_was_not(train_tiny: Fit, name: str, after: list[int]) -> None:
    changes = EVERYTHING | {"optim.name": name}
    straight = train_tiny("straight", **changes)
    resumed = interrupt_and_resume(train_tiny, "resumed", after, **changes)
    assert identical(weights(straight), weights(resumed))
    assert without_times(straight) == without_times(resumed)
    assert load_model(straight.path)[1] == load_model(resumed.path)[1]
    last, again = newest(straight), newest(resumed)
    assert identical(last["model"], again["model"])
    assert identical(last["averaged"], again["averaged"])
    assert last["best"] == again["best"]


def test_a_run_without_averaging_goes_on_exactly_too(train_tiny: Fit) -> None:
    straight = train_tiny("straight", **EVERYTHING | {"ema": 0.0})
    resumed = interrupt_and_resume(train_tiny, "resumed", [4, 5], **EVERYTHING | {"ema": 0.0})
    assert identical(weights(straight), weights(resumed))
    assert without_times(straight) == without_times(resumed)


def test_checkpoints_by_the_clock_change_nothing_and_can_be_gone_on_from(train_tiny: Fit) -> None:
    straight = train_tiny("straight", **EVERYTHING)
    often = train_tiny("often", **EVERYTHING, checkpoint_minutes=0.0, keep=99)
    assert identical(weights(straight), weights(often))
    steps = [int(path.stem.removeprefix("step-")) for path in sorted(often.checkpoints.glob("step-*.pt"))]
    assert steps == list(range(1, 19))
    for path in sorted(often.checkpoints.glob("step-*.pt"))[8:]:  # as if the power had failed after step 8
        path.unlink()
    (often.model / "config.json").unlink()
    again = train_tiny("often", **EVERYTHING, keep=99)
    assert identical(weights(straight), weights(again))
    assert without_times(straight) == without_times(again)


def test_only_the_newest_checkpoints_are_kept(train_tiny: Fit) -> None:
    run = train_tiny(epochs=4, keep=2)
    assert [path.name for path in sorted(run.checkpoints.glob("*.pt"))] == ["step-000000018.pt", "step-000000024.pt"]


def test_seconds_are_counted_across_sittings(train_tiny: Fit, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train_tiny(watch=PressCtrlC(8))
    path = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert path is not None
    saved = checkpoint.load(path)
    torch.save(saved | {"seconds": 1000.0}, path)
    rows = train_tiny().metrics()
    assert rows[0]["seconds"] < 100
    assert all(1000 < row["seconds"] < 1100 for row in rows[1:])


def test_ctrl_c_leaves_pythons_own_handler_in_place(train_tiny: Fit) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="stopped after step 2 of 24; everything is saved"):
        train_tiny(watch=PressCtrlC(2))
    assert signal.getsignal(signal.SIGINT) is before
    train_tiny()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once(train_tiny: Fit, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            train_tiny(watch=PressCtrlC(2, times=2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") is None
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_ctrl_c_while_validating_stops_after_the_epoch(train_tiny: Fit) -> None:
    class DuringValidation(Watch):
        def epoch(self, row: dict[str, Any], seconds_left: float) -> None:
            if row["epoch"] == 4:
                signal.raise_signal(signal.SIGINT)

    straight = train_tiny("straight")
    with pytest.raises(Interrupted, match="stopped after step 24 of 24"):
        train_tiny("run", watch=DuringValidation())
    assert identical(weights(straight), weights(train_tiny("run")))


def test_fit_works_in_a_thread_where_signals_cannot_be_caught(train_tiny: Fit) -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(train_tiny(epochs=1)))
    thread.start()
    thread.join()
    assert runs[0].finished


def test_a_checkpoint_from_another_kind_of_device_still_goes_on(
    train_tiny: Fit, tmp_path: Path, dataset: Dataset
) -> None:
    """A GPU's generator has another kind of state: its draws cannot be continued on a CPU, but the training can."""
    with pytest.raises(Interrupted):
        train_tiny(watch=PressCtrlC(8), **EVERYTHING)
    folder = tmp_path / "run" / "checkpoints"
    path = checkpoint.newest(folder)
    assert path is not None
    saved = checkpoint.load(path)
    saved["draws"] = torch.zeros(16, dtype=torch.uint8)
    saved["random"]["gpu"] = torch.zeros(16, dtype=torch.uint8)
    torch.save(saved, path)
    run = train_tiny(**EVERYTHING)
    assert [row["step"] for row in run.metrics()] == [6, 12, 18]


# ── it keeps the best ──────────────────────────────────────────────────────────────────────────────────────────


def rates(monkeypatch: pytest.MonkeyPatch, *of_epoch: float) -> None:
    """A learning rate for each epoch of six steps, in place of the schedule."""
    monkeypatch.setattr(loop, "learning_rate", lambda step, steps, optim: of_epoch[step // 6])


@pytest.mark.parametrize("ema", [0.0, 0.1])
def test_the_best_epoch_by_validation_is_kept_though_later_ones_are_worse(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, ema: float, recipe: Recipe
) -> None:
    rates(monkeypatch, 1e-2, 1e-2, 1e-2, 3.0, 3.0)
    run = train_tiny(epochs=5, keep=9, ema=ema)
    rows = run.metrics()
    assert rows[4]["validation_top1"] < rows[2]["validation_top1"]
    best = max(rows, key=lambda row: (row["validation_top1"], -row["validation_loss"]))
    assert [row["epoch"] for row in rows if row["best"]][-1] == best["epoch"] <= 3
    assert load_model(run.path)[1].epoch == best["epoch"]
    then = checkpoint.load(run.checkpoints / f"step-{best['step']:09d}.pt")
    assert identical(weights(run), then["averaged" if ema else "model"])


def test_of_epochs_with_equal_accuracy_the_lower_loss_is_the_better(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all is right, training on still lowers the loss."""
    run = train_tiny(epochs=6)
    rows = [row for row in run.metrics() if row["validation_top1"] == 1.0]
    assert len(rows) > 1
    assert load_model(run.path)[1].epoch == min(rows, key=lambda row: row["validation_loss"])["epoch"]


def test_the_best_so_far_survives_an_interruption(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    rates(monkeypatch, 1e-2, 1e-2, 3.0, 3.0)
    straight = train_tiny("straight")
    resumed = interrupt_and_resume(train_tiny, "resumed", [20])
    assert load_model(resumed.path)[1].epoch == load_model(straight.path)[1].epoch <= 2
    assert identical(weights(straight), weights(resumed))


def test_the_averaged_weights_are_the_ones_validated(
    train_tiny: Fit, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    run = train_tiny(epochs=1, ema=0.5)
    saved, (row,) = newest(run), run.metrics()

    def loss(of: str) -> float:
        logits = logits_of(model_of(recipe, saved[of]), dataset.validation.images, preprocessing, cpu)
        return measure(logits, dataset.validation.labels, dataset.classes).loss

    assert loss("averaged") == row["validation_loss"]
    assert loss("model") != row["validation_loss"]


# ── it computes what it says ───────────────────────────────────────────────────────────────────────────────────


def one_step(recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware) -> tuple[State, ViT]:
    """A state after one step on 16 images, and the model as it was before; its head is not zero as at the start."""
    state = begin(recipe, cpu, 10)
    with torch.no_grad():
        state.model.head.out.weight.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, operator]
    before = model_of(recipe, {name: tensor.clone() for name, tensor in state.model.state_dict().items()})
    train_step(
        state.model, state, dataset.train.images[:16], dataset.train.labels[:16], Task(recipe, preprocessing, cpu)
    )
    return state, before


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_of_a_step_is_the_smoothed_cross_entropy(
    smoothing: float, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    plan = recipe.changed({"label_smoothing": smoothing})
    state, before = one_step(plan, dataset, preprocessing, cpu)
    labels = dataset.train.labels[:16]
    log_p = before(preprocessing.normalise(dataset.train.images[:16])).double().log_softmax(dim=1)
    target = torch.full((16, 4), smoothing / 4, dtype=torch.float64)
    target[torch.arange(16), labels] += 1 - smoothing
    loss, right, images = state.totals.tolist()
    assert loss / 16 == pytest.approx(-(target * log_p).sum(dim=1).mean().item(), rel=1e-5)
    assert right == (log_p.argmax(dim=1) == labels).sum().item()
    assert images == 16


def test_an_adamw_step_is_the_step_of_the_gradient_of_that_loss(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    plan = recipe.changed({"optim.lr": 0.01, "optim.weight_decay": 0.0, "optim.clip": 0.0})
    state, before = one_step(plan, dataset, preprocessing, cpu)
    F.cross_entropy(before(preprocessing.normalise(dataset.train.images[:16])), dataset.train.labels[:16]).backward()
    for old, new in zip(before.parameters(), state.model.parameters(), strict=True):
        assert old.grad is not None
        # The first step of Adam: lr · g / (|g| + ε), whatever the size of g.
        torch.testing.assert_close(new, old - 0.01 * old.grad / (old.grad.abs() + 1e-8), rtol=1e-3, atol=1e-4)
        assert new.grad is None


def moved(state: State, before: ViT) -> float:
    pairs = zip(state.model.parameters(), before.parameters(), strict=True)
    return torch.cat([(a - b).flatten() for a, b in pairs]).norm().item()


def test_clipping_bounds_the_gradient_and_leaves_smaller_ones_alone(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    plain = recipe.changed({"optim.name": "sgd", "optim.lr": 1.0, "optim.weight_decay": 0.0, "optim.clip": 0.0})
    free = moved(*one_step(plain, dataset, preprocessing, cpu))
    for clip in (0.01, 0.5):
        assert free > clip
        bound = moved(*one_step(plain.changed({"optim.clip": clip}), dataset, preprocessing, cpu))
        assert bound == pytest.approx(clip, rel=1e-3)
    loose = moved(*one_step(plain.changed({"optim.clip": 1e6}), dataset, preprocessing, cpu))
    assert loose == free


def test_training_figures_of_an_epoch_are_those_of_the_model_on_the_training_set(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing,
    cpu: Hardware,
) -> None:  # fmt: skip
    """One epoch of learning, one that stands still: its figures can be computed afterwards."""
    rates(monkeypatch, 1e-2, 0.0)
    labels = (dataset.train.labels + (torch.arange(96) % 5 == 0)) % 4  # a fifth of them are wrong
    run = train_tiny(epochs=2, dataset=replace(dataset, train=replace(dataset.train, labels=labels)))
    row = run.metrics()[1]
    logits = logits_of(model_of(recipe, newest(run)["model"]), dataset.train.images, preprocessing, cpu)
    expected = measure(logits, labels, dataset.classes)
    assert row["lr"] == 0.0
    assert 0.3 < expected.top1 < 1
    assert row["train_loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert row["train_top1"] == pytest.approx(expected.top1, abs=1e-9)


def test_the_learning_rate_of_each_step_is_the_schedules(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def note(step: int, steps: int, optim: Any) -> float:
        asked.append((step, steps))
        return 1e-3 * (step + 1)

    monkeypatch.setattr(loop, "learning_rate", note)
    run = train_tiny(epochs=2, **{"optim.name": "muon"})
    assert asked == [(step, 12) for step in range(12)]
    assert [row["lr"] for row in run.metrics()] == [pytest.approx(6e-3), pytest.approx(12e-3)]


def test_the_last_part_of_a_run_mixes_no_images(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    mixing: list[bool] = []
    real = Augment.mix

    def noting(self: Augment, images: Tensor, targets: Tensor, draws: Any, mixes: Tensor | None) -> Any:
        assert mixes is not None
        mixing.append(bool(mixes))
        return real(self, images, targets, draws, mixes)

    monkeypatch.setattr(Augment, "mix", noting)
    train_tiny(**{"epochs": 4, "augment.cutmix": 1.0, "augment.unmixed": 0.25})
    assert mixing == sorted(mixing, reverse=True)
    assert sum(mixing) == len(mixing) * 3 // 4


def test_a_batch_larger_than_the_set_is_the_whole_set(train_tiny: Fit) -> None:
    run = train_tiny(batch=10_000, epochs=3)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert load_model(run.path)[1].epoch >= 1


def test_images_that_fill_no_batch_wait_for_another_epoch(train_tiny: Fit, dataset: Dataset) -> None:
    seen: list[int] = []

    class Note(Watch):
        def step(self, epoch: int, step: int, *_: Any) -> None:
            seen.append(step)

    train_tiny(dataset=replace(dataset, train=textures(25, seed=1)), batch=10, epochs=2, watch=Note())
    assert seen == [1, 2, 1, 2]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_empty_split_is_refused_before_the_first_step(train_tiny: Fit, dataset: Dataset, split: str) -> None:
    empty: dict[str, Any] = {split: textures(0, seed=1)}

    class NoSteps(Watch):
        def step(self, *_: Any) -> None:
            raise AssertionError("it trained")

    with pytest.raises(VitralError, match=f"no {'training' if split == 'train' else 'validation'} images"):
        train_tiny(dataset=replace(dataset, **empty), watch=NoSteps())


def test_bf16_learns_too_and_keeps_its_weights_in_fp32(
    tmp_path: Path, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    run = Run.create(tmp_path, "bf16")
    loop.fit(recipe, dataset, preprocessing, run, replace(cpu, precision="bf16"))
    assert max(row["validation_top1"] for row in run.metrics()) > 0.95
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}


# ── losses, weights of classes, batches in parts ───────────────────────────────────────────────────────────────


def test_the_losses_are_those_of_torch_for_hard_labels() -> None:
    draws = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 7, generator=draws) * 3, torch.randint(0, 7, (50,), generator=draws)
    weights = torch.rand(7, generator=draws) + 0.1
    targets = F.one_hot(labels, 7).float()
    torch.testing.assert_close(
        losses(logits, targets, "softmax", weights_K=weights),
        F.cross_entropy(logits, labels, weight=weights, reduction="none"),
    )
    torch.testing.assert_close(
        losses(logits, targets, "softmax", 0.1), F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    )
    p = logits.double().sigmoid()
    by_hand = -torch.where(targets > 0, p, 1 - p).log().sum(dim=1)
    torch.testing.assert_close(losses(logits, targets, "sigmoid").double(), by_hand, rtol=1e-4, atol=1e-4)


def test_weights_of_classes_are_those_of_scikit_learn() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = torch.tensor([0] * 50 + [1] * 5 + [3] * 20)
    found = balanced_weights(labels, 4)
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels.numpy())
    assert found[[0, 1, 3]].tolist() == pytest.approx(expected.tolist())
    assert found[labels].mean().item() == pytest.approx(1)


def test_the_validation_loss_is_the_kind_that_is_trained(train_tiny: Fit, dataset: Dataset, cpu: Hardware) -> None:
    run = train_tiny(loss="sigmoid", label_smoothing=0.1, epochs=1)
    model, card = load_model(run.model)
    logits = logits_of(model, dataset.validation.images, card.preprocessing, cpu)
    p, right = logits.double().sigmoid(), F.one_hot(dataset.validation.labels, 4) > 0
    by_hand = -torch.where(right, p, 1 - p).log().sum(dim=1).mean().item()
    assert run.metrics()[0]["validation_loss"] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("classes", [2, 4, 1000, 21_843])
def test_a_sigmoid_head_starts_with_even_odds(classes: int, recipe: Recipe, cpu: Hardware) -> None:
    state = begin(recipe.changed({"loss": "sigmoid", "model.classes": classes}), cpu, 10)
    bias = state.model.head.out.bias  # type: ignore[union-attr]
    torch.testing.assert_close(bias.sigmoid(), torch.full((classes,), 1 / classes))  # type: ignore[operator]
    if classes in (1000, 21_843):
        assert bias[0].item() == pytest.approx(-6.9 if classes == 1000 else -10.0, abs=0.02)  # type: ignore[index]


def test_a_head_that_has_learned_keeps_its_bias(recipe: Recipe, cpu: Hardware) -> None:
    learned = begin(recipe, cpu, 10).model.state_dict()
    learned["head.out.weight"] += 1
    state = begin(recipe.changed({"loss": "sigmoid"}), cpu, 10, learned)
    assert state.model.head.out.bias.abs().max() == 0  # type: ignore[union-attr, operator]


MIXED = {"augment.mixup": 0.5, "augment.cutmix": 0.5, "augment.erase": 0.3, "augment.rotate": 10.0}


@pytest.mark.parametrize("parts", [2, 3, 5, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {"optim.name": "sgd", "optim.lr": 0.5, "optim.clip": 0.0},
        {"optim.name": "sgd", "optim.lr": 0.5, "optim.clip": 0.1, "loss": "sigmoid", **MIXED},
        {"optim.name": "sgd", "optim.lr": 0.5, "class_weights": "balanced", "label_smoothing": 0.1, **MIXED},
    ],
    ids=["plain", "sigmoid, clipped", "weighted, mixed"],
)
def test_a_batch_in_parts_is_the_large_batch(
    parts: int, changes: dict[str, Any], recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    """Also where the parts are of unequal size, and where one part has the rare classes."""
    labels = torch.tensor([0] * 12 + [1, 2, 3, 3])

    def after(accumulate: int) -> State:
        plan = recipe.changed({**changes, "accumulate": accumulate})
        state = begin(plan, cpu, 10)
        with torch.no_grad():
            state.model.head.out.weight.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, operator]
        weights = balanced_weights(labels, 4) if plan.class_weights == "balanced" else None
        for _ in range(2):
            train_step(state.model, state, dataset.train.images[:16], labels, Task(plan, preprocessing, cpu, weights))
        return state

    whole, split = after(1), after(parts)
    for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(split.totals, whole.totals, rtol=1e-5, atol=1e-5)
    assert moved(whole, begin(recipe, cpu, 10).model) > 0.05


def test_balanced_weights_pull_a_run_towards_rare_classes(train_tiny: Fit, dataset: Dataset) -> None:
    """A set in which all images look alike: the model can only learn how often a class occurs."""
    grey = torch.full((96, 1, 8, 8), 128, dtype=torch.uint8)
    labels = torch.tensor([0] * 60 + [1] * 20 + [2] * 12 + [3] * 4)
    alike = replace(dataset, train=replace(dataset.train, images=grey, labels=labels))

    def answer(**changes: Any) -> Tensor:
        run = train_tiny(f"run-{changes}", dataset=alike, epochs=30, batch=96, **changes)
        return model_of(read_recipe(run.recipe_file), newest(run)["model"])(torch.zeros(1, 1, 8, 8)).softmax(dim=1)[0]

    torch.testing.assert_close(answer(), torch.tensor([60, 20, 12, 4]) / 96, atol=0.03, rtol=0)
    torch.testing.assert_close(answer(class_weights="balanced"), torch.full((4,), 0.25), atol=0.03, rtol=0)


def saved_bytes(state: State, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware) -> int:
    """What one forward pass keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        state.model(preprocessing.normalise(dataset.train.images)).sum()
    return sum(sizes.values()) - sum(p.nbytes for p in state.model.parameters())


def test_recomputed_activations_give_the_same_bits_with_less_memory(
    train_tiny: Fit, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    kept, again = (train_tiny(str(recompute), **EVERYTHING, recompute=recompute) for recompute in (False, True))
    assert identical(weights(kept), weights(again))
    assert without_times(kept) == without_times(again)
    plain, small = (recipe.changed({"model.depth": 6, "recompute": recompute}) for recompute in (False, True))
    needs = [saved_bytes(begin(r, cpu, 10), r, dataset, preprocessing, cpu) for r in (plain, small)]
    assert needs[1] < 0.25 * needs[0]


def test_everything_new_goes_on_exactly_too(train_tiny: Fit) -> None:
    new: dict[str, Any] = {
        "loss": "sigmoid", "sampling": "balanced", "augment.repeat": 3, "accumulate": 3, "recompute": True,
        "on_nan": "rollback",
    }  # fmt: skip
    straight = train_tiny("straight", **EVERYTHING, **new)
    resumed = interrupt_and_resume(train_tiny, "resumed", [4, 5], **EVERYTHING, **new)
    assert identical(weights(straight), weights(resumed))
    assert without_times(straight) == without_times(resumed)


# ── TensorBoard ────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensorboard_gets_the_rows_on_request(train_tiny: Fit) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_tiny(epochs=2, tensorboard=True)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "train_top1", "validation_loss", "validation_top1", "lr"):
        written = [(event.step, event.value) for event in events.Scalars(name)]
        assert written == [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in run.metrics()]


def test_without_request_there_is_no_tensorboard_folder(train_tiny: Fit) -> None:
    assert not (train_tiny(epochs=1).path / "tensorboard").exists()


def test_a_missing_tensorboard_names_the_install_line(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(VitralError, match="TensorBoard is not installed") as caught:
        train_tiny(tensorboard=True)
    assert "vitral[tensorboard]" in caught.value.hint


def test_with_nothing_held_out_all_images_train_and_the_last_weights_are_the_model(
    train_tiny: Fit, dataset: Dataset
) -> None:
    nobody = Split(images=dataset.train.images[:0], labels=dataset.train.labels[:0])
    with pytest.raises(VitralError, match="no validation images"):
        train_tiny("asked", dataset=replace(dataset, validation=nobody))
    changes = {"epochs": 3, "data.validation": 0.0, "checkpoint_epochs": 0}
    run = train_tiny(dataset=replace(dataset, validation=nobody), **changes)
    rows = run.metrics()
    assert not any("validation_loss" in row for row in rows)
    assert [row["best"] for row in rows] == [False, False, True]
    assert load_model(run.path)[1].epoch == 3
    assert checkpoint.newest(run.checkpoints) is None


def test_training_is_timed_without_the_steps_that_compile(train_tiny: Fit) -> None:
    rows = train_tiny(epochs=3).metrics()
    assert all(row["training_seconds"] > 0 for row in rows[1:])
    assert sum(row["training_seconds"] for row in rows[1:]) <= rows[-1]["seconds"]


def test_blocks_that_begin_as_the_identity_leave_the_tokens_alone(recipe: Recipe, cpu: Hardware) -> None:
    model = begin(recipe.changed({"start": ("identity",)}), cpu, 10).model.eval()
    trace = model.trace(torch.randn(2, recipe.model.channels, *recipe.model.image_size))
    assert all(torch.equal(tokens, trace.tokens[0]) for tokens in trace.tokens)
