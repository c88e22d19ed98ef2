"""vitral plan: estimate memory, communication and duration of training on many GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitral.cli.messages import JSON_HELP
from vitral.cli.options import vit_fields
from vitral.cli.parsing import Command, argument, config_options, option
from vitral.errors import VitralError
from vitral.utils.json_toml import dump_json

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """Estimate memory per GPU, communication, step time and total duration of a training run, and choose DDP or FSDP.

    Training time assumes a fraction of the GPU's peak (--mfu); measure a few steps and pass the measured value.
    """

    preset: str = argument("model size: Ti/16, S/16, B/16, L/16, H/14, ...")
    gpus: int = option(8, "number of GPUs")
    gpu: str = option("H100", "GPU type: L4, RTX-4090, A100-40, A100-80, H100, H200")
    gpu_memory: float | None = option(None, "memory of one GPU in GB, for a type that is not listed")
    gpus_per_node: int = option(8, "GPUs per node")
    network: float = option(50.0, "bandwidth per GPU between nodes in GB/s, one direction; 50 is 400 Gbit/s")
    mfu: float = option(0.4, "model FLOPs utilisation: fraction of the GPU's peak")
    strategy: Literal["auto", "ddp", "fsdp"] = option("auto", "parallelism")
    batch_size: int = option(1024, "images per optimizer step, all GPUs together")
    grad_accum: int = option(1, "micro-batches per optimizer step")
    precision: Literal["fp32", "bf16"] = option("bf16", "precision of the matmuls")
    optimizer: Literal["adamw", "sgd", "muon"] = option("adamw", "optimizer")
    ema: bool = option(True, "keep an exponential moving average of the weights")
    images: int = option(1_281_167, "size of the training set; the default is ImageNet-1k")
    epochs: float = option(300.0, "number of epochs")
    json: bool = option(False, JSON_HELP)
    config: Mapping[str, Any] = config_options(vit_fields, group="Model (defaults: the preset's)")


def plan(args: PlanArgs) -> int:
    from vitral.analysis import cost
    from vitral.models.presets import preset

    for flag in ("gpu_memory", "network", "images", "epochs"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < math.inf:
            raise VitralError(
                f"--{flag.replace('_', '-')} must be greater than 0, got {value}", "See `vitral plan --help`"
            )
    gpu = cost.gpu_spec(args.gpu)
    if args.gpu_memory is not None:
        gpu = gpu.with_memory(args.gpu_memory * GB)
    try:
        training = cost.CostEstimate(
            config=preset(args.preset, **args.config),
            gpus=args.gpus,
            batch_size=args.batch_size,
            grad_accum=args.grad_accum,
            precision=args.precision,
            optimizer=args.optimizer,
            ema=args.ema,
            gpu=gpu,
            gpus_per_node=args.gpus_per_node,
            network=args.network * GB,
            mfu=args.mfu,
        )
    except ValueError as error:
        raise VitralError(str(error), "See `vitral plan --help`") from error
    strategy = None if args.strategy == "auto" else args.strategy
    estimate = cost.cost_as_dict(training, args.images * args.epochs, strategy)
    if args.json:
        print(dump_json({"preset": args.preset, **estimate}, indent=2))
    else:
        from vitral.reporting.terminal.cost import cost_text

        gpu_name = args.gpu if args.gpu_memory is None else f"{args.gpu} ({args.gpu_memory:g} GB)"
        print(cost_text(args.preset, gpu_name, estimate, f"{args.images:,} images, {args.epochs:g} epochs"))
    return 0


COMMAND = Command("plan", PlanArgs, plan)
