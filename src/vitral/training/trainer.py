"""fit: one training, top to bottom.

    batch of uint8 images ─▶ move ─▶ normalise ─▶ mix ─▶ model ─▶ loss ─▶ gradients ─▶ optimizer ─▶ averaged weights

After each epoch the validation images are asked; the weights of the best epoch become the model. The test set is
not seen here. Whatever moves is in `State`, so that a checkpoint is a State and nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.augment import Vary, varied
from vitral.data.datasets import Dataset
from vitral.data.loader import Loader, on_device
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.distributed.dtensor import weights_of, whole
from vitral.distributed.parallel import forward_of, last_part, way_of
from vitral.distributed.world import Agreement
from vitral.errors import VitralError, typed
from vitral.evaluation.metrics import logits_of, logits_together, measure
from vitral.models.variants import VARIANTS
from vitral.recipes.schema import Recipe
from vitral.runs.run import ModelCard, Run, load_weights, save_model, save_weights
from vitral.training.callbacks import Watch, tensorboard
from vitral.training.loss import Judge, balanced_weights, guessing, judged, losses
from vitral.training.nan_debug import MOST_ROLLBACKS, Diverged, Draws, explain, where_it_breaks
from vitral.training.optim.build import learning_rate, set_learning_rate
from vitral.training.provenance import note_precision
from vitral.training.signals import Interrupted, interruptible
from vitral.training.state import State, begin, resume, roll_back, write_checkpoint
from vitral.training.timing import Clock

READ_EVERY = 50  # steps between looks at the device; in between it runs ahead of Python
SAMPLE = 2000  # images that first weights are chosen by, where they are
EXPLODED = 1000  # times the loss of guessing: no training comes back from there


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
    sample = dataset.train.images[:SAMPLE] if "whitened" in recipe.start else None
    state = begin(recipe, hardware, steps, start, None if sample is None else preprocessing.normalise(sample))
    if resumed := resume(state, recipe, hardware, run):
        watch.said(f"goes on after step {state.step:,} of {steps:,}")
    rows = world.tell(lambda: taken_back(run, state.epoch))
    part = math.ceil(min(recipe.batch, len(dataset.train)) / recipe.accumulate)
    way = way_of(recipe, hardware)
    forward, used = forward_of(state.model, way, hardware, recipe.recompute, watch.said, part)
    if used != hardware:
        hardware = used
        note_precision(run, hardware)
    balanced = recipe.class_weights == "balanced"
    weights_K = balanced_weights(loader.labels, recipe.model.classes) if balanced else None
    unmixed_from = round((1 - recipe.augment.unmixed) * steps) if recipe.augment.unmixed else None
    vary = vary_of(recipe, preprocessing, hardware, watch.said)
    judge = None if balanced else judge_of(recipe, part, hardware, watch.said)
    task = Task(recipe, preprocessing, hardware, weights_K, unmixed_from, vary, judge)
    log = tensorboard(run) if recipe.tensorboard and world.first else None
    agreement = Agreement(world, flags=2)

    def step_on(images_BCHW: Tensor, labels_B: Tensor) -> None:
        train_step(forward, state, images_BCHW, labels_B, task)

    def loss_again(images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        return look(state.model, state, images_BCHW, labels_B, task)[0]

    take_step = hardware.recorded(step_on, state.draws)
    if recipe.optim.warmup >= steps:
        watch.said(warmup_too_long(recipe, steps))
    with interruptible() as interrupt:
        clock = Clock(state, min(recipe.batch, len(dataset.train)))
        if not resumed and recipe.on_nan == "rollback":
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
                found = explain(trouble, state, loader, before, loss_again, recipe, hardware, run)
                if recipe.on_nan == "stop" or state.rollbacks == MOST_ROLLBACKS:
                    raise found from None
                roll_back(state, recipe, hardware, run)
                before.clear()
                take_step = hardware.recorded(step_on, state.draws)  # what was restored lies elsewhere on the device
                watch.said(f"{found.what}: back to step {state.step}, with 1/{2**state.rollbacks} of the learning rate")
                rows = world.tell(lambda: taken_back(run, state.epoch))
                continue
            clock.stop(state)
            row |= clock.row(state, training)
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


class Task(NamedTuple):
    """What is the same in every step."""

    recipe: Recipe
    preprocessing: Preprocessing
    hardware: Hardware
    weights_K: Tensor | None = None  # of the classes, in the loss
    unmixed_from: int | None = None  # the step from which no images are blended
    vary: Vary | None = None  # in one pass, where there is a kernel for it
    judge: Judge | None = None  # the same


def vary_of(
    recipe: Recipe, preprocessing: Preprocessing, hardware: Hardware, say: Callable[[str], None]
) -> Vary | None:
    if not hardware.fused:
        return None
    from vitral.kernels.augment import op as vary

    return vary.vary_of(recipe.augment, preprocessing, recipe.model.classes, hardware, say)


def judge_of(recipe: Recipe, images: int, hardware: Hardware, say: Callable[[str], None]) -> Judge | None:
    if not hardware.fused or recipe.loss != "softmax":
        return None
    from vitral.kernels.cross_entropy import op as judge

    plain = partial(judged, kind=recipe.loss, smoothing=recipe.label_smoothing)
    return judge.judge_of(plain, images, recipe.model.classes, recipe.label_smoothing, hardware, say)


def train_step(
    forward: Callable[[Tensor], Tensor], state: State, images_BCHW: Tensor, labels_B: Tensor, task: Task
) -> None:
    """One batch: look, be wrong, move. Nothing is read back from the device.

    A loss or a gradient that is not finite moves no weight, then or later: whoever looks finds the state before it.
    """
    loss, right = look(forward, state, images_BCHW, labels_B, task)
    gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    if task.recipe.optim.clip:
        nn.utils.clip_grads_with_norm_(state.model.parameters(), task.recipe.optim.clip, norm)
    good = (norm < math.inf) & (loss < EXPLODED * guessing(task.recipe.model.classes))  # what is no number is not
    state.first_bad.copy_(torch.where((state.first_bad < 0) & ~good, state.at, state.first_bad))
    state.halted.copy_(state.first_bad >= 0)
    for optimizer in reversed(state.optimizers):  # Muon last: it may have begun before
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if state.averaged is not None:
        state.averaged.update(state.at)
    state.totals += torch.stack([loss * len(labels_B), right, torch.full_like(loss, len(labels_B))])


def look(
    forward: Callable[[Tensor], Tensor], state: State, images_BCHW: Tensor, labels_B: Tensor, task: Task
) -> tuple[Tensor, Tensor]:
    """Mean loss and number of right answers; the gradients stay in the parameters.

    The batch is varied and mixed as a whole; each process computes its share of it, in as many parts as the recipe
    accumulates. Each part counts by its images, so the gradient is that of the whole batch at once.
    """
    recipe, world = task.recipe, task.hardware.world
    B = len(labels_B)
    mixing = None if task.unmixed_from is None else state.at < task.unmixed_from
    vary = task.vary or partial(varied, recipe.augment, task.preprocessing, recipe.model.classes)
    images, targets_BK = vary(images_BCHW, labels_B, state.draws, mixing)
    judge = task.judge or partial(judged, kind=recipe.loss, smoothing=recipe.label_smoothing, weights_K=task.weights_K)
    sums = []
    mine, count = slice(world.share(B).start, world.share(B).stop), min(recipe.accumulate, B // world.size)
    parts = (batch[mine].tensor_split(count) for batch in (images, targets_BK, labels_B))
    for index, (part, targets, labels) in enumerate(zip(*parts, strict=True), start=1):
        with last_part(forward, index == count):
            with task.hardware.autocast():
                logits = forward(part)
            loss, hits = judge(logits, targets, labels)
            (loss * (world.size / B)).backward()  # averaged over the processes, and should be added up
        sums.append(torch.stack([loss.detach() / B, hits]))
    total, right = world.sum(torch.stack(sums).sum(dim=0) if count > 1 else sums[0]).unbind()
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


def save(state: State, recipe: Recipe, hardware: Hardware, run: Run, clock: Clock) -> None:
    """A checkpoint, unless the training has diverged since the device was last looked at."""
    check_finite(state)
    clock.stop(state)
    write_checkpoint(state, recipe, hardware, run)


def stopped(state: State, steps: int, run: Run) -> Interrupted:
    return Interrupted(
        f"stopped after step {state.step} of {steps}; everything is saved",
        f"go on with: vitral train --resume {typed(run)}",
    )


def taken_back(run: Run, epoch: int) -> list[dict[str, Any]]:
    """The metrics until this epoch; later ones, of a training that went on from an earlier place, are forgotten."""
    rows = [row for row in run.metrics() if row["epoch"] <= epoch]
    run.write_metrics(rows)
    return rows


def leave_model(recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, run: Run, state: State) -> None:
    """The best epoch's weights, with all that travels with them."""
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


def check_splits(recipe: Recipe, dataset: Dataset) -> None:
    """There are images to learn from, and to choose the best epoch on where the recipe holds some out."""
    for kind, split, wanted in (
        ("training", dataset.train, True),
        ("validation", dataset.validation, recipe.data.validation),
    ):
        if wanted and not len(split):
            raise VitralError(f"{dataset.name} has no {kind} images", "another --data.validation may leave some")


def warmup_too_long(recipe: Recipe, steps: int) -> str:
    return (
        f"the warm-up of {recipe.optim.warmup:,.0f} steps is longer than the run of {steps:,}: the learning rate "
        f"stays far below {recipe.optim.lr * recipe.lr_scale:g}; --optim.warmup 0.1 would be a tenth of the run"
    )
