"""What a run is: one frozen dataclass, complete, that can be written to TOML and read back.

A recipe says everything that decides the result. Where it comes from (a name, a file, flags) is other files' business.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from vitral.data.augment import Augment
from vitral.data.files.file_dataset import Reading
from vitral.data.loader import Sampling
from vitral.data.preprocess import Interpolation
from vitral.device.hardware import Compile, Device, Precision
from vitral.errors import VitralError, reason
from vitral.evaluation.tta import Views
from vitral.models.variants import check, config_class
from vitral.models.vit import ViTConfig
from vitral.training.init_schemes import Start, why_not
from vitral.training.loss import Loss
from vitral.utils.serialization import from_plain, to_plain

EMBEDDING = ("patch_", "class_", "distillation_", "position_", "registers")  # what comes before the first block

# What may be different when a run is resumed: where it is computed, and what is kept on disk.
CAN_CHANGE = (
    "device", "precision", "compile", "parallel", "accumulate", "recompute", "views", "checkpoint_epochs",
    "checkpoint_minutes", "keep", "on_nan", "tensorboard",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and how much of the training set is held out to choose the best epoch.

    With nothing held out, all images train, the last epoch's weights are the model, and it is not calibrated."""

    name: str
    validation: float = 0.1
    mean: tuple[float, ...] | None = None  # a value a channel, pixels in [0, 1]; None: measured on the training images
    std: tuple[float, ...] | None = None
    crop: float = 1.0  # share of the scaled picture's shorter side that the model sees
    interpolation: Interpolation = "bilinear"
    pack: float = Reading.pack  # GiB of disk that decoded photographs may take; larger sets are decoded anew each epoch
    unreadable: float = Reading.unreadable  # share of broken files above which the run stops
    workers: int = Reading.workers  # processes that decode photographs; 0: one a core

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"data.validation must be at least 0 and below 1, not {self.validation}")
        self.how  # noqa: B018 - refuses what it cannot do

    @property
    def how(self) -> Reading:
        """How files are read: no part of what decides the result."""
        return Reading(pack=self.pack, unreadable=self.unreadable, workers=self.workers)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How the weights move."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"  # muon: for the encoder's matrices, AdamW for the rest
    lr: float = 1e-3
    lr_batch: int = 0  # lr is meant for a batch of so many images and grows with the batch; 0: lr is what it is
    weight_decay: float = 0.05  # on matrices; norms, biases, tokens and positions are spared
    muon_decay: float | None = None  # on those that Muon moves; None: the same
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW
    momentum: float = 0.9  # SGD
    clip: float = 1.0  # largest norm of the gradient; 0: not clipped
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.1  # share of the run if below 1, otherwise a number of steps
    final_lr: float = 0.0  # share of lr at the end of the schedule
    layer_decay: float = 1.0  # each block learns this much slower than the one behind it (arXiv 2106.08254)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optim.lr must be above 0, not {self.lr}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optim.layer_decay must be above 0 and at most 1, not {self.layer_decay}")
        if self.muon_decay is not None and not self.muon_decay >= 0:
            raise ValueError(f"optim.muon_decay must not be negative, not {self.muon_decay}")
        for name in ("lr_batch", "weight_decay", "clip", "warmup", "final_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name} must be a number from 0 up, not {getattr(self, name)}")
        for name, shares in (("betas", self.betas), ("momentum", (self.momentum,))):
            if not all(0 <= share < 1 for share in shares):
                raise ValueError(f"optim.{name} must be at least 0 and below 1, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result of a training."""

    name: str
    data: Data
    model: ViTConfig  # of the kind that the variant wants: a HybridConfig for "hybrid"
    variant: str = "plain"  # of the table in vitral.models.variants
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    start: tuple[Start, ...] = ()  # first weights that suit short trainings (vitral.training.init_schemes says how)
    init: str = ""  # a checkpoint to begin from: a file, a folder, a run, hf:owner/name; empty: from scratch
    own_size: bool = False  # with init: images of the recipe's size, not of the checkpoint's
    freeze: str = ""  # "backbone": only the head learns; a number: so many blocks and the embedding stay as they are
    epochs: int = 10
    batch: int = 128
    accumulate: int = 1  # parts that a batch is computed in, one after the other: less memory, the same step
    recompute: bool = False  # activations computed again in the backward pass: less memory, a third more time
    sampling: Sampling = "plain"  # balanced: each class equally often in an epoch, small ones again and again
    loss: Loss = "softmax"  # sigmoid: each class a question of its own (arXiv 2006.07159)
    class_weights: Literal["none", "balanced"] = "none"  # balanced: rare classes weigh more in the loss
    label_smoothing: float = 0.0
    ema: float = 0.0  # memory of the averaged weights as a share of the run; 0: no averaging
    ema_decay: float = 0.0  # the same as a number a step, as papers have it: 0.99996 remembers 25,000 steps
    seed: int = 0
    device: Device = "auto"
    precision: Precision = "auto"  # fp32, bf16 or, for wide models on new GPUs, fp8: large products in 8 bits
    compile: Compile = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # of several processes: each the whole model, or a part of it
    views: Views = "one"  # of a test image, averaged. flip: mirrored too; three: moved; six: both; ten: both ways
    checkpoint_epochs: int = 1  # a checkpoint after each so many epochs; 0: none, for runs of seconds
    checkpoint_minutes: float = 10.0  # and after so many minutes
    keep: int = 2  # checkpoints kept
    on_nan: Literal["stop", "rollback"] = "stop"  # rollback: to the last checkpoint, with half the learning rate
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check(self.variant, self.model)
        if reason := why_not(self.start, self.variant, self.model):
            raise ValueError(reason)
        if self.freeze not in ("", "backbone") and not self.freeze.isdigit():
            raise ValueError(f"freeze must be 'backbone' or a number of blocks, not {self.freeze!r}")
        if self.freeze.isdigit() and int(self.freeze) > self.model.depth:
            raise ValueError(f"freeze must be at most {self.model.depth}, the blocks of the model, not {self.freeze}")
        for name, least in (("epochs", 1), ("batch", 1), ("accumulate", 1), ("keep", 1), ("checkpoint_epochs", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("label_smoothing", "ema", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not self.checkpoint_minutes >= 0:
            raise ValueError(f"checkpoint_minutes must not be negative, not {self.checkpoint_minutes}")
        if self.ema and self.ema_decay:
            raise ValueError(f"ema and ema_decay both say how long the average remembers: {self.ema}, {self.ema_decay}")
        if self.accumulate > self.batch:
            raise ValueError(f"accumulate must be at most the batch, {self.batch}, not {self.accumulate}")
        if self.sampling == self.class_weights == "balanced":
            raise ValueError("sampling and class_weights must not both be balanced: rare classes would count twice")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be at least 0 and below 2**32, not {self.seed}")

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by for the size of the batch."""
        return self.batch / self.optim.lr_batch if self.optim.lr_batch else 1.0

    def ema_share(self, steps: int) -> float:
        """Of a run of so many steps, what the averaged weights remember; 0: no averaging."""
        return 1 / ((1 - self.ema_decay) * steps) if self.ema_decay else self.ema

    @property
    def frozen(self) -> tuple[str, ...]:
        """What the names of parameters that do not learn begin with."""
        if self.freeze == "backbone":
            return (*EMBEDDING, "encoder", "attention_", "pooled_")
        if not self.freeze:
            return ()
        return EMBEDDING + tuple(f"encoder.blocks.{block}." for block in range(int(self.freeze)))

    def essence(self) -> dict[str, Any]:
        """What decides the result: everything but where it is computed and what is kept on disk."""
        decides = {name: value for name, value in to_plain(self).items() if name not in CAN_CHANGE}
        data = {name: value for name, value in decides["data"].items() if name not in ("pack", "unreadable", "workers")}
        return {**decides, "data": data}

    def to_toml(self) -> str:
        """Complete: every field, but for those that are None, which TOML cannot say."""
        return re.sub(r"\[\n(?:    .*,\n)+\]", _on_one_line, tomli_w.dumps(to_plain(self)))

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with some fields changed, nested ones by a dot: `recipe.changed({"optim.lr": 3e-4})`."""
        values = to_plain(self)
        for path, value in changes.items():
            inner = values
            *groups, last = path.split(".")
            for group in groups:
                inner = inner.setdefault(group, {})
                if not isinstance(inner, dict):
                    raise VitralError(
                        f"{path!r} is no field of a recipe: {group!r} has no fields inside",
                        "vitral recipes show NAME prints all fields",
                    )
            inner[last] = to_plain(value)
        return from_values(values)


def _on_one_line(array: re.Match[str]) -> str:
    return f"[{', '.join(line.strip().removesuffix(',') for line in array[0].splitlines()[1:-1])}]"


def from_values(values: Mapping[str, Any]) -> Recipe:
    """A recipe from a dictionary, whose variant says what describes its model."""
    return from_plain(Recipe, values, kinds={"model": config_class(values.get("variant"))})


def read_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file; every mistake in it is named."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise VitralError(
            f"cannot read the recipe {path}: {reason(error)}", "vitral recipes show NAME > FILE.toml writes one"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise VitralError(
            f"{path} is not a valid recipe: {error}", "vitral recipes show NAME prints a valid one"
        ) from error
    try:
        return from_values(values)
    except VitralError as error:
        raise VitralError(f"{path}: {error.what}", error.hint) from error
