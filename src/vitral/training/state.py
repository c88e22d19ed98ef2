"""Everything that changes during training. A checkpoint is a TrainState on disk."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.distributed.dtensor import load_full_state_dict, optimizer_parameters, shard_optimizer_state
from vitral.distributed.parallel import ParallelPlan, place_model
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT
from vitral.recipes.options import SIGMOID_LOSSES
from vitral.recipes.schema import Recipe
from vitral.ssl.method import PretrainMethod
from vitral.ssl.methods import make_method
from vitral.ssl.teacher import Teacher
from vitral.training.hardware import parallel_plan
from vitral.training.init_schemes import apply_init_schemes, init_sigmoid_head_bias
from vitral.training.optim.builder import make_optimizers, restore_optimizer
from vitral.training.optim.ema import EMA
from vitral.training.tuning import apply_tuning


@dataclass
class TrainState:
    """Everything that changes during training."""

    model: ViT | PretrainMethod
    optimizers: list[Optimizer]
    ema: EMA | None
    augment_rng: Generator  # dropout and stochastic depth draw from the device's default generator instead
    epoch_sums: Tensor  # (3,) of the current epoch: loss, running score (correct predictions), images
    first_nonfinite_step: Tensor  # -1 until a loss or gradient is not finite; no weight changes afterwards
    found_nonfinite: Tensor  # 1 from that step on; the optimizers read it on the device (`found_inf`)
    step_tensor: Tensor  # `step` on the device
    epoch: int = 0  # completed epochs
    batch_in_epoch: int = 0  # completed batches of the current epoch
    step: int = 0  # completed optimizer steps
    elapsed_seconds: float = 0.0  # over all processes that worked on the run
    best: dict[str, float] = field(default_factory=dict)  # epoch, loss and the task's metric (top1)
    rollbacks: int = 0  # each one has halved the learning rate
    last_rollback_step: int = -1

    @property
    def eval_model(self) -> ViT | PretrainMethod:
        """The model to evaluate and save: the EMA weights if there are any."""
        return self.ema.model if self.ema is not None else self.model  # type: ignore[return-value]

    @property
    def vit(self) -> ViT:
        """The model, or the ViT that a pretraining method trains."""
        return self.model.student.vit if isinstance(self.model, PretrainMethod) else self.model

    def state_dict(self, hardware: Hardware) -> dict[str, Any]:
        """The content of a checkpoint. All ranks must call this."""
        return {
            "model": self.trained_state(self.model.state_dict()),
            "ema": self.trained_state(self.ema.model.state_dict()) if self.ema is not None else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "augment_rng": self.augment_rng.get_state(),
            "rank_rngs": hardware.world.all_gather_objects([hardware.rng_state()]),
            "epoch_sums": self.epoch_sums,
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "elapsed_seconds": self.elapsed_seconds,
            "best": self.best,
            "rollbacks": self.rollbacks,
            "last_rollback_step": self.last_rollback_step,
        }

    def trained_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a state dict that training changes. The others are those of `Recipe.init_from`."""
        frozen = self.frozen_names()
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    def frozen_names(self) -> set[str]:
        """Names of frozen parameters. An EMA teacher is not frozen, although its parameters have no gradients."""
        if isinstance(self.model, PretrainMethod):
            return set()
        return {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}

    def load_state_dict(self, saved: dict[str, Any], hardware: Hardware) -> None:
        frozen = self.frozen_names()
        load_full_state_dict(self.model, saved["model"], frozen)
        if self.ema is not None:
            load_full_state_dict(self.ema.model, saved["ema"], frozen)
        for optimizer, optimizer_state in zip(self.optimizers, saved["optimizers"], strict=True):
            restore_optimizer(optimizer, shard_optimizer_state(optimizer, optimizer_state))
        self._restore_rngs(saved, hardware)
        self.epoch_sums.copy_(saved["epoch_sums"])
        self.epoch, self.batch_in_epoch, self.step = saved["epoch"], saved["batch_in_epoch"], saved["step"]
        self.elapsed_seconds, self.best = saved["elapsed_seconds"], saved["best"]
        self.rollbacks, self.last_rollback_step = saved["rollbacks"], saved["last_rollback_step"]
        self.first_nonfinite_step.fill_(-1)
        self.found_nonfinite.zero_()

    def _restore_rngs(self, saved: dict[str, Any], hardware: Hardware) -> None:
        if saved["augment_rng"].shape == self.augment_rng.get_state().shape:
            self.augment_rng.set_state(saved["augment_rng"])
        else:  # saved on another kind of device, whose generator cannot be continued here
            self.augment_rng.manual_seed(saved["step"])
        world, rank_rngs = hardware.world, saved["rank_rngs"]
        if len(rank_rngs) == world.size:
            hardware.set_rng_state(rank_rngs[world.rank])
        elif world.is_rank0:
            hardware.set_rng_state(rank_rngs[0])
        else:  # saved by another number of ranks
            torch.manual_seed(rank_seed(saved["step"], world.rank))

    def tensor_like(self, name: str) -> Tensor | None:
        """The tensor that is sharded as a saved one must be, by its path in `state_dict`.

        For example, "optimizers/0/state/5/exp_avg" is sharded like the sixth parameter of the first optimizer.
        """
        kind, _, path = name.partition("/")
        if kind == "optimizers":
            optimizer_index, _, parameter_index, _ = path.split("/")
            return optimizer_parameters(self.optimizers[int(optimizer_index)])[int(parameter_index)]
        model = self.ema.model if kind == "ema" and self.ema is not None else self.model
        tensor: Tensor | None = model.state_dict().get(path)
        return tensor


def init_state(
    recipe: Recipe,
    hardware: Hardware,
    total_steps: int,
    initial_weights: dict[str, Tensor] | None = None,
    sample_images_NCHW: Tensor | None = None,
    parallel: ParallelPlan | None = None,
    preprocessing: Preprocessing | None = None,
    teacher: Teacher | None = None,
) -> TrainState:
    """The state before the first step, with weights drawn from the seed or given as `initial_weights`.

    `sample_images_NCHW`: normalised training images, for init schemes that depend on data. `preprocessing` is needed
    for pretraining, whose model is the method with the ViT inside, and `teacher` for feature distillation.
    """
    torch.manual_seed(recipe.seed)
    vit = VARIANTS[recipe.variant](recipe.model)
    if initial_weights is not None:
        vit.load_state_dict(initial_weights)
    else:
        apply_init_schemes(recipe.init_schemes, vit, sample_images_NCHW)
    if recipe.loss_name in SIGMOID_LOSSES:
        init_sigmoid_head_bias(vit)
    apply_tuning(vit, recipe)
    model: ViT | PretrainMethod = vit
    if recipe.pretrain is not None:
        assert preprocessing is not None
        model = make_method(recipe.pretrain, vit, preprocessing, hardware.world, teacher)
    ema_fraction = recipe.ema_fraction(total_steps)
    parallel = parallel or parallel_plan(recipe, hardware)
    ema_model = copy_for_ema(vit, shares_frozen=parallel.mode != "fsdp") if ema_fraction else None
    for replica in filter(None, (model, ema_model)):
        place_model(
            replica,
            parallel,
            device=hardware.device,
            world_size=hardware.world.size,
            precision=hardware.precision,
            reduce_dtype=recipe.reduce_dtype,
        )
    if not hardware.world.is_rank0:  # dropout and stochastic depth must differ between ranks
        torch.manual_seed(rank_seed(recipe.seed, hardware.world.rank))
    device = hardware.device
    is_captured = hardware.cuda_graphs and parallel.mode != "fsdp"
    optimizers = make_optimizers(model, recipe.optim, lr_device=device if is_captured else None)
    found_nonfinite = torch.zeros((), device=device)
    for optimizer in optimizers:
        optimizer.found_inf = found_nonfinite  # type: ignore[attr-defined]
    return TrainState(
        model=model.train(),
        optimizers=optimizers,
        ema=EMA(model, ema_fraction, total_steps, ema_model) if ema_fraction else None,
        augment_rng=Generator(device).manual_seed(recipe.seed),
        epoch_sums=torch.zeros(3, device=device, dtype=torch.float64),  # fp32 counts exactly only up to 2**24
        first_nonfinite_step=torch.full((), -1, device=device),
        found_nonfinite=found_nonfinite,
        step_tensor=torch.zeros((), device=device, dtype=torch.int64),
    )


def copy_for_ema(model: ViT, shares_frozen: bool) -> ViT:
    """A copy for the averaged weights. Frozen weights need none, but FSDP cannot shard a tensor of two models."""
    frozen = (parameter for parameter in model.parameters() if shares_frozen and not parameter.requires_grad)
    return copy.deepcopy(model, {id(parameter): parameter for parameter in frozen})


def rank_seed(seed: int, rank: int) -> int:
    """A seed that differs between ranks and equals `seed` on rank 0."""
    return (seed + rank * 0x9E3779B97F4A7C15) % 2**63
