"""Train one model on one dataset.

    uint8 batch -> augment -> model -> loss -> gradients -> optimizer -> EMA

The validation set is evaluated after each epoch, and the weights of the best epoch become the model. The test set is
not used here.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.data.variable_images import images_of_one_size
from vitral.device.memory import is_out_of_memory
from vitral.device.select import Hardware
from vitral.distributed.dtensor import full_state
from vitral.distributed.parallel import ParallelPlan, reshard
from vitral.distributed.world import AsyncFlags
from vitral.errors import Interrupted, VitralError, shell_quote
from vitral.inference.forward import compute_logits, compute_logits_distributed
from vitral.models.calibration import Calibration
from vitral.models.lora import merge_lora
from vitral.models.uninitialized import build_uninitialized
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import ModelConfig, load_weights, save_model, save_weights, weights_damage
from vitral.runs.run import Run
from vitral.ssl.teacher import Teacher
from vitral.tasks import TASKS
from vitral.tasks.losses import class_balance_terms
from vitral.training import checkpoint
from vitral.training.backend import Backend, make_backend
from vitral.training.callbacks import Callback, CallbackList, MetricsFile
from vitral.training.hardware import parallel_plan
from vitral.training.head_init import HeadFit, fit_new_head, fits_head
from vitral.training.loggers import make_loggers
from vitral.training.nan_debug import Diverged, RngSnapshot, describe_divergence, locate_nonfinite
from vitral.training.out_of_memory import out_of_memory_error
from vitral.training.provenance import record_precision
from vitral.training.setup import make_loader
from vitral.training.signals import defer_signals
from vitral.training.state import init_state
from vitral.training.step import StepContext, StepRunner, forward_backward
from vitral.training.timing import TimeBudget, TrainingClock
from vitral.utils.text import count_text
from vitral.weights.adapter import Adapter, BaseWeights, save_adapter

SYNC_EVERY = 50  # steps between reads from a GPU, which otherwise runs ahead of the host
MAX_ROLLBACKS = 5  # each one halves the learning rate; a run that still diverges has another problem
NUM_INIT_IMAGES = 2000  # training images for init schemes that depend on data


class Trainer:
    """Train one model on one dataset.

        Trainer(recipe, dataset, preprocessing, run, hardware, callbacks=[progress]).fit()

    The run folder holds everything needed to continue: `fit()` resumes from its newest checkpoint, bit for bit.
    """

    command = "train"  # of vitral, to resume the run
    min_batch_size = 1  # smallest batch size that a hint suggests

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        preprocessing: Preprocessing,
        run: Run,
        hardware: Hardware,
        *,
        parallel: ParallelPlan | None = None,
        callbacks: Sequence[Callback] = (),
        initial_weights: dict[str, Tensor] | None = None,
        base: BaseWeights | None = None,
        time_budget: TimeBudget | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.recipe, self.dataset, self.preprocessing, self.run = recipe, dataset, preprocessing, run
        self.hardware, self.world = hardware, hardware.world
        self.parallel = parallel or parallel_plan(recipe, hardware)
        self.initial_weights, self.base, self.time_budget = initial_weights, base, time_budget
        self.teacher = teacher
        self.callbacks = CallbackList([MetricsFile(run, self.world), *callbacks])
        self.interrupt = threading.Event()
        self.task = TASKS[recipe.task_name]

    def fit(self) -> None:
        self.setup()
        self.resume()
        with defer_signals() as self.interrupt:
            self.start()
            while self.state.epoch < self.recipe.epochs and not (self.patience_is_over() or self.time_is_over):
                try:
                    self.train_epoch()
                    metrics = self.validate()
                except Diverged as error:
                    self.handle_divergence(error)
                    continue
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise out_of_memory_error(self.recipe, self.hardware, self.run) from error
                    raise
                self.end_epoch(metrics)
            self.report_early_stop()
        self.export_best_model()

    # Phases, in the order in which they happen.

    def setup(self) -> None:
        """Build the loader, the state before the first step and the backend."""
        recipe, hardware = self.recipe, self.hardware
        check_splits(recipe, self.dataset)
        if self.world.is_rank0:
            self.callbacks.callbacks += make_loggers(recipe, self.run, self.callbacks.on_message)
        train = self.dataset.train
        self.target_scaling = self.task.scaling(train.labels, self.dataset.classes)
        labels = self.target_scaling.standardise(train.labels) if self.target_scaling else train.labels
        self.loader = make_loader(recipe, replace(train, labels=labels), hardware)
        self.total_steps = self.loader.steps_per_epoch * recipe.epochs
        self.batch_size = min(recipe.batch_size, len(train))
        init_images = None
        if "whitened_patches" in recipe.init_schemes:
            init_images = self.preprocessing.normalise(images_of_one_size(train.images, NUM_INIT_IMAGES))
        self.head_fit = self.fit_head()
        initial_weights = self.initial_weights if self.head_fit is None else self.head_fit.weights
        self.state = init_state(
            recipe,
            hardware,
            self.total_steps,
            initial_weights,
            init_images,
            self.parallel,
            self.preprocessing,
            self.teacher,
        )
        if self.teacher is not None:
            self.teacher.to(hardware.device)
        self.backend = self.make_backend()
        if self.backend.hardware != hardware:  # FP8 or CUDA graphs are unavailable
            self.hardware = self.backend.hardware
            self.world.broadcast_from_rank0(lambda: record_precision(self.run, self.hardware))
        mix_off = recipe.augment.mix_off_last
        mix_off_step = round((1 - mix_off) * self.total_steps) if mix_off else None
        self.context = StepContext(recipe, self.backend, mix_off_step)
        self.step_runner = StepRunner(self.state, self.context, self.total_steps)
        self.flags = AsyncFlags(self.world, 3)
        self.sync_every = 1 if hardware.device.type == "cpu" else SYNC_EVERY
        self.rng_snapshots: deque[RngSnapshot] = deque(maxlen=SYNC_EVERY)

    def fit_head(self) -> HeadFit | None:
        """Fit the head of a new run to the checkpoint's features; None if it stays as it is. All ranks take part."""
        weights = self.initial_weights
        if weights is None or not fits_head(self.recipe, weights):
            return None
        if self.parallel.mode == "fsdp":
            self.callbacks.on_message("head_init: zeros, because least squares needs the whole model on each device")
            return None
        if self.world.broadcast_from_rank0(lambda: checkpoint.newest(self.run.checkpoint_dir)) is not None:
            return None  # the checkpoint of a resumed run has the head
        train = replace(self.dataset.train, labels=self.loader.labels.cpu())  # standardised
        return fit_new_head(self.recipe, train, self.preprocessing, self.hardware, weights)

    def make_backend(self) -> Backend:
        """The backend of the step: with labels, the fastest one for this hardware."""
        recipe = self.recipe
        for model in {self.state.model, self.state.eval_model}:
            assert isinstance(model, ViT)
            model.accepts_any_grid = self.preprocessing.resize == "native"
        class_weights_K, logit_offsets_K = class_balance_terms(recipe, self.loader.labels)
        return make_backend(
            self.state.vit,
            recipe,
            self.preprocessing,
            self.hardware,
            self.parallel,
            micro_batch_size=self.micro_batch_size,
            class_weights_K=class_weights_K,
            logit_offsets_K=logit_offsets_K,
            log=self.callbacks.on_message,
            teacher=self.teacher,
        )

    def resume(self) -> None:
        """Load the newest intact checkpoint of the run folder, if there is one."""
        self.resumed = False
        if (loaded := self._load_newest_checkpoint()) is not None:
            path, saved = loaded
            self._check_frozen_weights(saved)
            try:
                if not self.recipe.has_result_fields(saved["recipe"]):
                    raise ValueError("the recipe has changed")
                self.state.load_state_dict(saved, self.hardware)
            except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                raise VitralError(
                    f"the checkpoint {path} does not match {self.run.recipe_file}",
                    "Restore the recipe, or start a new run",
                ) from error
            self.resumed = True
            self.callbacks.on_message(f"Resuming after step {self.state.step:,} of {self.total_steps:,}")
        self.callbacks.on_restore(self.state.epoch)

    def _check_frozen_weights(self, saved: dict[str, Any]) -> None:
        """Refuse frozen weights, which are not in checkpoints, if they differ from those at the start of the run."""
        if self.base is not None and saved.get("base_sha256", self.base.sha256) != self.base.sha256:
            raise VitralError(
                f"the weights of {self.base.source} have changed since this run started",
                "Restore them, because the checkpoints contain only what is trained; or start a new run",
            )
        teacher = self.teacher
        if teacher is not None and saved.get("teacher_sha256", teacher.sha256) != teacher.sha256:
            raise VitralError(
                f"the weights of the teacher {teacher.name} have changed since this run started",
                "Restore them, or start a new run",
            )

    def _load_newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest intact checkpoint. If best.safetensors is damaged, the newest one from before its epoch."""
        best_file = self.run.checkpoint_dir / "best.safetensors"
        damage = self.world.broadcast_from_rank0(lambda: weights_damage(best_file))
        best_epochs: list[float] = []

        def unusable_reason(saved: dict[str, Any]) -> str | None:
            if damage is None or not saved["best"]:
                return None
            best_epochs.append(saved["best"]["epoch"])
            return f"needs {best_file.name}, which is {damage}" if best_epochs[-1] == best_epochs[0] else None

        return checkpoint.load_newest(
            self.run.checkpoint_dir,
            self.state.tensor_like,
            self.world,
            unusable_reason=unusable_reason,
            log=self.callbacks.on_message,
        )

    def start(self) -> None:
        """Validate a fitted head; start the clock; save the initial state if a rollback may need it."""
        recipe = self.recipe
        if recipe.optim.warmup >= self.total_steps:
            self.callbacks.on_message(
                f"The warm-up of {recipe.optim.warmup:,.0f} steps is longer than the run of {self.total_steps:,} "
                f"steps, so the learning rate stays far below {recipe.optim.lr * recipe.lr_scale:g}; "
                "use --optim.warmup 0.1 for a tenth of the run"
            )
        if self.loader.steps_per_epoch == 1:
            self.callbacks.on_message(
                describe_single_step_epochs(recipe.batch_size, len(self.dataset.train), self.min_batch_size)
            )
        budget = self.time_budget
        self.deadline = math.inf if budget is None else budget.deadline(self.state.elapsed_seconds)
        if self.head_fit is not None and not self.resumed:
            self.evaluate_head(self.head_fit)
        self.callbacks.on_train_start()
        self.clock = TrainingClock(self.state, self.batch_size)
        self.time_is_over = self.deadline_has_passed()
        if recipe.on_nan == "rollback" and not self.resumed:
            self.save_checkpoint()

    def evaluate_head(self, fit: HeadFit) -> None:
        """Validate and export the model with its fitted head as epoch 0, a linear probe that the best epoch must beat.

        The training loss and score of this epoch are those of images that were left out of the fit. The run folder
        holds a complete model from here on.
        """
        if not len(self.dataset.validation):
            return
        state, clock = self.state, TrainingClock(self.state, self.batch_size)
        metrics = {"epoch": 0, "step": 0, "lr": 0.0, "train_loss": fit.loss, **self.training_score(fit.mean_score)}
        metrics |= self.evaluate(epoch=0)
        self.export_best_model()
        state.model.train()
        state.elapsed_seconds += fit.seconds
        clock.stop(state)
        metrics |= clock.metrics(state, fit.seconds) | {"images_per_second": round(fit.images_per_second, 1)}
        self.callbacks.on_epoch_end(metrics, math.nan)

    def train_epoch(self) -> None:
        state = self.state
        for images, labels in self.loader.epoch(state.epoch, start=state.batch_in_epoch):
            self.train_step(images, labels)
            is_last = state.batch_in_epoch == self.loader.steps_per_epoch
            if state.step % self.sync_every == 0 or is_last:
                self.check_finite()
                self.report_step()
            is_due = self.clock.checkpoint_is_due(self.recipe.checkpoint_minutes)
            should_stop, should_save, self.time_is_over = self.flags.exchange(
                self.interrupt.is_set(), is_due, self.clock.is_after(self.deadline)
            )
            if should_stop or (should_save and not is_last):
                self.save_checkpoint()
            if should_stop:
                raise self.interrupted()
            if self.time_is_over:
                self.check_finite()
                return

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """One optimizer step. On a GPU the host does not wait for it."""
        state = self.state
        self.rng_snapshots.append(RngSnapshot(state.step, state.augment_rng.get_state(), self.hardware.rng_state()))
        self.step_runner.run(images, labels)
        self.clock.after_step(state, self.hardware)
        state.batch_in_epoch += 1
        state.step += 1

    def validate(self) -> dict[str, Any]:
        """Evaluate the validation set, save the weights if they are the best so far and reset the epoch counters.

        Returns the epoch's metrics. Without a validation set, the last epoch counts as the best.
        """
        state = self.state
        self.hardware.synchronize()
        training_seconds = self.clock.training_seconds(state)
        metrics = self.training_metrics() | self.evaluate(epoch=state.epoch + 1)
        return metrics | self.reset_epoch(training_seconds)

    def evaluate(self, epoch: int) -> dict[str, Any]:
        """Evaluate the validation set and save the weights if they are the best so far; returns the metrics."""
        state, metrics = self.state, {}
        best: dict[str, float] = {"epoch": epoch}
        state.eval_model.eval()
        if len(self.dataset.validation):
            validation_metrics = self._validation_metrics()
            metrics = {f"validation_{name}": value for name, value in validation_metrics.items()}
            best |= {name: validation_metrics[name] for name in (self.task.metric, "loss")}
            is_best = not state.best or self._quality(best) > self._quality(state.best)
        else:
            is_best = epoch == self.recipe.epochs or self.time_is_over
        if is_best:
            state.best = best
            weights = full_state(state.trained_state(state.eval_model.state_dict()))
            self.world.broadcast_from_rank0(lambda: save_weights(self.run.checkpoint_dir / "best.safetensors", weights))
        return {**metrics, "best": is_best}

    def training_metrics(self) -> dict[str, Any]:
        """Epoch, step, learning rate, mean training loss and running score of the epoch that ends."""
        state = self.state
        loss_sum, score_sum, num_images = state.epoch_sums.tolist()
        return {
            "epoch": state.epoch + 1,
            "step": state.step,
            "lr": float(state.optimizers[0].param_groups[0]["lr"]),
            "train_loss": loss_sum / num_images,
            **self.training_score(score_sum / num_images),
        }

    def training_score(self, mean_score: float) -> dict[str, float]:
        return {f"train_{self.task.train_metric}": self.task.train_score(mean_score, self.target_scaling)}

    def reset_epoch(self, training_seconds: float) -> dict[str, Any]:
        """Return to training mode, begin the next epoch and stop the clock; returns the times of the epoch."""
        state = self.state
        for model in {state.model, state.eval_model}:
            reshard(model)
        state.model.train()
        state.epoch, state.batch_in_epoch = state.epoch + 1, 0
        state.epoch_sums.zero_()
        self.clock.stop(state)
        return self.clock.metrics(state, training_seconds)

    def _quality(self, metrics: dict[str, float]) -> tuple[float, float]:
        """Sort key of epochs: the task's metric, then the loss. The highest is the best."""
        value = metrics[self.task.metric]
        return value if self.task.higher_is_better else -value, -metrics["loss"]

    def _validation_metrics(self) -> dict[str, float]:
        model, validation = self.state.eval_model, self.dataset.validation
        logits = compute_logits_distributed(model, validation.images, self.preprocessing, self.hardware)
        metrics = self.task.validation_metrics(logits, validation.labels, self.recipe.loss_name, self.target_scaling)
        loss = metrics["loss"]
        if not math.isfinite(loss):  # the last update itself diverged; these weights must not be saved
            index = int((~logits.isfinite()).any(dim=1).int().argmax())
            image = validation.images[index][None]
            report, _ = locate_nonfinite(model, lambda: compute_logits(model, image, self.preprocessing, self.hardware))
            raise Diverged(
                f"the validation loss is not finite after step {self.state.step}, {report.text}", self.state.step
            )
        return metrics

    def end_epoch(self, metrics: dict[str, Any]) -> None:
        """Report the epoch and save a checkpoint if one is due or a signal arrived during validation."""
        state, every = self.state, self.recipe.checkpoint_epochs
        seconds_left = 0.0 if self.time_is_over else self.clock.seconds_left(state, self.total_steps)
        self.callbacks.on_epoch_end(metrics, seconds_left)
        should_stop, _, self.time_is_over = self.flags.flush(
            self.interrupt.is_set(), False, self.time_is_over or self.deadline_has_passed()
        )
        if should_stop or (every and state.epoch % every == 0):
            self.save_checkpoint()
        if should_stop:
            raise self.interrupted()

    def deadline_has_passed(self) -> bool:
        """Whether to stop between two epochs, by the clock of rank 0. All ranks must call this.

        As long as no weights are saved, training continues for one more step, so that the run has a model.
        """
        return bool(self.state.best) and self.world.broadcast_from_rank0(lambda: self.clock.is_after(self.deadline))

    def handle_divergence(self, error: Diverged) -> None:
        """Locate the first non-finite value; then stop, or roll back and halve the learning rate.

        Rolls back to the newest checkpoint, or to the one before it if the last rollback went to the same step.
        """
        what = self._diagnose(error)
        newest = checkpoint.newest(self.run.checkpoint_dir)
        last_good = f"The last good state is {newest}" if newest else "No checkpoint was saved"
        if self.recipe.on_nan == "stop":
            resume = f"vitral {self.command} --resume {shell_quote(self.run)} " if newest else ""
            raise Diverged(
                f"training diverged: {what}",
                error.step,
                f"{last_good}; use a lower --optim.lr, or: {resume}--on-nan rollback",
            ) from None
        if self.state.rollbacks == MAX_ROLLBACKS:
            raise Diverged(
                what, error.step, f"{last_good}; 1/{2**MAX_ROLLBACKS} of the learning rate did not help either"
            ) from None
        self._roll_back()
        self.callbacks.on_message(
            f"{what}: rolled back to step {self.state.step} with 1/{2**self.state.rollbacks} of the learning rate"
        )
        self.callbacks.on_restore(self.state.epoch)

    def _diagnose(self, error: Diverged) -> str:
        """Repeat the bad step with the weights and random draws it had, with hooks on every module."""
        state = self.state
        snapshot = next((snapshot for snapshot in reversed(self.rng_snapshots) if snapshot.step == error.step), None)
        if snapshot is None:
            return error.what
        steps_since = state.step - snapshot.step
        images, labels = next(self.loader.epoch(state.epoch, start=state.batch_in_epoch - steps_since))
        state.augment_rng.set_state(snapshot.augment_rng)
        self.hardware.set_rng_state(snapshot.device_rng)
        eager = self.backend.eager()
        report, loss = locate_nonfinite(
            state.model, lambda: forward_backward(state, images, labels, eager, self.context)[0]
        )
        return describe_divergence(loss, snapshot.step, self.world.all_gather_objects([report]))

    def _roll_back(self) -> None:
        state, folder = self.state, self.run.checkpoint_dir
        self.clock.stop(state)
        rollbacks, elapsed_seconds = state.rollbacks + 1, state.elapsed_seconds
        best = state.best  # these weights stay, even if their epoch is repeated
        load = partial(checkpoint.load_newest, folder, state.tensor_like, self.world, log=self.callbacks.on_message)
        loaded = load()
        assert loaded is not None
        newest, saved = loaded
        if saved["step"] == state.last_rollback_step and (older := load(before=newest)) is not None:
            _, saved = older
            self.world.broadcast_from_rank0(lambda: checkpoint.delete(newest))
        state.load_state_dict(saved, self.hardware)
        state.rollbacks, state.last_rollback_step = rollbacks, state.step
        state.elapsed_seconds, state.best = elapsed_seconds, best
        self.clock = TrainingClock(state, self.batch_size)
        self.time_is_over = self.deadline_has_passed()
        state.model.train()  # validation may have raised in evaluation mode
        self._write_checkpoint()
        self.rng_snapshots.clear()
        self.step_runner.capture()

    def save_checkpoint(self) -> None:
        """Write the state to the run folder, unless training has diverged since the device was last read."""
        self.check_finite()
        self.clock.stop(self.state)
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        content = {"recipe": self.recipe.result_fields(), **self.state.state_dict(self.hardware)}
        if self.base is not None:
            content["base_sha256"] = self.base.sha256
        if self.teacher is not None and self.teacher.sha256 is not None:
            content["teacher_sha256"] = self.teacher.sha256
        checkpoint.save(self.run.checkpoint_dir, self.state.step, content, self.recipe.keep_checkpoints, self.world)

    def export_best_model(self) -> None:
        """Write the weights of the best epoch and the model's config to the run's model folder.

        The model is complete: frozen weights are added, and the factors of LoRA are merged. What was trained is also
        saved alone, as an adapter.
        """
        recipe = self.recipe
        frozen: dict[str, Tensor] = {}
        if recipe.tune != "full":
            frozen = {name: tensor.cpu() for name, tensor in full_state(self.state.model.state_dict()).items()}

        def export() -> None:
            trained = load_weights(self.run.checkpoint_dir / "best.safetensors")
            config = ModelConfig(
                architecture=recipe.model,
                preprocessing=self.preprocessing,
                classes=self.dataset.classes,
                trained_on=self.dataset.name,
                epoch=int(self.state.best["epoch"]),
                variant=recipe.variant,
                calibration=Calibration(activation="sigmoid" if self.task.name == "multilabel" else "softmax"),
                task=self.task.name,
                target_scaling=self.target_scaling,
            )
            if self.base is not None:
                lora = recipe.lora if recipe.tune == "lora" else None
                adapter = Adapter(tune=recipe.tune, lora=lora, base=self.base, config=config, tensors=trained)
                save_adapter(self.run.model_dir, adapter)
            model = build_uninitialized(recipe.variant, recipe.model)
            model.load_state_dict(merge_lora({**frozen, **trained}, recipe.lora.scaling))
            save_model(self.run.model_dir, model, config)

        self.world.broadcast_from_rank0(export)

    # Helpers.

    def patience_is_over(self) -> bool:
        """Whether validation has not improved for `patience` epochs. Depends on the state alone: a resume is exact."""
        state, patience = self.state, self.recipe.patience
        return bool(patience and state.best) and state.epoch - state.best["epoch"] >= patience

    def eval_forward(self) -> Callable[[Tensor], Tensor]:
        """The forward pass that is evaluated after each epoch."""
        return self.state.eval_model

    @property
    def num_evaluated_images(self) -> int:
        """Images that are evaluated after each epoch."""
        return len(self.dataset.validation)

    @property
    def micro_batch_size(self) -> int:
        """Images of this rank per forward pass."""
        return math.ceil(self.batch_size / (self.recipe.grad_accum * self.world.size))

    def report_early_stop(self) -> None:
        step, epoch, epochs = self.state.step, self.state.epoch, self.recipe.epochs
        if step == self.total_steps:
            return
        if self.time_is_over and not self.patience_is_over():
            self.callbacks.on_message(
                f"Stopped after step {step:,} of {self.total_steps:,}: the time limit of {self.recipe.time_limit} is "
                "reached, before the learning rate has finished its schedule"
            )
        else:
            patience = count_text(self.recipe.patience, "epoch")
            self.callbacks.on_message(f"Stopped early after epoch {epoch} of {epochs}: no improvement for {patience}")

    def check_finite(self) -> None:
        """Read the device's flag and raise Diverged if a loss or gradient was not finite."""
        if (step := int(self.state.first_nonfinite_step.item())) >= 0:
            raise Diverged(f"the loss is not finite at step {step + 1}", step)

    def report_step(self) -> None:
        state = self.state
        self.callbacks.on_step(
            state.epoch + 1,
            state.batch_in_epoch,
            (state.epoch_sums[0] / state.epoch_sums[2]).item(),
            self.clock.images_per_second(state),
            self.clock.seconds_left(state, self.total_steps),
        )

    def interrupted(self) -> Interrupted:
        return Interrupted(
            f"training stopped after step {self.state.step} of {self.total_steps}; a checkpoint is saved",
            f"Resume it with: vitral {self.command} --resume {shell_quote(self.run)}",
        )


def describe_single_step_epochs(batch_size: int, num_images: int, min_batch_size: int) -> str:
    """A message that an epoch is a single step, and which smaller batch size gives several."""
    smaller = max(num_images // 8, min_batch_size)
    steps = num_images // smaller
    advice = f"use --batch-size {smaller} for {steps} steps per epoch" if steps > 1 else "use more --epochs"
    return (
        f"Each epoch is a single optimizer step: the batch size is {batch_size:,} and there are {num_images:,} "
        f"training images; {advice}"
    )


def check_splits(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse a dataset without training images, without the validation images that the recipe needs, or with constant
    targets."""
    if not len(dataset.train):
        raise VitralError(f"{dataset.name} has no training images", "Add images, or hold out fewer")
    if not len(dataset.validation) and recipe.data.validation > 0 and recipe.data.fold != "all":
        raise VitralError(
            f"{dataset.name} has no validation images",
            "Add images (copies are never split), raise --data.validation, or train without: --data.validation 0",
        )
    if recipe.patience and not len(dataset.validation):
        raise VitralError(
            f"--patience {recipe.patience} needs validation images, but {dataset.name} has none",
            "Hold some out with --data.validation 0.1, or omit --patience",
        )
    TASKS[recipe.task_name].scaling(dataset.train.labels, dataset.classes)
