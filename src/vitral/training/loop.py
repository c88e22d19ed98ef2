"""fit: one training, top to bottom.

    batch of uint8 images ─▶ move ─▶ normalise ─▶ mix ─▶ model ─▶ loss ─▶ gradients ─▶ optimizer ─▶ averaged weights

After each epoch the validation images are asked; the weights of the best epoch become the model. The test set is
not seen here. Whatever moves is in `State`, so that a checkpoint is a State and nothing else.
"""

from __future__ import annotations

import copy
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from vitral.data.datasets import Dataset
from vitral.data.loader import Loader, on_device
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.evaluation.metrics import logits_of, logits_together, measure
from vitral.hardware import Hardware
from vitral.run import ModelCard, Run, save_model, save_weights
from vitral.run import load_weights as read_weights
from vitral.training import checkpoint
from vitral.training.divided import load_weights, parameters_of, placed_state, weights_of, whole
from vitral.training.loss import balanced_weights, guessing, losses
from vitral.training.memory import recompute_blocks
from vitral.training.optim import Averaged, learning_rate, make_optimizers, restore_optimizer, set_learning_rate
from vitral.training.parallel import divide, forward_of, last_part, way_of
from vitral.training.recipe import Recipe
from vitral.training.start import start_as_identity, start_at_even_odds
from vitral.training.trouble import Diverged, where_it_breaks
from vitral.variants import VARIANTS
from vitral.vit import ViT
from vitral.world import Agreement

WARMING = 5  # steps of a process that may compile or record
READ_EVERY = 50  # steps between looks at the device; in between it runs ahead of Python
EXPLODED = 1000  # times the loss of guessing: no training comes back from there
MOST_ROLLBACKS = 5  # each halves the learning rate; what does not go at a 32nd of it has another cause


class Watch:
    """Whoever wants to see a training go by. This one looks away."""

    def step(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None: ...

    def epoch(self, row: dict[str, Any], seconds_left: float) -> None: ...

    def said(self, what: str) -> None: ...


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
    first_bad: Tensor  # the step whose loss or gradient was not finite, or -1; from then on no weight moves
    halted: Tensor  # 1 from then on: torch's fused optimizers look at it, on the device
    at: Tensor  # `step`, on the device
    epoch: int = 0
    position: int = 0  # batches of this epoch already seen
    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)  # epoch, top1, loss
    rollbacks: int = 0  # each has halved the learning rate
    rolled_to: int = -1  # the step that the last one went back to

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
            "randoms": hardware.world.gather([hardware.random_state()]),  # of every process
            "totals": self.totals,
            "epoch": self.epoch,
            "position": self.position,
            "seconds": self.seconds,
            "best": self.best,
            "rollbacks": self.rollbacks,
            "rolled_to": self.rolled_to,
        }

    def restore(self, saved: dict[str, Any], hardware: Hardware) -> None:
        load_weights(self.model, saved["model"])
        if self.averaged is not None:
            load_weights(self.averaged.model, saved["averaged"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            restore_optimizer(optimizer, placed_state(optimizer, state))
        if saved["draws"].shape == self.draws.get_state().shape:
            self.draws.set_state(saved["draws"])
        else:  # made on another kind of device: its draws cannot be continued here, only begun anew
            self.draws.manual_seed(saved["step"])
        world, randoms = hardware.world, saved.get("randoms", [saved["random"]])
        if len(randoms) == world.size:
            hardware.set_random_state(randoms[world.rank])
        elif world.first:
            hardware.set_random_state(saved["random"])
        else:  # made by another number of processes: this one's draws are begun anew
            torch.manual_seed(own_seed(saved["step"], world.rank))
        self.totals.copy_(saved["totals"])
        self.epoch, self.position, self.step = saved["epoch"], saved["position"], saved["step"]
        self.seconds, self.best = saved["seconds"], saved["best"]
        self.rollbacks, self.rolled_to = saved.get("rollbacks", 0), saved.get("rolled_to", -1)
        self.first_bad.fill_(-1)
        self.halted.zero_()

    def like(self, name: str) -> Tensor | None:
        """The parameter that a saved tensor belongs to, by its name in `to_save`: "optimizers/0/state/5/exp_avg"."""
        kind, _, rest = name.partition("/")
        if kind == "optimizers":
            which, _, index, _ = rest.split("/")
            return parameters_of(self.optimizers[int(which)])[int(index)]
        model = self.averaged.model if kind == "averaged" and self.averaged is not None else self.model
        found: Tensor | None = model.state_dict().get(rest)
        return found


def check_splits(recipe: Recipe, dataset: Dataset) -> None:
    """There are images to learn from, and to choose the best epoch on where the recipe holds some out."""
    for kind, split, wanted in (
        ("training", dataset.train, True),
        ("validation", dataset.validation, recipe.data.validation),
    ):
        if wanted and not len(split):
            raise VitralError(f"{dataset.name} has no {kind} images", "another --data.validation may leave some")


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
    check_splits(recipe, dataset)
    watch = watch or Watch()
    device, world = hardware.device, hardware.world
    loader = Loader(
        images=on_device(dataset.train.images, hardware),
        labels=dataset.train.labels.to(device),
        batch=recipe.batch,
        seed=recipe.seed,
        sampling=recipe.sampling,
        repeat=recipe.augment.repeat,
    )
    steps = loader.steps * recipe.epochs
    state = begin(recipe, hardware, steps, start)
    if (saved := checkpoint.newest(run.checkpoints)) is not None:
        try:
            content = checkpoint.load(saved, state.like, world)
            if content["recipe"] != recipe.essence():
                raise ValueError("the recipe was changed")
            state.restore(content, hardware)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise VitralError(
                f"the checkpoint {saved} does not fit {run.recipe_file}", "put the recipe back, or begin a new run"
            ) from error
    rows = world.tell(lambda: taken_back(run, state.epoch))
    forward = forward_of(state.model, way_of(recipe, hardware), hardware, recipe.recompute)
    weights_K = None
    if recipe.class_weights == "balanced":
        weights_K = balanced_weights(loader.labels, recipe.model.classes)
    log = tensorboard(run) if recipe.tensorboard and world.first else None
    agreement = Agreement(world, flags=2)

    def step_on(images_BCHW: Tensor, labels_B: Tensor) -> None:
        train_step(forward, state, images_BCHW, labels_B, recipe, preprocessing, hardware, weights_K)

    take_step = hardware.recorded(step_on, state.draws)
    if recipe.optim.warmup >= steps:
        watch.said(
            f"the warm-up of {recipe.optim.warmup:,.0f} steps is longer than the run of {steps:,}: the learning rate "
            f"stays far below {recipe.optim.lr * recipe.lr_scale:g}; --optim.warmup 0.1 would be a tenth of the run"
        )
    with interruptible() as interrupt:
        clock = Clock(state, min(recipe.batch, len(dataset.train)))
        if saved is None and recipe.on_nan == "rollback":
            save(state, recipe, hardware, run, clock)
        before: deque[Draws] = deque(maxlen=READ_EVERY)
        while state.epoch < recipe.epochs:
            try:
                for images, labels in loader.epoch(state.epoch, start=state.position):
                    rate = learning_rate(state.step, steps, recipe.optim) * recipe.lr_scale * 0.5**state.rollbacks
                    set_learning_rate(state.optimizers, rate)
                    before.append((state.step, state.draws.get_state(), hardware.random_state()))
                    state.at.fill_(state.step)
                    take_step(images, labels)
                    clock.stepped(state, hardware)
                    state.position += 1
                    state.step += 1
                    if device.type == "cpu" or state.step % READ_EVERY == 0 or state.position == loader.steps:
                        check_finite(state)
                        loss = (state.totals[0] / state.totals[2]).item()
                        speed = clock.images_per_second(state)
                        watch.step(state.epoch + 1, state.position, loss, speed, clock.seconds_left(state, steps))
                    stop, due = agreement.known(interrupt.is_set(), clock.due(recipe.checkpoint_minutes))
                    if stop:
                        save(state, recipe, hardware, run, clock)
                        raise stopped(state, steps, run)
                    if due and state.position < loader.steps:
                        save(state, recipe, hardware, run, clock)
                hardware.synchronize()
                training = clock.training_seconds(state)
                row = end_of_epoch(state, recipe, dataset, preprocessing, hardware, run)
            except Diverged as trouble:
                found = explain(trouble, state, loader, before, recipe, preprocessing, hardware, weights_K, run)
                if recipe.on_nan == "stop" or state.rollbacks == MOST_ROLLBACKS:
                    raise found from None
                roll_back(state, recipe, hardware, run)
                before.clear()
                take_step = hardware.recorded(step_on, state.draws)  # what was restored lies elsewhere on the device
                watch.said(f"{found.what}: back to step {state.step}, with 1/{2**state.rollbacks} of the learning rate")
                rows = world.tell(lambda: taken_back(run, state.epoch))
                continue
            clock.stop(state)
            row |= {"seconds": round(state.seconds, 3), "training_seconds": round(training, 4)}
            row |= {"images_per_second": round(clock.images_per_second(state), 1)}
            rows.append(row)
            world.tell(partial(run.write_metrics, rows))
            if recipe.checkpoint_epochs and state.epoch % recipe.checkpoint_epochs == 0:
                save(state, recipe, hardware, run, clock)
            watch.epoch(row, clock.seconds_left(state, steps))
            if log is not None:
                log(row)
            if agreement.finish(interrupt.is_set(), False)[0]:  # while validating
                raise stopped(state, steps, run)

    if world.first:
        leave_model(recipe, dataset, preprocessing, run, state)
    world.tell(lambda: None)  # the others find the model there


def taken_back(run: Run, epoch: int) -> list[dict[str, Any]]:
    """The metrics until this epoch; later ones, of a training that went on from an earlier place, are forgotten."""
    rows = [row for row in run.metrics() if row["epoch"] <= epoch]
    run.write_metrics(rows)
    return rows


def leave_model(recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, run: Run, state: State) -> None:
    """The best epoch's weights, with all that travels with them."""
    model = VARIANTS[recipe.variant](recipe.model)
    model.load_state_dict(read_weights(run.checkpoints / "best.safetensors"))
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
    elif recipe.zero_branches:
        start_as_identity(model)
    if recipe.loss == "sigmoid":
        start_at_even_odds(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(recipe.frozen))
    share = recipe.ema_share(steps)
    copied = copy.deepcopy(model) if share else None
    way = way_of(recipe, hardware)
    for one in (model, copied):
        if one is not None:
            divide(one, way, hardware)
    if not hardware.world.first:  # dropout and stochastic depth: other draws for other images
        torch.manual_seed(own_seed(recipe.seed, hardware.world.rank))
    state = State(
        model=model.train(),
        optimizers=make_optimizers(
            model, recipe.optim, on_device=hardware.device if hardware.graph else None, compile=hardware.compile
        ),
        averaged=Averaged(model, share, steps, copied) if share else None,
        draws=Generator(hardware.device).manual_seed(recipe.seed),
        totals=torch.zeros(3, device=hardware.device, dtype=torch.float64),  # fp32 counts to 16 million
        first_bad=torch.full((), -1, device=hardware.device),
        halted=torch.zeros((), device=hardware.device),
        at=torch.zeros((), device=hardware.device, dtype=torch.int64),
    )
    for optimizer in state.optimizers:
        optimizer.found_inf = state.halted  # type: ignore[attr-defined]
    if recipe.recompute:
        recompute_blocks(model)
    return state


def own_seed(seed: int, rank: int) -> int:
    """Of one process among several."""
    return (seed + rank * 0x9E3779B97F4A7C15) % 2**63


def train_step(
    forward: Callable[[Tensor], Tensor],
    state: State,
    images_BCHW: Tensor,
    labels_B: Tensor,
    recipe: Recipe,
    preprocessing: Preprocessing,
    hardware: Hardware,
    weights_K: Tensor | None = None,
) -> None:
    """One batch: look, be wrong, move. Nothing is read back from the device.

    A loss or a gradient that is not finite moves no weight, then or later: whoever looks finds the state before it.
    """
    loss, right = look(forward, state, images_BCHW, labels_B, recipe, preprocessing, hardware, weights_K)
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    if recipe.optim.clip:
        nn.utils.clip_grads_with_norm_(state.model.parameters(), recipe.optim.clip, norm)
    good = norm.isfinite() & loss.isfinite() & (loss < EXPLODED * guessing(recipe.model.classes))
    state.first_bad.copy_(torch.where((state.first_bad < 0) & ~good, state.at, state.first_bad))
    state.halted.copy_(state.first_bad >= 0)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if state.averaged is not None:
        state.averaged.update(state.at)
    state.totals += torch.stack([loss * len(labels_B), right, torch.full_like(loss, len(labels_B))])


def look(
    forward: Callable[[Tensor], Tensor],
    state: State,
    images_BCHW: Tensor,
    labels_B: Tensor,
    recipe: Recipe,
    preprocessing: Preprocessing,
    hardware: Hardware,
    weights_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean loss and number of right answers; the gradients stay in the parameters.

    The batch is varied and mixed as a whole; each process computes its share of it, in as many parts as the recipe
    accumulates. Each part counts by its images, so the gradient is that of the whole batch at once.
    """
    B, world = len(labels_B), hardware.world
    targets_BK = F.one_hot(labels_B, recipe.model.classes).float()
    images = preprocessing.normalise(recipe.augment.move(images_BCHW, state.draws, preprocessing.image_size))
    images, targets_BK = recipe.augment.mix(images, targets_BK, state.draws)
    total, right = torch.zeros((), device=images.device), torch.zeros((), device=images.device)
    mine, count = slice(world.share(B).start, world.share(B).stop), min(recipe.accumulate, B // world.size)
    parts = (batch[mine].tensor_split(count) for batch in (images, targets_BK, labels_B))
    for index, (part, targets, labels) in enumerate(zip(*parts, strict=True), start=1):
        with last_part(forward, index == count):
            with hardware.autocast():
                logits = forward(part)
            logits = logits.float()
            loss = losses(logits, targets, recipe.loss, recipe.label_smoothing, weights_K).sum() / B
            (loss * world.size).backward()  # gradients are averaged over the processes, and should be added up
        total += loss.detach()
        right += (logits.detach().argmax(dim=1) == labels).sum()
    total, right = world.sum(torch.stack([total, right])).unbind()
    return total, right


def end_of_epoch(
    state: State, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, hardware: Hardware, run: Run
) -> dict[str, Any]:
    """Ask the validation images, keep the weights if they are the best so far, and turn the page."""
    loss, right, images = state.totals.tolist()
    row = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "lr": float(state.optimizers[0].param_groups[0]["lr"]),
        "train_loss": loss / images,
        "train_top1": right / images,
    }
    answering = state.answering.eval()
    if len(dataset.validation):
        logits = logits_together(answering, dataset.validation.images, preprocessing, hardware)
        found = measure(logits, dataset.validation.labels, dataset.classes)
        asked = F.one_hot(dataset.validation.labels, len(dataset.classes)).to(logits)
        wrong = losses(logits, asked, recipe.loss).mean().item()
        if not math.isfinite(wrong):  # the last step's own loss was; these weights must not be saved
            bad = dataset.validation.images[int((~logits.isfinite()).any(dim=1).int().argmax())][None]
            where, _ = where_it_breaks(answering, lambda: logits_of(answering, bad, preprocessing, hardware))
            raise Diverged(f"the validation loss is not finite after step {state.step}, {where}", state.step)
        row |= {"validation_loss": wrong, "validation_top1": found.top1}
        best = not state.best or (found.top1, -wrong) > (state.best["top1"], -state.best["loss"])
    else:  # nobody to choose: the last epoch's weights are the model
        best = state.epoch + 1 == recipe.epochs
    if best:
        state.best = {"epoch": state.epoch + 1}
        if len(dataset.validation):
            state.best |= {"top1": found.top1, "loss": wrong}
        weights = weights_of(answering)
        hardware.world.tell(lambda: save_weights(run.checkpoints / "best.safetensors", weights))
    state.model.train()
    row["best"] = best
    state.epoch, state.position = state.epoch + 1, 0
    state.totals.zero_()
    return row


def check_finite(state: State) -> None:
    """Stop at the first loss that is not a number; what was saved before stays."""
    if (step := int(state.first_bad.item())) >= 0:
        raise Diverged(f"the loss is not finite at step {step + 1}", step)


Draws = tuple[int, Tensor, dict[str, Tensor]]  # a step, and the random generators as they were before it


def explain(
    trouble: Diverged,
    state: State,
    loader: Loader,
    before: deque[Draws],
    recipe: Recipe,
    preprocessing: Preprocessing,
    hardware: Hardware,
    weights_K: Tensor | None,
    run: Run,
) -> Diverged:
    """Compute the bad step once more, with the weights and the draws it had, and name the module it breaks in."""
    what = trouble.what
    for step, draws, random in reversed(before):  # after a rollback a step stands there more than once
        if step != trouble.step:
            continue
        images, labels = next(loader.epoch(state.epoch, start=state.position - (state.step - step)))
        state.draws.set_state(draws)
        hardware.set_random_state(random)
        batch = (images, labels, recipe, preprocessing, hardware, weights_K)
        where, loss = where_it_breaks(state.model, partial(_loss_again, state, *batch))
        everywhere = hardware.world.gather([where])  # only the process with the bad image may have seen it
        where = next((found for found in everywhere if found.startswith("first")), where)
        if loss.isfinite():
            what = f"the gradient is not finite at step {step + 1}"
            if not where.startswith("first"):
                what = f"the loss is {loss:.1e} at step {step + 1}"
        what += f", {where}"
        break
    saved = checkpoint.newest(run.checkpoints)
    kept = f"the last good state is {saved}" if saved else "nothing was saved before"
    if recipe.on_nan == "rollback":
        return Diverged(what, trouble.step, f"{kept}; 1/{2**MOST_ROLLBACKS} of the learning rate did not help either")
    again = f"vitral train --resume {run} --on-nan rollback" if saved else "--on-nan rollback"
    return Diverged(f"{what}: the training diverged", trouble.step, f"{kept}; try a lower --optim.lr, or: {again}")


def _loss_again(state: State, *batch: Any) -> Tensor:
    return look(state.model, state, *batch)[0]


def roll_back(state: State, recipe: Recipe, hardware: Hardware, run: Run) -> None:
    """To the last checkpoint, or to the one before if the last did not help; the learning rate is halved for good."""
    rollbacks, best = state.rollbacks + 1, state.best  # the best weights stay, though their epoch may be taken back
    saved = checkpoint.newest(run.checkpoints)
    assert saved is not None
    world = hardware.world
    content = checkpoint.load(saved, state.like, world)
    if content["step"] == state.rolled_to and (older := checkpoint.newest(run.checkpoints, before=saved)):
        content = checkpoint.load(older, state.like, world)
        world.tell(lambda: checkpoint.forget(saved))
    state.restore(content, hardware)
    state.rollbacks, state.rolled_to, state.best = rollbacks, state.step, best
    content = {"recipe": recipe.essence(), **state.to_save(hardware)}
    checkpoint.save(run.checkpoints, state.step, content, recipe.keep, world)


def save(state: State, recipe: Recipe, hardware: Hardware, run: Run, clock: Clock) -> None:
    """A checkpoint, unless the training has diverged since the device was last looked at."""
    check_finite(state)
    clock.stop(state)
    content = {"recipe": recipe.essence(), **state.to_save(hardware)}
    checkpoint.save(run.checkpoints, state.step, content, recipe.keep, hardware.world)


def stopped(state: State, steps: int, run: Run) -> Interrupted:
    return Interrupted(
        f"stopped after step {state.step} of {steps}; everything is saved", f"go on with: vitral train --resume {run}"
    )


class Clock:
    """Seconds of training, across interruptions, and what follows from them."""

    def __init__(self, state: State, batch: int) -> None:
        self.started = self.saved = time.perf_counter()
        self.first_step, self.batch = state.step, batch
        self.timed_from = self.started, state.step

    def stepped(self, state: State, hardware: Hardware) -> None:
        """After a step. The first ones of a process compile and record: training is timed from behind them."""
        if state.step - self.first_step == WARMING:
            hardware.synchronize()
        if state.step - self.first_step <= WARMING or state.position == 0:
            self.timed_from = time.perf_counter(), state.step + 1

    def training_seconds(self, state: State) -> float:
        """Of the epoch that ends here: its steps alone, as if none of them had compiled anything.

        Where there are no others, as they were."""
        since, first = self.timed_from if self.timed_from[1] < state.step else (self.started, self.first_step)
        return (time.perf_counter() - since) / max(state.step - first, 1) * state.position

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
