"""What goes wrong in the life of a run: killed, interrupted, out of space, diverged, damaged, moved. Nothing is lost
that was saved, and the person reads two lines that say what to do."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from support.common import Fit, identical, leave_out_pictures
from support.processes import Process
from vitral import api as workshop
from vitral import api_train as making
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.device.select import select_hardware
from vitral.errors import VitralError
from vitral.runs.model_io import load_weights
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training import trainer as loop
from vitral.training.callbacks import Callback
from vitral.training.provenance import record_precision
from vitral.training.signals import Interrupted

# Fifteen steps of some milliseconds, with a checkpoint after each, and everything that draws random numbers or carries
# something from step to step.
TRAIN = [
    "train", "digits", "--data.validation", "0.5", "--epochs", "3", "--batch", "128", "--model.width", "16",
    "--model.depth", "2", "--model.heads", "2", "--model.dropout", "0.1", "--model.drop-path", "0.1",
    "--augment.mixup", "0.3", "--augment.repeat", "2", "--augment.jitter", "0.2", "--augment.policy.name",
    "randaugment", "--accumulate", "3", "--recompute", "--sampling", "balanced", "--loss", "sigmoid", "--device", "cpu",
    "--checkpoint-minutes", "0",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("no_pictures")


def vitral(*words: str | Path, expect: int = 0) -> None:
    """The command line, in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    assert stop.value.code == expect


def complaint(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr: what happened, and what to do."""
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("       ") for line in lines[1:])
    assert "Traceback" not in "".join(lines)
    return lines


def bits(path: Path) -> bytes:
    return (path / "model" / "weights.safetensors").read_bytes()


def told(run: Run) -> list[dict[str, Any]]:
    timeless = [dict(row, seconds=0, training_seconds=0, images_per_second=0) for row in run.load_metrics()]
    assert timeless
    return timeless


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training, left alone."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        vitral(*TRAIN, "--out", path)
    return Run.open(path)


def wait_until(process: Process, what: Callable[[], bool]) -> None:
    """Looks often: what is waited for may last a few milliseconds."""
    limit = time.monotonic() + 60
    while True:
        for _ in range(50):
            if what():
                return
            time.sleep(0.001)
        assert process.poll() is None, f"it ended before: {process.communicate()}"
        assert time.monotonic() < limit, "it never happened"


def rows(path: Path) -> int:
    return (path / "metrics.jsonl").read_bytes().count(b"\n") if (path / "metrics.jsonl").exists() else 0


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "before the first checkpoint": lambda path: (path / "recipe.toml").exists(),
    "while a checkpoint is written": lambda path: any((path / "checkpoints").glob(".step-*")),
    "when all epochs are done": lambda path: (path / "checkpoints" / "step-000000015.pt").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, undisturbed: Run, moment: str) -> None:
    path = tmp_path / "run"
    process = Process(*TRAIN, "--out", path)
    try:
        wait_until(process, lambda: MOMENTS[moment](path))
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    if not (path / "test.json").exists():  # on a busy machine the last moment may be missed
        vitral("train", "--resume", path)
    assert bits(path) == bits(undisturbed.path)
    assert told(Run(path)) == told(undisturbed)
    assert (path / "test.json").read_bytes() == undisturbed.test_file.read_bytes()
    if moment != "when all epochs are done":  # then no checkpoint is written any more that could clear up
        assert [left.name for left in (path / "checkpoints").glob(".*")] == [".lock"]


def test_a_run_killed_again_and_again_at_random_resumes_to_the_same_bits(tmp_path: Path, undisturbed: Run) -> None:
    """Three kills, each some milliseconds after a checkpoint that nobody chose; the third process ends it."""
    path, draws = tmp_path / "run", random.Random()  # other moments each time
    for words in ([*TRAIN, "--out", path], ["train", "--resume", path]):
        process = Process(*words)
        done = checkpoint.newest(path / "checkpoints")
        reached = int(done.stem.removeprefix("step-")) if done else 0
        target = min(reached + draws.randint(1, 6), 15)
        try:
            wait_until(process, lambda target=target: any((path / "checkpoints").glob(f"step-*{target:02}.pt")))  # type: ignore[misc]
            time.sleep(draws.random() * 0.02)
        finally:
            process.kill()
            process.communicate()
    if not (path / "test.json").exists():
        vitral("train", "--resume", path)
    assert bits(path) == bits(undisturbed.path)
    assert told(Run(path)) == told(undisturbed)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a scheduler"])
def test_who_asks_to_stop_gets_a_line_that_resumes_to_the_same_bits(
    tmp_path: Path, undisturbed: Run, asked: signal.Signals
) -> None:
    path = tmp_path / "run"
    process = Process(*TRAIN, "--out", path)
    try:
        wait_until(process, lambda: rows(path) >= 1)
        process.send_signal(asked)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    first, second = said.splitlines()
    assert "stopped after step" in first
    assert "of 15; everything is saved" in first
    assert second.strip() == f"go on with: vitral train --resume {path}"
    vitral(*second.split("vitral ")[1].split())
    assert bits(path) == bits(undisturbed.path)
    assert told(Run(path)) == told(undisturbed)


# ── no space ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The system refuses to write more than this to a file, as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0.1, 0.5, 0.9, 0.999])
def test_a_disk_that_fills_up_leaves_the_last_checkpoint_whole(train_tiny: Fit, tmp_path: Path, room: float) -> None:
    straight = train_tiny("straight")
    checkpoints = tmp_path / "run" / "checkpoints"

    class Fill(Callback):
        def __init__(self) -> None:
            self.limit = files_no_larger_than(10**9)

        def step(self, epoch: int, step: int, *_: Any) -> None:
            if (epoch, step) == (3, 2):
                path = checkpoint.newest(checkpoints)
                assert path is not None
                self.limit = files_no_larger_than(int(path.stat().st_size * room))
                self.limit.__enter__()

    watch = Fill()
    try:
        with pytest.raises(VitralError, match=r"cannot (write|save)") as caught:
            train_tiny("run", watch=watch)
    finally:
        watch.limit.__exit__(None, None, None)
    assert "File too large" in caught.value.what
    assert caught.value.hint.startswith("free some space")
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "best.safetensors",
        "step-000000006.pt",
        "step-000000012.pt",
    ]
    assert checkpoint.load(checkpoints / "step-000000012.pt")["step"] == 12
    again = train_tiny("run")
    assert bits(again.path) == bits(straight.path)
    assert told(again) == told(straight)


def test_a_full_disk_on_the_command_line_is_two_lines_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    vitral(*TRAIN, "--out", tmp_path / "run", expect=2)
    first, second = complaint(capsys)
    assert "cannot save the checkpoint" in first
    assert "No space left on device" in first
    assert "free some space" in second


# ── divergence ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_training_that_diverges_stops_in_two_lines_that_name_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vitral(*TRAIN, "--optim.lr", "1e30", "--optim.warmup", "0", "--out", tmp_path / "run", expect=2)
    first, second = complaint(capsys)
    assert "the loss is not finite at step 2, first in encoder.blocks.0.norm1 (activation): the training div" in first
    assert "try a lower --optim.lr, or: vitral train --resume" in second
    assert "step-000000001.pt" in second


def explode_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "learning_rate", lambda now, steps, optim: 1e30 if now == step else 1e-2)


def finite(path: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in checkpoint.load(path)["model"].values())


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (
            8,
            "the loss is not finite at step 10",
        ),  # counted from 1: the ninth step throws the weights, the tenth sees it
        (11, "the validation loss is not finite after step 12"),  # an epoch's last: its validation sees it
    ],
)
@pytest.mark.parametrize("ema", [0.0, 0.1])
def test_the_state_before_a_divergence_is_kept_and_named(
    train_tiny: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, what: str, ema: float
) -> None:
    explode_at(at, monkeypatch)
    with pytest.raises(VitralError, match=what) as caught:
        train_tiny("run", ema=ema)
    run = Run.open(tmp_path / "run")
    newest = checkpoint.newest(run.checkpoint_dir)
    assert newest == run.checkpoint_dir / "step-000000006.pt"
    assert str(newest) in caught.value.hint
    assert finite(newest)
    assert [row["epoch"] for row in run.load_metrics()] == [1]
    assert all(math.isfinite(row["validation_loss"]) for row in run.load_metrics())
    monkeypatch.setattr(loop, "learning_rate", lambda *_: 1e-2)
    assert train_tiny("run", ema=ema).has_model


def test_an_image_that_is_not_a_number_stops_the_first_step(
    train_tiny: Fit, preprocessing: Preprocessing, tmp_path: Path
) -> None:
    with pytest.raises(VitralError, match="the loss is not finite at step 1, first in the images:") as caught:
        train_tiny("run", preprocessing=replace(preprocessing, mean=(math.nan,)))
    assert "nothing was saved before" in caught.value.hint
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_diverged_state_is_not_saved_though_nobody_looked_yet(
    train_tiny: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is looked at every 50 steps: a checkpoint or Ctrl-C between two looks must look first."""
    explode_at(7, monkeypatch)
    look = loop.check_finite

    def seldom(state: loop.TrainState) -> None:
        if sys._getframe(1).f_code.co_name != "fit":
            look(state)

    monkeypatch.setattr(loop, "check_finite", seldom)

    class Press(Callback):
        def step(self, epoch: int, step: int, *_: Any) -> None:
            if (epoch, step) == (2, 5):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(VitralError, match="not finite at step 9"):
        train_tiny("run", watch=Press())
    newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000000006.pt"


def poison(name: str, kind: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `step` on, an activation or a gradient of the module is not a number, whoever computes it."""

    def spoil(module: nn.Module, _: Any, made: Tensor) -> Tensor | None:
        if kind == "activation":
            return made + math.nan
        made.register_hook(lambda gradient: gradient * math.nan)
        return None

    def hooked(*given: Any) -> None:
        state: loop.TrainState = given[1]
        if state.step == step:
            state.model.get_submodule(name).register_forward_hook(spoil)
        train_step(*given)

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", hooked)


@pytest.mark.parametrize("kind", ["activation", "gradient"])
@pytest.mark.parametrize("name", ["patch_embedding.project", "encoder.blocks.1.mlp.expand", "head.out"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_module_that_broke_first_is_named_and_no_weight_was_moved_by_it(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, optimizer: str
) -> None:
    """Though nobody looks for a while, as on a GPU: the weights stay those before the bad step."""
    states: list[loop.TrainState] = []
    begin = loop.init_state
    monkeypatch.setattr(loop, "begin", lambda *given: states.append(begin(*given)) or states[0])  # type: ignore[func-returns-value]
    poison(name, kind, 7, monkeypatch)
    look = loop.check_finite
    kept: dict[int, dict[str, Tensor]] = {}

    def seldom(state: loop.TrainState) -> None:
        kept[state.step] = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        if state.step > 10:
            look(state)

    monkeypatch.setattr(loop, "check_finite", seldom)
    with pytest.raises(VitralError, match=rf"not finite at step 8, first in {name} \({kind}\): the training div"):
        train_tiny("run", **{"optim.name": optimizer, "augment.mixup": 0.2, "ema": 0.1, "model.dropout": 0.1})
    state = states[0]
    assert not identical(kept[7], kept[6])
    assert identical(kept[11], kept[7])
    assert state.ema is not None
    assert all(bool(tensor.isfinite().all()) for tensor in state.ema.model.state_dict().values())
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_attention_that_breaks_is_named_and_not_the_layer_behind_it(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, **how: attend(*given, **how) / 0)
    with pytest.raises(VitralError, match=r"step 1, first in encoder\.blocks\.0\.attention \(activation\)"):
        train_tiny("run")


def test_a_loss_out_of_all_proportion_stops_too(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "learning_rate", lambda now, steps, optim: 1e6 if now == 8 else 1e-2)
    with pytest.raises(VitralError, match=r"the loss is \S+e\+\d+ at step 10, the largest value is .*, in \S+: the tr"):
        train_tiny("run")


# ── rolling back ───────────────────────────────────────────────────────────────────────────────────────────────


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def said(self, what: str) -> None:
        self.notes.append(what)


def too_fast(monkeypatch: pytest.MonkeyPatch, at: int, bearable: float) -> None:
    """At one step the schedule asks for a rate that throws the weights, unless it is lowered below `bearable`."""
    sets = loop.set_learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda now, steps, optim: 1.0 if now == at else 1e-2)
    monkeypatch.setattr(
        loop, "set_learning_rate", lambda which, lr: sets(which, 1e30 if lr > bearable else min(lr, 1e-2))
    )


def test_a_rollback_goes_on_from_the_last_checkpoint_at_half_the_rate(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_fast(monkeypatch, at=8, bearable=0.6)
    watch = Notes()
    run = train_tiny("run", watch=watch, on_nan="rollback")
    assert len(watch.notes) == 1
    assert "the loss is not finite at step 10, first in " in watch.notes[0]
    assert watch.notes[0].endswith("back to step 6, with 1/2 of the learning rate")
    assert [row["step"] for row in run.load_metrics()] == [6, 12, 18, 24]
    assert [row["lr"] for row in run.load_metrics()] == [1e-2, *[pytest.approx(0.5e-2)] * 3]
    assert run.load_metrics()[-1]["validation_top1"] > 0.9


@pytest.mark.parametrize("at", [0, 2, 11])
def test_a_rollback_finds_a_state_in_the_first_epoch_and_after_a_bad_validation(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    too_fast(monkeypatch, at, bearable=0.3)
    watch = Notes()
    run = train_tiny("run", watch=watch, on_nan="rollback", keep=1)
    assert len(watch.notes) == 2
    assert f"back to step {0 if at < 6 else 6}, with 1/4 of" in watch.notes[1]
    assert run.has_model
    assert len(run.load_metrics()) == 4


def test_a_checkpoint_that_does_not_help_is_given_up_for_the_one_before(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved between the step that threw the weights and the one that showed it."""
    too_fast(monkeypatch, at=8, bearable=0.3)
    watch = Notes()
    save = checkpoint.save

    def only_some(folder: Path, step: int, *rest: Any) -> Path:
        return save(folder, step, *rest) if step in (0, 6, 9) or step % 6 == 0 else folder

    monkeypatch.setattr(checkpoint, "save", only_some)
    assert train_tiny("run", watch=watch, on_nan="rollback", keep=5, checkpoint_minutes=0.0).has_model
    assert [note.split(": ")[-1].split(",")[0] for note in watch.notes] == ["back to step 9", "back to step 6"]


def test_what_never_goes_well_stops_after_some_rollbacks(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, preprocessing: Preprocessing
) -> None:
    watch = Notes()
    with pytest.raises(VitralError, match="first in the images") as caught:
        train_tiny("run", watch=watch, on_nan="rollback", preprocessing=replace(preprocessing, mean=(math.nan,)))
    assert len(watch.notes) == loop.MAX_ROLLBACKS
    assert "1/32 of the learning rate did not help either" in caught.value.hint


def test_a_process_that_dies_right_after_a_rollback_has_lowered_the_rate(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_fast(monkeypatch, at=8, bearable=0.6)
    straight = train_tiny("straight", on_nan="rollback")

    class Die(Callback):
        def said(self, what: str) -> None:
            raise MemoryError(what)

    with pytest.raises(MemoryError):
        train_tiny("run", on_nan="rollback", watch=Die())
    again = train_tiny("run", on_nan="rollback")
    assert bits(again.path) == bits(straight.path)
    assert told(again) == told(straight)


@pytest.mark.parametrize("after", [7, 10, 12])
def test_a_lowered_rate_survives_an_interruption(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    too_fast(monkeypatch, at=8, bearable=0.6)
    straight = train_tiny("straight", on_nan="rollback")

    class Press(Callback):
        steps = 0

        def step(self, *_: Any) -> None:
            self.steps += 1
            if self.steps == after:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        train_tiny("run", on_nan="rollback", watch=Press())
    again = train_tiny("run", on_nan="rollback")
    if after != 7:  # Ctrl-C leaves a checkpoint of its own: then step 7 is gone back to, not 6
        assert bits(again.path) == bits(straight.path)
        assert told(again) == told(straight)
    assert again.load_metrics()[-1]["lr"] == pytest.approx(0.5e-2)


# ── resuming what cannot be resumed ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stopped(train_tiny: Fit, tmp_path: Path) -> Path:
    """A run that Ctrl-C stopped in its second epoch."""

    class Press(Callback):
        def step(self, epoch: int, step: int, *_: Any) -> None:
            if (epoch, step) == (2, 3):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        train_tiny("stopped", watch=Press())
    return tmp_path / "stopped"


@pytest.fixture
def half_digits(tmp_path: Path, undisturbed: Run) -> Path:
    """The undisturbed run, as it was before its model was written."""
    path = tmp_path / "half"
    for name in ("recipe.toml", "environment.json", "metrics.jsonl", "checkpoints/best.safetensors"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes((undisturbed.path / name).read_bytes())
    for file in undisturbed.checkpoint_dir.glob("step-*.pt"):
        (path / "checkpoints" / file.name).write_bytes(file.read_bytes())
    return path


def test_a_half_written_run_cannot_predict_and_says_how_to_go_on(
    stopped: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    vitral("predict", stopped, tmp_path / "x.png", expect=2)
    assert complaint(capsys) == [
        f"error: {stopped} has no finished model: training stopped in epoch 2",
        f"       go on with: vitral train --resume {stopped}",
    ]


@pytest.mark.parametrize("command", ["predict", "evaluate", "train --resume"])
def test_a_missing_run_suggests_those_that_are_there(
    command: str, undisturbed: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["x.png"] if command == "predict" else []
    vitral(*command.split(), undisturbed.path.parent / "rnu", *files, expect=2)
    first, second = complaint(capsys)
    assert f"{undisturbed.path.parent / 'rnu'}" in first
    assert "there is no run" in first
    assert second.strip() == f"Newest runs: {undisturbed}"


def test_a_corrupt_newest_checkpoint_says_what_to_do_and_doing_it_helps(
    half_digits: Path, undisturbed: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint.newest(half_digits / "checkpoints")
    assert newest is not None
    newest.write_bytes(newest.read_bytes()[:1000])
    vitral("train", "--resume", half_digits, expect=2)
    first, second = complaint(capsys)
    assert f"the checkpoint {newest} cannot be read" in first
    assert second.strip() == "delete it to go on from the one before"
    newest.unlink()
    vitral("train", "--resume", half_digits)
    assert bits(half_digits) == bits(undisturbed.path)
    assert re.search(r"goes on after step \d+ of \d+\n", capsys.readouterr().out)


def test_a_checkpoint_of_another_format_stops_the_resume(half_digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = checkpoint.newest(half_digits / "checkpoints")
    assert newest is not None
    torch.save(checkpoint.load(newest) | {"format": 2}, newest)
    vitral("train", "--resume", half_digits, expect=2)
    first, second = complaint(capsys)
    assert f"{newest} has format 2; this vitral reads format 1" in first
    assert "version of vitral that made it" in second


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_checkpoint_that_would_run_code_is_refused_unrun(
    half_digits: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mark = tmp_path / "it ran"
    (half_digits / "checkpoints" / "step-999999999.pt").write_bytes(pickle.dumps(Harmful(mark)))
    vitral("train", "--resume", half_digits, expect=2)
    assert "step-999999999.pt cannot be read" in complaint(capsys)[0]
    assert not mark.exists()


@pytest.mark.parametrize(
    "change",
    [{"model.width": 32}, {"optim.name": "muon"}, {"ema": 0.5}, {"optim.name": "sgd", "model.depth": 1}],
    ids=str,
)
def test_a_recipe_that_was_changed_under_a_run_no_longer_fits_its_checkpoints(
    stopped: Path, train_tiny: Fit, change: dict[str, Any]
) -> None:
    newest = checkpoint.newest(stopped / "checkpoints")
    with pytest.raises(VitralError, match="does not fit") as caught:
        train_tiny("stopped", **change)
    assert str(newest) in caught.value.what
    assert "recipe.toml" in caught.value.what


def test_a_run_goes_on_although_recipes_have_got_new_fields_since(stopped: Path, train_tiny: Fit) -> None:
    newest = checkpoint.newest(stopped / "checkpoints")
    assert newest is not None
    content = checkpoint.load(newest)
    assert content["recipe"]["augment"].pop("jitter") == 0
    assert content["recipe"]["model"].pop("gelu") == "exact"
    torch.save(content, newest)
    train_tiny("stopped")


def test_a_checkpoint_that_lacks_something_is_refused(stopped: Path, train_tiny: Fit) -> None:
    newest = checkpoint.newest(stopped / "checkpoints")
    assert newest is not None
    torch.save({name: value for name, value in checkpoint.load(newest).items() if name != "optimizers"}, newest)
    with pytest.raises(VitralError, match="does not fit"):
        train_tiny("stopped")


def test_a_finished_run_cannot_be_resumed(undisturbed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = bits(undisturbed.path)
    vitral("train", "--resume", undisturbed.path, expect=2)
    assert complaint(capsys) == [
        f"error: {undisturbed} is finished",
        f"       vitral evaluate {undisturbed} says how good it is",
    ]
    assert bits(undisturbed.path) == before


def test_a_run_that_only_lacks_its_test_figures_gets_them(half_digits: Path, undisturbed: Run) -> None:
    vitral("train", "--resume", half_digits)
    assert bits(half_digits) == bits(undisturbed.path)
    assert (half_digits / "test.json").read_bytes() == undisturbed.test_file.read_bytes()


def test_resuming_on_other_data_is_refused(half_digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = half_digits / "environment.json"
    environment = json.loads(file.read_text())
    environment["data"]["fingerprint"] = "feedfeedfeedfeed"
    file.write_text(json.dumps(environment))
    vitral("train", "--resume", half_digits, expect=2)
    first, second = complaint(capsys)
    assert "digits is not the data this run began with" in first
    assert "feedfeedfeedfeed" in first
    assert "put the old data back, or begin a new run" in second
    assert not (half_digits / "model").exists()


def test_a_run_that_stopped_for_a_nan_goes_on_by_the_line_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    too_fast(monkeypatch, at=8, bearable=0.6)
    vitral(*TRAIN, "--out", tmp_path / "run", expect=2)
    _, second = complaint(capsys)
    vitral(*second.split("or: vitral ")[1].split())
    run = Run.open(tmp_path / "run")
    assert run.has_model
    assert 'on_nan = "rollback"' in run.recipe_file.read_text()
    assert run.load_metrics()[-1]["lr"] == pytest.approx(0.25e-2)  # the one after the throw did not help


@pytest.mark.parametrize(("began", "fp8"), [("bf16", False), ("fp8", True), (None, False)])
def test_a_run_goes_on_in_the_numbers_it_began_with(
    half_digits: Path, began: str | None, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bf16 run of a version that knew no FP8 does not become one half-way."""
    file, asked = half_digits / "environment.json", list[Any]()
    known = json.loads(file.read_text())
    file.write_text("{" if began is None else json.dumps(known | {"precision": began}))
    monkeypatch.setattr(
        making, "choose", lambda **wishes: asked.append(wishes.get("scratch")) or select_hardware(**wishes)
    )
    vitral("train", "--resume", half_digits)
    assert [wish for wish in asked if wish is not None] == [fp8]


def test_a_run_that_could_not_have_fp8_says_so(half_digits: Path) -> None:
    run, known = Run(half_digits), json.loads((half_digits / "environment.json").read_text())
    hardware = select_hardware(device="cpu", precision="bf16")
    record_precision(run, replace(hardware, fp8=True, yields=True).without_fp8("no units"))
    noted = json.loads(run.environment_file.read_text())
    reasons = known["reasons"] | {"precision": "without products in FP8: no units"}
    assert noted == known | {"precision": "bf16", "reasons": reasons}
    run.environment_file.write_text("{")
    record_precision(run, hardware)
    assert run.environment_file.read_text() == "{", "what is broken is no reason to stop a training"


def test_what_does_not_decide_the_result_may_change_on_resume(half_digits: Path, undisturbed: Run) -> None:
    (half_digits / "checkpoints" / "step-000000015.pt").unlink()
    vitral("train", "--resume", half_digits, "--keep", "1", "--checkpoint-minutes", "99", "--accumulate", "3")
    assert bits(half_digits) == bits(undisturbed.path)
    assert len(list((half_digits / "checkpoints").glob("*.pt"))) == 1


@pytest.mark.parametrize("words", [["digits"], ["--epochs", "9"], ["--out", "elsewhere"]], ids=str)
def test_resume_takes_no_other_settings(
    half_digits: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    vitral("train", "--resume", half_digits, *words, expect=2)
    complaint(capsys)
    assert not (half_digits / "model").exists()
    with pytest.raises(VitralError, match="takes no data, recipe, out or other settings"):
        workshop.train("digits", resume=half_digits)


def test_a_broken_recipe_in_a_run_is_named(half_digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (half_digits / "recipe.toml").write_text("epochs = [")
    vitral("train", "--resume", half_digits, expect=2)
    assert f"{half_digits / 'recipe.toml'} is not a valid recipe" in complaint(capsys)[0]


def test_an_out_folder_that_is_not_empty_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    vitral(*TRAIN, "--out", tmp_path / "full", expect=2)
    first, second = complaint(capsys)
    assert f"{tmp_path / 'full'} already exists and is not empty" in first
    assert "choose another --out" in second
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_the_best_weights_gone_from_the_checkpoints_are_missed(
    half_digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (half_digits / "checkpoints" / "best.safetensors").unlink()
    vitral("train", "--resume", half_digits, expect=2)
    assert "best.safetensors is missing" in complaint(capsys)[0]


def test_weights_and_metrics_of_the_undisturbed_run_are_sound(undisturbed: Run) -> None:
    """What all others are compared with did learn something, and kept its best epoch."""
    table = undisturbed.load_metrics()
    assert len(table) == 3
    assert table[-1]["train_loss"] < table[0]["train_loss"]
    assert identical(
        load_weights(undisturbed.model_dir / "weights.safetensors"),
        load_weights(undisturbed.checkpoint_dir / "best.safetensors"),
    )
