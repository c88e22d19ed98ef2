"""The recipe: one frozen dataclass that determines the result of a training run, with TOML in and out.

A recipe in a run folder is complete, so `vitral train --recipe runs/x/recipe.toml` repeats the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w

from vitral.data.augment import AugmentConfig
from vitral.data.files.file_dataset import ReadOptions
from vitral.data.folds import Fold, parse_fold
from vitral.data.geometry import Resize
from vitral.data.loader import Sampling
from vitral.data.pixels import ArrayLayout, PixelTypeOption
from vitral.data.preprocess import Interpolation
from vitral.data.targets import LabelOptions, TaskName
from vitral.device.select import CompileOption, DeviceOption, PrecisionOption
from vitral.distributed.gradients import ReduceDtype
from vitral.errors import VitralError, is_control, short_repr
from vitral.models.lora import LoRAConfig
from vitral.models.variants import check_variant, config_class, upgrade_architecture
from vitral.models.vit import ViTConfig
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.distillation import DistillConfig
from vitral.recipes.files import read_recipe_values
from vitral.recipes.options import (
    TASK_LOSSES,
    TTA,
    HeadInit,
    InitScheme,
    LossName,
    LossOption,
    TaskOption,
    check_tune,
    init_scheme_unsupported_reason,
    parse_duration,
    tune_from_freeze,
)
from vitral.ssl.config import PretrainConfig
from vitral.utils.serialization import InvalidValueError, from_dict, named_values, to_dict

FREEZE_REPLACED = (
    "freeze was replaced by tune",
    "Train only the head with --tune head (freeze backbone), or the last N blocks and the head with --tune last-N",
)
MAX_NAME_BYTES = 200  # file systems limit names to 255, and a run folder adds date and id

# Fields that may change when a run is resumed: computation and disk usage, not the result. Pretraining methods that
# compare the images of a micro-batch keep grad_accum.
RESUMABLE_FIELDS = (
    "device", "threads", "precision", "compile", "parallel", "reduce_dtype", "grad_accum", "activation_checkpointing",
    "tta", "time_limit", "checkpoint_epochs", "checkpoint_minutes", "keep_checkpoints", "on_nan", "tensorboard",
    "wandb", "mlflow",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, its validation split and its preprocessing.

    The validation split selects the best epoch and calibrates the model. Without one, training uses all images, the
    last epoch's weights become the model, and the model is not calibrated.
    """

    name: str  # built-in dataset, folder, CSV list or shard pattern
    more: tuple[str, ...] = ()  # pretraining: further sources of unlabelled images, used together with name
    validation: float = 0.1  # fraction of the training set to hold out for validation
    test_split: float = 0.0  # fraction to hold out as a test split, from data without one
    fold: str = ""  # fold to leave out and test on: 2/5 is the second of five; all: train on all folds; see --folds
    mean: tuple[float, ...] | None = None  # per-channel mean in [0, 1]; computed from the training set if omitted
    std: tuple[float, ...] | None = None  # per-channel standard deviation; computed from the training set if omitted
    resize: Resize = "crop"  # aspect ratio: crop the centre, pad with the mean colour, stretch, or native patch grids
    crop: float = 1.0  # side of the central crop, as a fraction of the resized image's shorter side; with resize crop
    interpolation: Interpolation = "bilinear"  # how images are resized
    pack: float = ReadOptions.pack  # GiB of disk for decoded images; larger datasets are decoded in every epoch
    unreadable: float = ReadOptions.unreadable  # stop if more than this fraction of the files is unreadable
    workers: int = ReadOptions.workers  # images decoded in parallel; 0: one per CPU
    exclude: tuple[str, ...] = ()  # files that are not used, relative to the dataset; see --exclude
    targets: tuple[str, ...] = ()  # regression: columns of a CSV list to predict, for example age,weight
    label_separator: str = ""  # multilabel: what separates the labels in a CSV list; detected if omitted
    dtype: PixelTypeOption = "auto"  # data type of the pixels; auto: that of the files, so that 16 bits are kept
    layout: ArrayLayout = "auto"  # axes of .npy arrays; auto: detected from their shape
    channel_names: tuple[str, ...] = ()  # names of the channels, in order; read from the files if they have them

    def __post_init__(self) -> None:
        for name in ("validation", "test_split"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be at least 0 and below 1, got {getattr(self, name)}")
        self.parsed_fold  # noqa: B018 - validates it
        self.read_options  # noqa: B018 - validates the fields it is made of
        names = tuple(name.strip() for item in self.targets for name in item.split(","))  # age,weight on a command line
        object.__setattr__(self, "targets", names)
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"data.targets must be different names of columns, got {', '.join(map(repr, names))}")

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of unlabelled images."""
        return (self.name, *self.more)

    @property
    def parsed_fold(self) -> Fold | None:
        return parse_fold(self.fold)

    @property
    def read_options(self) -> ReadOptions:
        """Options for reading files. They do not affect the result."""
        return ReadOptions(pack=self.pack, unreadable=self.unreadable, workers=self.workers)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"  # muon: Muon for the blocks' matrices, AdamW for everything else
    lr: float = 1e-3  # peak learning rate
    lr_base_batch_size: int = 0  # scale lr by batch size / this number; 0: no scaling
    weight_decay: float = 0.05  # weight decay of matrices; norms, biases, tokens and positions are not decayed
    muon_weight_decay: float | None = None  # weight decay of the matrices that Muon updates; default: weight_decay
    betas: tuple[float, float] = (0.9, 0.999)  # decay rates of the two moments of AdamW
    momentum: float = 0.9  # momentum of SGD
    grad_clip: float = 1.0  # maximum gradient norm; 0: no clipping
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # learning rate after the warm-up
    warmup: float = 0.1  # fraction of the run if below 1, otherwise number of steps
    final_lr: float = 0.0  # learning rate at the end of the schedule, as a fraction of lr
    layer_decay: float = 1.0  # learning rate of each block relative to the next one (arXiv 2106.08254)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optim.lr must be above 0, got {self.lr}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optim.layer_decay must be above 0 and at most 1, got {self.layer_decay}")
        if self.muon_weight_decay is not None and not self.muon_weight_decay >= 0:
            raise ValueError(f"optim.muon_weight_decay must be at least 0, got {self.muon_weight_decay}")
        for name in ("lr_base_batch_size", "weight_decay", "grad_clip", "warmup", "final_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} must be a finite number of at least 0, got {getattr(self, name)}")
        for name, values in (("betas", self.betas), ("momentum", (self.momentum,))):
            if not all(0 <= value < 1 for value in values):
                raise ValueError(f"optim.{name} must be at least 0 and below 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the result of a training run."""

    name: str  # name of the recipe, and prefix of the run folder
    data: DataConfig  # dataset, validation split and preprocessing
    model: ViTConfig  # architecture; the variant "hybrid" needs a HybridConfig
    task: TaskOption = "auto"  # auto: from the data; one class, several labels (multilabel) or numbers (regression)
    variant: str = "plain"  # model variant (vitral.models.variants)
    augment: AugmentConfig = field(default_factory=AugmentConfig)  # augmentation of the training images
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer and learning-rate schedule
    init_schemes: tuple[InitScheme, ...] = ()  # weight initialisations for short runs (vitral.training.init_schemes)
    init_from: str = ""  # checkpoint to fine-tune: file, folder, run, hf:owner/name or auto; empty: train from scratch
    init_options: CheckpointOptions = NO_OPTIONS  # what the files of init_from do not contain
    keep_image_size: bool = False  # with init_from: use the recipe's image size instead of the checkpoint's
    tune: str = "full"  # with init_from, what to train: full, head, lora, bias, or last-N for the last N blocks
    head_init: HeadInit = "zeros"  # with init_from: start a new head with zeros or fitted to the checkpoint's features
    lora: LoRAConfig = field(default_factory=LoRAConfig)  # rank and layers of tune "lora"
    pretrain: PretrainConfig | None = None  # learn without labels by a self-supervised method; None: learn the labels
    distill: DistillConfig | None = None  # learn the predictions of a teacher as well as the labels
    teacher_options: CheckpointOptions = NO_OPTIONS  # what the files of a teacher do not contain
    epochs: int = 10  # passes over the training set
    patience: int = 0  # stop after this many epochs without a better validation result; 0: train all epochs
    time_limit: str = ""  # end within this time, evaluation included, with as many epochs as fit: 30m, 1h30m, 90s
    batch_size: int = 128  # images per optimizer step, over all processes; auto: as many as the GPU's memory allows
    auto_batch_size: bool = False  # replace batch_size by a measured one; written as batch_size = "auto"
    grad_accum: int = 1  # micro-batches per optimizer step; more of them need less memory
    activation_checkpointing: bool = False  # recompute activations during backward: less memory, a third more time
    sampling: Sampling = "uniform"  # balanced: draw each class equally often, repeating images of rare classes
    loss: LossOption = "auto"  # auto: softmax for classification, sigmoid for multilabel, mse for regression
    class_weights: Literal["none", "balanced"] = "none"  # balanced: weight classes by inverse frequency in the loss
    logit_adjustment: float = 0.0  # tau: add tau x log class frequency to the logits in the loss (arXiv 2007.07314)
    label_smoothing: float = 0.0  # probability mass spread over all classes; only for classification
    ema: float = 0.0  # window of the weight average, as a fraction of the run; 0: no averaging
    ema_decay: float = 0.0  # instead of ema, decay per step: 0.99996 averages over 25,000 steps
    seed: int = 0  # seed of weights, batch order and augmentation
    device: DeviceOption = "auto"  # auto: a GPU if there is one; CUDA_VISIBLE_DEVICES selects among several
    threads: int = 0  # CPU threads; 0: the fastest number, from a short measurement at the start
    precision: PrecisionOption = "auto"  # fp8: GEMMs in 8 bits, for wide models on recent GPUs
    compile: CompileOption = "auto"  # torch.compile and CUDA graphs
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # several processes: replicate or shard the model
    reduce_dtype: ReduceDtype = "fp32"  # several processes: dtype of gradient sums; bf16: half the bytes
    tta: TTA = "none"  # test-time augmentation for the test accuracy
    checkpoint_epochs: int = 1  # epochs between checkpoints; 0: none, for runs of seconds
    checkpoint_minutes: float = 10.0  # minutes between checkpoints within an epoch
    keep_checkpoints: int = 2  # newest checkpoints to keep
    on_nan: Literal["stop", "rollback"] = "stop"  # rollback: return to a checkpoint and halve the learning rate
    tensorboard: bool = False  # write TensorBoard logs to the run folder
    wandb: bool = False  # log to Weights & Biases (WANDB_PROJECT, WANDB_MODE=offline, ...)
    mlflow: bool = False  # log to MLflow (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_variant(self.variant, self.model)
        if reason := init_scheme_unsupported_reason(self.init_schemes, self.variant, self.model):
            raise ValueError(reason)
        check_tune(self.tune, self.model.depth)
        if self.tune == "lora" and self.lora.rank > self.model.width:
            raise ValueError(f"lora.rank must be at most {self.model.width}, the model's width, got {self.lora.rank}")
        minimums = {"epochs": 1, "patience": 0, "batch_size": 1, "grad_accum": 1, "keep_checkpoints": 1}
        minimums |= {"checkpoint_epochs": 0, "threads": 0}
        for name, minimum in minimums.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        for name in ("label_smoothing", "ema", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.time_limit:
            try:
                parse_duration(self.time_limit)
            except ValueError as error:
                raise ValueError(f"time_limit: {error}") from None
        if not self.checkpoint_minutes >= 0:
            raise ValueError(f"checkpoint_minutes must be at least 0, got {self.checkpoint_minutes}")
        if self.ema and self.ema_decay:
            raise ValueError(f"ema and ema_decay exclude each other, but are {self.ema} and {self.ema_decay}")
        if self.grad_accum > self.batch_size:
            raise ValueError(f"grad_accum must be at most batch_size, {self.batch_size}, got {self.grad_accum}")
        self._check_class_balance()
        if self.pretrain is not None:
            check_pretraining(self)
        if self.task != "auto":
            check_task(self, self.task)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be at least 0 and below 2**32, got {self.seed}")

    def _check_class_balance(self) -> None:
        if self.sampling == self.class_weights == "balanced":
            raise ValueError("sampling and class_weights must not both be balanced: rare classes would count twice")
        if not 0 <= self.logit_adjustment < math.inf:
            raise ValueError(f"logit_adjustment must be a finite number of at least 0, got {self.logit_adjustment}")
        if self.logit_adjustment and "balanced" in (self.sampling, self.class_weights):
            other = "sampling" if self.sampling == "balanced" else "class_weights"
            raise ValueError(f"logit_adjustment excludes {other} = balanced: rare classes would count twice")
        if self.logit_adjustment and self.loss_name != "softmax":
            raise ValueError(f"logit_adjustment needs the loss softmax, got {self.loss_name}")

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate for this batch size."""
        return self.batch_size / self.optim.lr_base_batch_size if self.optim.lr_base_batch_size else 1.0

    @property
    def task_name(self) -> TaskName:
        """The task; classification until the data has been read."""
        return "classification" if self.task == "auto" else self.task

    @property
    def loss_name(self) -> LossName:
        """The loss; the default of the task if it is automatic."""
        return TASK_LOSSES[self.task_name][0] if self.loss == "auto" else self.loss

    @property
    def label_options(self) -> LabelOptions:
        """How the labels of a list or sequence are read."""
        task = None if self.task == "auto" else self.task
        return LabelOptions(task=task, targets=self.data.targets, separator=self.data.label_separator)

    def with_task(self, task: TaskName) -> Recipe:
        """The recipe for data of this task, with its loss filled in. Label smoothing is kept for classification only.

        Raises:
            VitralError: The recipe has fields that do not apply to the task.
        """
        smoothing = self.label_smoothing if task == "classification" else 0.0
        loss: LossOption = TASK_LOSSES[task][0] if self.loss == "auto" else self.loss
        try:
            return replace(self, task=task, loss=loss, label_smoothing=smoothing)
        except ValueError as error:
            raise VitralError(f"{self.data.name}: {error}", "Change it, or omit it for the task's default") from error

    def ema_fraction(self, total_steps: int) -> float:
        """Window of the weight average as a fraction of the run; 0: no averaging."""
        return 1 / ((1 - self.ema_decay) * total_steps) if self.ema_decay else self.ema

    def result_fields(self) -> dict[str, Any]:
        """The fields that determine the result, as plain values: a checkpoint only fits a recipe with equal ones."""
        fixed = ("grad_accum",) if self.pretrain is not None and self.pretrain.compares_images else ()
        fields = {name: value for name, value in to_dict(self).items() if name not in RESUMABLE_FIELDS or name in fixed}
        data = {name: value for name, value in fields["data"].items() if name not in to_dict(ReadOptions())}
        return {**fields, "data": data}

    def has_result_fields(self, saved: Mapping[str, Any]) -> bool:
        """Whether the `result_fields` of a checkpoint equal this recipe's. Fields added since count as defaults."""
        values = to_dict(self)
        try:
            recipe = recipe_from_dict({**values, **saved, "data": {**values["data"], **saved["data"]}})
        except VitralError:
            return False
        return recipe.result_fields() == self.result_fields()

    def to_toml(self) -> str:
        """Every field, except those that are None, which TOML cannot represent."""
        return arrays_on_one_line(tomli_w.dumps(to_dict(self)))

    def with_overrides(self, overrides: Mapping[str, Any]) -> Recipe:
        """A copy with some fields replaced; nested fields by dotted names: `{"optim.lr": 3e-4}`.

        Another `variant` drops the fields of the architecture that it does not have.
        """
        values = to_dict(self)
        if (model_class := config_class(overrides.get("variant", self.variant))) is not config_class(self.variant):
            values["model"] = {
                field.name: values["model"][field.name]
                for field in fields(model_class)
                if field.name in values["model"]
            }
        for path, value in overrides.items():
            if path == "freeze":
                raise VitralError(*FREEZE_REPLACED)
            if path == "batch_size":
                values["auto_batch_size"] = value == "auto"
                if value == "auto":  # keeps the recipe's batch size, for a CPU
                    continue
            inner = values
            *groups, name = path.split(".")
            for group in groups:
                inner = inner.setdefault(group, {})
                if not isinstance(inner, dict):
                    raise VitralError(
                        f"{path!r} is not a recipe field: {group!r} has no fields of its own",
                        "`vitral recipes show NAME` prints all fields",
                    )
            inner[name] = to_dict(value)
        try:
            recipe = recipe_from_dict(values)
        except InvalidValueError as error:
            previous = {path: _field_value(self, path) for path in overrides}
            hint = named_values(error.what, previous)
            raise VitralError(error.what, f"The recipe {self.name} has {hint}" if hint else error.hint) from error
        if recipe.tune != "lora" and (unused := next((path for path in overrides if path.startswith("lora.")), None)):
            raise VitralError(f"{unused} has no effect with tune {recipe.tune!r}", "Use it with: --tune lora")
        return recipe


def _field_value(recipe: Recipe, path: str) -> Any:
    """The value of a field by its dotted name; None if it does not exist."""
    value: Any = recipe
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def check_pretraining(recipe: Recipe) -> None:
    """Raise ValueError for fields that do not apply to pretraining."""
    for name, default in (("ema", 0.0), ("ema_decay", 0.0), ("tune", "full"), ("patience", 0), ("tta", "none")):
        if getattr(recipe, name) != default:
            raise ValueError(f"{name} does not apply to pretraining, got {getattr(recipe, name)!r}")
    if recipe.distill is not None:
        raise ValueError("distill needs labels; a recipe without labels has pretrain.distill")


def check_task(recipe: Recipe, task: TaskName) -> None:
    """Raise ValueError for fields that do not apply to the task."""
    if recipe.loss != "auto" and recipe.loss not in TASK_LOSSES[task]:
        raise ValueError(f"the losses of {task} are {', '.join(TASK_LOSSES[task])}, but loss is {recipe.loss!r}")
    if recipe.distill is not None and recipe.loss_name != "softmax":
        raise ValueError(f"distill needs one class per image and the loss softmax, got {task} with {recipe.loss_name}")
    if task == "classification":
        return
    for name, default in (
        ("sampling", "uniform"),
        ("class_weights", "none"),
        ("logit_adjustment", 0.0),
        ("tta", "none"),
    ):
        if getattr(recipe, name) != default:
            raise ValueError(f"{name} {getattr(recipe, name)!r} needs one class per image, but the task is {task}")


def check_name(name: str) -> None:
    """Raise ValueError for a name that cannot be part of a run folder's name, such as a path."""
    is_path = name.startswith(".") or "/" in name or "\\" in name
    if not name or is_path or any(map(is_control, name)) or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise ValueError(f"name must be a plain name, because run folders are named after it; got {short_repr(name)}")


def arrays_on_one_line(toml: str) -> str:
    """TOML as tomli_w writes it, with each array on one line."""

    def join(array: re.Match[str]) -> str:
        return f"[{', '.join(line.strip().removesuffix(',') for line in array[0].splitlines()[1:-1])}]"

    return re.sub(r"\[\n(?:    .*,\n)+\]", join, toml)


def recipe_from_dict(values: Mapping[str, Any]) -> Recipe:
    """A recipe from nested dictionaries. The variant decides the class of `model`."""
    if values.get("batch_size") == "auto":
        values = {name: value for name, value in values.items() if name != "batch_size"} | {"auto_batch_size": True}
    if "freeze" in values:
        values = _upgrade_freeze(values)
    if "model" in values:
        values = {**values, "model": upgrade_architecture(values["model"])}
    return from_dict(Recipe, values, field_types={"model": config_class(values.get("variant"))})


def _upgrade_freeze(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the field `freeze`, which older versions wrote, by `tune`."""
    upgraded, freeze = {name: value for name, value in values.items() if name != "freeze"}, str(values["freeze"])
    model = values.get("model")
    depth = model.get("depth") if isinstance(model, Mapping) else None
    if freeze:
        upgraded["tune"] = tune_from_freeze(freeze, depth if isinstance(depth, int) else ViTConfig.depth)
    return upgraded


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file."""
    values = read_recipe_values(path)
    try:
        return recipe_from_dict(values)
    except VitralError as error:
        raise VitralError(f"{path}: {error.what}", error.hint) from error
