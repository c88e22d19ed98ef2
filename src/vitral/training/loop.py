"""fit: one training, top to bottom.

    batch of uint8 images ─▶ move ─▶ normalise ─▶ mix ─▶ model ─▶ loss ─▶ gradients ─▶ optimizer ─▶ averaged weights

After each epoch the validation images are asked; the weights of the best epoch become the model. The test set is
not seen here. Whatever moves is in `State`, so that a checkpoint is a State and nothing else.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from vitral.data.datasets import Dataset
from vitral.data.loader import Loader
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.evaluation.metrics import logits_of, measure
from vitral.hardware import Hardware
from vitral.run import ModelCard, Run, load_weights, save_model, save_weights
from vitral.training import checkpoint
from vitral.training.optim import Averaged, learning_rate, make_optimizers, set_learning_rate
from vitral.training.recipe import Recipe
from vitral.variants import VARIANTS
from vitral.vit import ViT

READ_EVERY = 50  # steps between looks at the device; in between it runs ahead of Python


class Watch:
    """Whoever wants to see a training go by. This one looks away."""

    def step(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None: ...

    def epoch(self, row: dict[str, Any], seconds_left: float) -> None: ...


class Interrupted(VitralError):
    """Somebody asked the training to stop; everything is saved."""


@dataclass
class State:
    """All that changes while training."""

    model: ViT
    optimizers: list[Optimizer]
    averaged: Averaged | None
    draws: Generator  # for augmentation; dropout and stochastic depth draw from the device's own generator
    totals: Tensor  # of this epoch so far: loss, right answers, images
    first_bad: Tensor  # the step whose loss was not finite, or -1
    epoch: int = 0
    position: int = 0  # batches of this epoch already seen
    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)  # epoch, top1, loss

    @property
    def answering(self) -> ViT:
        """The model that is asked: averaged weights where there are such."""
        return self.averaged.model if self.averaged is not None else self.model  # type: ignore[return-value]

    def to_save(self, hardware: Hardware) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "averaged": self.averaged.model.state_dict() if self.averaged is not None else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "draws": self.draws.get_state(),
            "random": hardware.random_state(),
            "totals": self.totals,
            "epoch": self.epoch,
            "position": self.position,
            "seconds": self.seconds,
            "best": self.best,
        }

    def restore(self, saved: dict[str, Any], hardware: Hardware) -> None:
        self.model.load_state_dict(saved["model"])
        if self.averaged is not None:
            self.averaged.model.load_state_dict(saved["averaged"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if saved["draws"].shape == self.draws.get_state().shape:
            self.draws.set_state(saved["draws"])
        else:  # made on another kind of device: its draws cannot be continued here, only begun anew
            self.draws.manual_seed(saved["step"])
        hardware.set_random_state(saved["random"])
        self.totals.copy_(saved["totals"])
        self.epoch, self.position, self.step = saved["epoch"], saved["position"], saved["step"]
        self.seconds, self.best = saved["seconds"], saved["best"]


def fit(
    recipe: Recipe,
    dataset: Dataset,
    preprocessing: Preprocessing,
    run: Run,
    hardware: Hardware,
    watch: Watch | None = None,
    start: dict[str, Tensor] | None = None,
) -> None:
    """Train as the recipe says, from the run's newest checkpoint if it has one; leaves the model in the run folder."""
    for kind, split in (("training", dataset.train), ("validation", dataset.validation)):
        if not len(split):
            raise VitralError(f"{dataset.name} has no {kind} images", "another --data.validation may leave some")
    watch = watch or Watch()
    device = hardware.device
    loader = Loader(
        images=dataset.train.images.to(device),
        labels=dataset.train.labels.to(device),
        batch=recipe.batch,
        seed=recipe.seed,
    )
    steps = loader.steps * recipe.epochs
    state = begin(recipe, hardware, steps, start)
    if (saved := checkpoint.newest(run.checkpoints)) is not None:
        try:
            content = checkpoint.load(saved)
            if content["recipe"] != recipe.essence():
                raise ValueError("the recipe was changed")
            state.restore(content, hardware)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise VitralError(
                f"the checkpoint {saved} does not fit {run.recipe_file}", "put the recipe back, or begin a new run"
            ) from error
    rows = [row for row in run.metrics() if row["epoch"] <= state.epoch]
    run.write_metrics(rows)
    forward = torch.compile(state.model) if hardware.compile else state.model
    log = tensorboard(run) if recipe.tensorboard else None

    with interruptible() as interrupt:
        clock = Clock(state, min(recipe.batch, len(dataset.train)))
        while state.epoch < recipe.epochs:
            for images, labels in loader.epoch(state.epoch, start=state.position):
                set_learning_rate(state.optimizers, learning_rate(state.step, steps, recipe.optim))
                train_step(forward, state, images, labels, recipe, preprocessing, hardware)
                state.position += 1
                state.step += 1
                if device.type == "cpu" or state.step % READ_EVERY == 0 or state.position == loader.steps:
                    check_finite(state, run)
                    loss = (state.totals[0] / state.totals[2]).item()
                    speed = clock.images_per_second(state)
                    watch.step(state.epoch + 1, state.position, loss, speed, clock.seconds_left(state, steps))
                if interrupt.is_set():
                    save(state, recipe, hardware, run, clock)
                    raise stopped(state, steps, run)
                if clock.due(recipe.checkpoint_minutes) and state.position < loader.steps:
                    save(state, recipe, hardware, run, clock)

            row = end_of_epoch(state, recipe, dataset, preprocessing, hardware, run)
            clock.stop(state)
            row |= {"seconds": round(state.seconds, 3), "images_per_second": round(clock.images_per_second(state), 1)}
            rows.append(row)
            run.write_metrics(rows)
            save(state, recipe, hardware, run, clock)
            watch.epoch(row, clock.seconds_left(state, steps))
            if log is not None:
                log(row)
            if interrupt.is_set():  # while validating
                raise stopped(state, steps, run)

    model = VARIANTS[recipe.variant](recipe.model)
    model.load_state_dict(load_weights(run.checkpoints / "best.safetensors"))
    card = ModelCard(
        architecture=recipe.model,
        preprocessing=preprocessing,
        classes=dataset.classes,
        trained_on=dataset.name,
        epoch=int(state.best["epoch"]),
        variant=recipe.variant,
    )
    save_model(run.model, model, card)


def begin(recipe: Recipe, hardware: Hardware, steps: int, start: dict[str, Tensor] | None = None) -> State:
    """Everything as it is before the first step, with weights drawn from the seed or given in `start`."""
    torch.manual_seed(recipe.seed)
    model = VARIANTS[recipe.variant](recipe.model)
    if start is not None:
        model.load_state_dict(start)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(recipe.frozen))
    model.to(hardware.device)
    return State(
        model=model.train(),
        optimizers=make_optimizers(model, recipe.optim),
        averaged=Averaged(model, recipe.ema, steps) if recipe.ema else None,
        draws=Generator(hardware.device).manual_seed(recipe.seed),
        totals=torch.zeros(3, device=hardware.device, dtype=torch.float64),  # fp32 counts to 16 million
        first_bad=torch.full((), -1, device=hardware.device),
    )


def train_step(
    forward: Callable[[Tensor], Tensor],
    state: State,
    images_BCHW: Tensor,
    labels_B: Tensor,
    recipe: Recipe,
    preprocessing: Preprocessing,
    hardware: Hardware,
) -> None:
    """One batch: look, be wrong, move. Nothing is read back from the device."""
    targets_BK = F.one_hot(labels_B, recipe.model.classes).float()
    images = preprocessing.normalise(recipe.augment.move(images_BCHW, state.draws, preprocessing.image_size))
    images, targets_BK = recipe.augment.mix(images, targets_BK, state.draws)
    with hardware.autocast():
        logits_BK = forward(images)
    logits_BK = logits_BK.float()
    loss = F.cross_entropy(logits_BK, targets_BK, label_smoothing=recipe.label_smoothing)
    loss.backward()
    if recipe.optim.clip:
        nn.utils.clip_grad_norm_(state.model.parameters(), recipe.optim.clip)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if state.averaged is not None:
        state.averaged.update(state.step)
    with torch.no_grad():
        right = (logits_BK.argmax(dim=1) == labels_B).sum()
        state.totals += torch.stack([loss.detach() * len(labels_B), right, torch.full_like(loss, len(labels_B))])
        state.first_bad.copy_(torch.where((state.first_bad < 0) & ~loss.isfinite(), state.step, state.first_bad))


def end_of_epoch(
    state: State, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, hardware: Hardware, run: Run
) -> dict[str, Any]:
    """Ask the validation images, keep the weights if they are the best so far, and turn the page."""
    loss, right, images = state.totals.tolist()
    answering = state.answering.eval()
    logits = logits_of(answering, dataset.validation.images, preprocessing, hardware)
    state.model.train()
    found = measure(logits, dataset.validation.labels, dataset.classes)
    if not math.isfinite(found.loss):  # the last step's own loss was; these weights must not be saved
        raise diverged(f"the validation loss is not finite after step {state.step}", run)
    if not state.best or (found.top1, -found.loss) > (state.best["top1"], -state.best["loss"]):
        state.best = {"epoch": state.epoch + 1, "top1": found.top1, "loss": found.loss}
        save_weights(run.checkpoints / "best.safetensors", answering.state_dict())
    row = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "lr": state.optimizers[0].param_groups[0]["lr"],
        "train_loss": loss / images,
        "train_top1": right / images,
        "validation_loss": found.loss,
        "validation_top1": found.top1,
        "best": state.best["epoch"] == state.epoch + 1,
    }
    state.epoch, state.position = state.epoch + 1, 0
    state.totals.zero_()
    return row


def check_finite(state: State, run: Run) -> None:
    """Stop at the first loss that is not a number; what was saved before stays."""
    if (step := int(state.first_bad.item())) >= 0:
        raise diverged(f"the loss is not finite at step {step + 1}", run)


def diverged(what: str, run: Run) -> VitralError:
    saved = checkpoint.newest(run.checkpoints)
    kept = f"the last good state is {saved}" if saved else "nothing was saved before"
    return VitralError(f"{what}: the training diverged", f"{kept}; try a lower --optim.lr")


def save(state: State, recipe: Recipe, hardware: Hardware, run: Run, clock: Clock) -> None:
    """A checkpoint, unless the training has diverged since the device was last looked at."""
    check_finite(state, run)
    clock.stop(state)
    content = {"recipe": recipe.essence(), **state.to_save(hardware)}
    checkpoint.save(run.checkpoints, state.step, content, recipe.keep)


def stopped(state: State, steps: int, run: Run) -> Interrupted:
    return Interrupted(
        f"stopped after step {state.step} of {steps}; everything is saved", f"go on with: vitral train --resume {run}"
    )


class Clock:
    """Seconds of training, across interruptions, and what follows from them."""

    def __init__(self, state: State, batch: int) -> None:
        self.started = self.saved = time.perf_counter()
        self.first_step, self.batch = state.step, batch

    def stop(self, state: State) -> None:
        """Add the time since the last stop to the state's, before it is saved."""
        now = time.perf_counter()
        state.seconds += now - self.saved
        self.saved = now

    def due(self, minutes: float) -> bool:
        return time.perf_counter() - self.saved > minutes * 60

    def seconds_a_step(self, state: State) -> float:
        """In this process, validation included."""
        return (time.perf_counter() - self.started) / max(state.step - self.first_step, 1)

    def images_per_second(self, state: State) -> float:
        return self.batch / self.seconds_a_step(state)

    def seconds_left(self, state: State, steps: int) -> float:
        return self.seconds_a_step(state) * (steps - state.step)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """While inside, the first Ctrl-C, or a scheduler's SIGTERM, only sets the event; a second one stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def first(number: int, _frame: object) -> None:
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tensorboard(run: Run) -> Any:
    """A function that writes one row of metrics for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise VitralError("TensorBoard is not installed", "pip install 'vitral[tensorboard]'") from error
    writer = SummaryWriter(run.path / "tensorboard")

    def write(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, float) and math.isfinite(value):
                writer.add_scalar(name, value, row["epoch"])
        writer.flush()

    return write
