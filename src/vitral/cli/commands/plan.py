"""Memory, communication and days of a training, before the machines are rented."""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vitral.cli.parsing import parse, positional
from vitral.errors import VitralError

GB, GIB = 10**9, 2**30


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    from vitral.analysis import cost as estimate
    from vitral.models.presets import PRESETS, preset
    from vitral.models.vit import ViTConfig

    name = positional(words)
    if name is None and not {"-h", "--help"} & set(words):
        raise VitralError("which model?", f"Known: {', '.join(PRESETS)}")

    @dataclass(frozen=True, kw_only=True)
    class Wish:
        """What a training needs on so many GPUs: memory, communication, arithmetic, days; what fits, and why."""

        preset: Positional[str]
        config: Annotated[ViTConfig, arg(name="")]
        gpus: int = 8
        strategy: Literal["auto", "ddp", "fsdp"] = "auto"
        batch: int = 1024  # images a step, all GPUs together
        accumulate: int = 1  # parts in which each GPU takes its share
        precision: Literal["fp32", "bf16"] = "bf16"
        optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
        ema: bool = True  # averaged weights besides the trained ones
        gpu: str = "H100"  # L4, RTX-4090, A100-40, A100-80, H100, H200
        memory: float | None = None  # GB of one GPU, for one that is not in the table
        gpus_per_node: int = 8
        network: float = 50.0  # GB/s a GPU between nodes, one way (50: 400 Gbit/s a GPU)
        mfu: float = 0.4  # share of the GPU's peak that the model's arithmetic reaches
        images: int = 1_281_167  # of the training set (ImageNet-1k)
        epochs: float = 300
        json: Annotated[bool, FlagCreatePairsOff] = False  # for programs

    chosen = parse(Wish, words, "plan", default=Wish(preset=name or "B/16", config=preset(name or "B/16")))
    for flag in ("memory", "network", "images", "epochs"):
        if (value := getattr(chosen, flag)) is not None and not 0 < value < math.inf:
            raise VitralError(f"--{flag} must be above 0, not {value}", "vitral plan --help lists the flags")
    gpu = estimate.gpu_named(chosen.gpu)
    if chosen.memory is not None:
        gpu = gpu.with_memory(chosen.memory * GB)
    try:
        plan = estimate.Plan(
            config=chosen.config,
            gpus=chosen.gpus,
            batch=chosen.batch,
            accumulate=chosen.accumulate,
            precision=chosen.precision,
            optimizer=chosen.optimizer,
            ema=chosen.ema,
            gpu=gpu,
            gpus_per_node=chosen.gpus_per_node,
            network=chosen.network * GB,
            mfu=chosen.mfu,
        )
    except ValueError as error:
        raise VitralError(str(error), "vitral plan --help lists the flags") from error
    strategy = None if chosen.strategy == "auto" else chosen.strategy
    seen = chosen.images * chosen.epochs
    found = estimate.as_dict(plan, seen, strategy)
    if chosen.json:
        print(json.dumps({"preset": chosen.preset, **found}, indent=2))
    else:
        gpu_name = chosen.gpu if chosen.memory is None else f"{chosen.gpu} with {chosen.memory:g} GB"
        print(text(chosen.preset, gpu_name, found, f"{chosen.images:,} images, {chosen.epochs:g} epochs"))
    return 0


def text(name: str, gpu: str, found: dict[str, Any], seen: str) -> str:
    """For people: GiB and GB, the two ways side by side, and what follows."""
    memory, sent = found["memory"], found["communication"]

    def row(label: str, key: str, unit: float, table: dict[str, Any], note: str = "") -> str:
        return f"  {label:<26}{table['ddp'][key] / unit:>9.2f}{table['fsdp'][key] / unit:>9.2f}  {note}".rstrip()

    recomputed = ", blocks computed again in the backward pass" if found["checkpointing"] else ""
    lines = [
        f"{name}: {found['parameters'] / 1e6:,.1f} M parameters, {found['tokens']:,} tokens an image; "
        f"batch {found['batch']:,} on {found['gpus']:,} × {gpu}: {found['images_at_once']:,} at once each, "
        f"{found['precision']}",
        "",
        f"{'memory a GPU (GiB)':<28}{'ddp':>9}{'fsdp':>9}",
        row("weights", "weights", GIB, memory),
        row("gradients", "gradients", GIB, memory),
        row("optimizer", "optimizer", GIB, memory),
        row("averaged weights", "averaged", GIB, memory),
        row("copies while computing", "copies", GIB, memory),
        row("activations", "activations", GIB, memory),
        row("  with checkpointing", "activations_checkpointed", GIB, memory),
        row("together", "total", GIB, memory),
        row("  with checkpointing", "total_checkpointed", GIB, memory, f"of {found['usable_memory'] / GIB:.1f} usable"),
        "",
        f"{'sent by a GPU a step (GB)':<28}{'ddp':>9}{'fsdp':>9}",
        row("all-reduce", "all_reduce", GB, sent),
        row("all-gather", "all_gather", GB, sent),
        row("reduce-scatter", "reduce_scatter", GB, sent),
        row("milliseconds", "seconds", 1e-3, sent, f"at {found['bandwidth'] / GB:g} GB/s a GPU, one way"),
        "",
        f"strategy   {found['strategy']}{recomputed}: {found['reason']}",
        f"fits       {fitting(found, gpu)}",
        f"step       {found['flops_a_step'] / 1e15:,.2f} PFLOP; {spread(found['step_seconds'], 1e-3, 'ms')} at "
        f"{found['mfu']:.0%} of the peak",
        f"training   {seen}: {spread(found['days'], *((1, 'days') if max(found['days']) >= 2 else (1 / 24, 'hours')))}",
        "",
        "Of the two times, the first has communication hidden behind computing, the second does not. The share of the",
        "peak (--mfu) is an assumption: measure some steps, and put it in.",
    ]
    return "\n".join(lines)


def fitting(found: dict[str, Any], gpu: str) -> str:
    least, room, share = found["smallest"], found["images_at_once_that_fit"], math.ceil(found["batch"] / found["gpus"])
    here = f"up to {room:,} images at once on each" if room else "not even one image at once"
    if 0 < room < share:
        here += f": here with --accumulate {math.ceil(share / room)}"
    if least is None:
        return f"{here}; the whole batch at once on no number of {gpu}"
    recomputed = " and checkpointing" if least["checkpointing"] else ""
    return f"{here}; the whole batch at once from {least['gpus']:,} × {gpu} on, with {least['strategy']}{recomputed}"


def spread(pair: tuple[float, float], unit: float, name: str) -> str:
    low, high = (f"{value / unit:,.{0 if value / unit >= 100 else 1 if value / unit >= 1 else 2}f}" for value in pair)
    return f"{low} {name}" if low == high else f"{low} to {high} {name}"
