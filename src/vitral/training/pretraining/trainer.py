"""Pretrain one model on unlabelled images.

    uint8 batch -> views and masks -> method (student, teacher, heads) -> loss -> gradients -> optimizer -> EMA teacher

`PretrainTrainer` differs from `Trainer` in its backend and in what it measures after an epoch: the features of a fixed
sample of images, which reveal a collapse, and with a few labels their k-NN accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitral.data.lazy_images import Images, select_images
from vitral.data.preprocess import to_model_input
from vitral.data.probe_set import ProbeSet
from vitral.data.variable_images import images_of_one_size, select_rows
from vitral.distributed.dtensor import full_state, load_full_state_dict, shard_optimizer_state
from vitral.errors import VitralError, shell_quote
from vitral.evaluation.feature_classifiers import leave_one_out_accuracy
from vitral.inference.forward import compute_logits_distributed
from vitral.models.variants import VARIANTS
from vitral.runs.model_io import ModelConfig, load_weights, save_model, save_weights
from vitral.ssl.collapse import (
    CollapseMetrics,
    advice_for_similar_images,
    collapse_reason,
    image_deviation,
    measure_collapse,
)
from vitral.ssl.method import PretrainMethod
from vitral.training.backend import Backend
from vitral.training.nan_debug import Diverged
from vitral.training.optim.builder import restore_moments
from vitral.training.pretraining.backend import make_pretrain_backend
from vitral.training.trainer import Trainer
from vitral.weights.checkpoint import NO_HEAD

NUM_SAMPLE_IMAGES = 2048  # to measure features on after each epoch
NUM_COMPARED_IMAGES = 64  # of these, to compare pixels of after a collapse


class PretrainTrainer(Trainer):
    """Train the ViT inside a pretraining method. The last epoch's weights become the model.

    `probe_set` holds labelled images for the k-NN accuracy after each epoch, not for training. `method_state` and
    `optimizer_states` are those of a run that is continued.
    """

    command = "pretrain"
    min_batch_size = 32  # most methods compare the images of a batch
    probe_set: ProbeSet | None = None
    method_state: dict[str, Tensor] | None = None
    optimizer_states: list[dict[str, Any]] | None = None

    @property
    def method(self) -> PretrainMethod:
        assert isinstance(self.state.model, PretrainMethod)
        return self.state.model

    def setup(self) -> None:
        super().setup()
        self.method.set_total_steps(self.total_steps)
        if self.method_state is not None:
            names = self.method.state_dict().keys()
            load_full_state_dict(self.method, self.method_state, unchanged=names)
        self.history = [collapse_metrics(row) for row in self.run.load_metrics()]
        train = self.dataset.train
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(self.recipe.seed))
        is_sampled = torch.zeros(len(train), dtype=torch.bool)
        is_sampled[order[:NUM_SAMPLE_IMAGES]] = True
        self.sample_images = to_model_input(select_images(train.images, is_sampled), self.preprocessing)

    def start(self) -> None:
        if self.optimizer_states is not None and not self.resumed:
            for optimizer, saved in zip(self.state.optimizers, self.optimizer_states, strict=True):
                restore_moments(optimizer, shard_optimizer_state(optimizer, saved))
        super().start()
        self.check_collapse()

    def make_backend(self) -> Backend:
        return make_pretrain_backend(
            self.method,
            self.recipe,
            self.hardware,
            self.parallel,
            micro_batch_size=self.micro_batch_size,
            log=self.callbacks.on_message,
        )

    def validate(self) -> dict[str, Any]:
        """Measure the features, keep the weights if this is the last epoch, and reset the epoch counters."""
        state = self.state
        self.hardware.synchronize()
        training_seconds = self.clock.training_seconds(state)
        metrics = self.training_metrics()
        checks = self.measure_features()
        if not math.isfinite(checks.effective_rank):  # the last update itself diverged; these weights must not be saved
            raise Diverged(f"the features are not finite after step {state.step}", state.step)
        metrics |= {name: value for name, value in vars(checks).items() if value is not None}
        if self.probe_set is not None:
            features = self._forward(self.method.features, self.probe_set.images).cpu()
            labels, K = self.probe_set.labels, len(self.probe_set.classes)
            metrics["knn_top1"] = leave_one_out_accuracy(features, labels, K, self.probe_set.num_neighbours)
        self.history = [*self.history[: state.epoch], checks]
        is_last = metrics["best"] = state.epoch + 1 == self.recipe.epochs or self.time_is_over
        if is_last:
            state.best = {"epoch": state.epoch + 1}
            self._save_backbone()
        return metrics | self.reset_epoch(training_seconds)

    def end_epoch(self, metrics: dict[str, Any]) -> None:
        super().end_epoch(metrics)
        every = self.recipe.checkpoint_epochs
        if metrics["best"] and every and self.state.epoch % every:
            self.save_checkpoint()  # another run can continue with its heads and teacher
        self.check_collapse()

    def check_collapse(self) -> None:
        """Stop a run whose features have collapsed. A resumed one stops at once."""
        history = self.history[: self.state.epoch]
        collapse = collapse_reason(history, self.method.collapse_remedy) if self.method.can_collapse else None
        if collapse is not None:
            self.save_checkpoint()
            hint = collapse.hint
            if (first := advice_for_similar_images(self.image_deviation())) is not None:
                hint = f"{first}. If they are right, {hint[0].lower()}{hint[1:]}"
            raise VitralError(
                f"{collapse.what}, after epoch {self.state.epoch}",
                f"{hint}. Start again with: vitral {self.command} --recipe {shell_quote(self.run.recipe_file)} ...",
            )

    def image_deviation(self) -> float:
        """How much a few training images differ, as a fraction of the pixel range."""
        rows = torch.linspace(0, len(self.sample_images) - 1, NUM_COMPARED_IMAGES).long().unique()
        images = images_of_one_size(select_rows(self.sample_images, rows), NUM_COMPARED_IMAGES)
        return image_deviation(images) / self.preprocessing.pixel_scale

    def training_score(self, mean_score: float) -> dict[str, float]:
        return {f"train_{self.method.score_name}": mean_score}

    def eval_forward(self) -> Callable[[Tensor], Tensor]:
        return self.method.features

    @property
    def num_evaluated_images(self) -> int:
        return len(self.sample_images) + (0 if self.probe_set is None else len(self.probe_set.labels))

    def measure_features(self) -> CollapseMetrics:
        """Measures of collapse on a fixed sample of the training images."""
        features = self._forward(self.method.features, self.sample_images)
        if type(self.method).output_logits is PretrainMethod.output_logits:
            return measure_collapse(features)
        logits = self._forward(self.method.output_logits, self.sample_images)
        return measure_collapse(features, self.method.output_probs(logits))

    def _forward(self, function: Callable[[Tensor], Any], images_NCHW: Images) -> Tensor:
        self.method.eval()
        return compute_logits_distributed(function, images_NCHW, self.preprocessing, self.hardware)

    def _save_backbone(self) -> None:
        state = full_state(self.method.backbone.state_dict())
        self.world.broadcast_from_rank0(lambda: save_weights(self.run.checkpoint_dir / "best.safetensors", state))

    def export_best_model(self) -> None:
        """Write the backbone to the run's model folder, as a model without a classifier."""
        recipe = self.recipe

        def export() -> None:
            config = ModelConfig(
                architecture=recipe.model,
                preprocessing=self.preprocessing,
                classes=(NO_HEAD,),
                trained_on=self.dataset.name,
                epoch=int(self.state.best["epoch"]),
                variant=recipe.variant,
            )
            model = VARIANTS[recipe.variant](recipe.model)
            head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("head.")}
            model.load_state_dict({**load_weights(self.run.checkpoint_dir / "best.safetensors"), **head})
            save_model(self.run.model_dir, model, config)

        self.world.broadcast_from_rank0(export)


def collapse_metrics(row: dict[str, Any]) -> CollapseMetrics:
    """The measures of collapse in a line of metrics.jsonl."""
    return CollapseMetrics(**{name: row[name] for name in CollapseMetrics.__dataclass_fields__ if name in row})
