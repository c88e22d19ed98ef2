"""The estimate of `vitral plan` as text."""

from __future__ import annotations

import math
from typing import Any

GB, GIB = 10**9, 2**30


def cost_text(preset: str, gpu: str, estimate: dict[str, Any], duration: str) -> str:
    """Memory and communication of DDP and FSDP side by side, then strategy, step time and duration.

    Args:
        preset: Name of the model size.
        gpu: Name of the GPU type.
        estimate: The dictionary that `vitral plan --json` prints.
        duration: What is trained, e.g. "1,281,167 images, 300 epochs".
    """
    memory, communication = estimate["memory"], estimate["communication"]

    def row(label: str, key: str, unit: float, table: dict[str, Any], note: str = "") -> str:
        return f"  {label:<28}{table['ddp'][key] / unit:>9.2f}{table['fsdp'][key] / unit:>9.2f}  {note}".rstrip()

    checkpointing = " with activation checkpointing" if estimate["activation_checkpointing"] else ""
    days = estimate["days"]
    time_unit = (1, "days") if max(days) >= 2 else (1 / 24, "hours")
    lines = [
        f"{preset}: {estimate['parameters'] / 1e6:,.1f} M parameters, {estimate['tokens']:,} tokens per image",
        f"Batch size {estimate['batch_size']:,} on {estimate['gpus']:,} x {gpu}, {estimate['precision']}, "
        f"micro-batches of {estimate['micro_batch']:,} images per GPU",
        "",
        f"{'Memory per GPU (GiB)':<30}{'DDP':>9}{'FSDP':>9}",
        row("weights", "weights", GIB, memory),
        row("gradients", "gradients", GIB, memory),
        row("optimizer state", "optimizer", GIB, memory),
        row("EMA", "ema", GIB, memory),
        row("low-precision copies", "copies", GIB, memory),
        row("activations", "activations", GIB, memory),
        row("  with checkpointing", "activations_checkpointed", GIB, memory),
        row("total", "total", GIB, memory),
        row(
            "  with checkpointing",
            "total_checkpointed",
            GIB,
            memory,
            f"of {estimate['usable_memory'] / GIB:.1f} GiB available",
        ),
        "",
        f"{'Sent per GPU and step (GB)':<30}{'DDP':>9}{'FSDP':>9}",
        row("all-reduce", "all_reduce", GB, communication),
        row("all-gather", "all_gather", GB, communication),
        row("reduce-scatter", "reduce_scatter", GB, communication),
        row("time (ms)", "seconds", 1e-3, communication, f"at {estimate['bandwidth'] / GB:g} GB/s per GPU"),
        "",
        f"Strategy   {estimate['strategy'].upper()}{checkpointing}: {estimate['reason']}",
        f"Capacity   {capacity_text(estimate, gpu)}",
        f"Step       {estimate['flops_per_step'] / 1e15:,.2f} PFLOP, "
        f"{range_text(estimate['step_seconds'], 1e-3, 'ms')} at {estimate['mfu']:.0%} MFU",
        f"Training   {duration}: {range_text(days, *time_unit)}",
        "",
        "Times range from communication fully overlapped with compute to not overlapped. The MFU is an assumption:",
        "measure a few steps and pass the result as --mfu.",
    ]
    return "\n".join(lines)


def capacity_text(estimate: dict[str, Any], gpu: str) -> str:
    """The largest micro-batch, and the smallest number of GPUs for the whole batch."""
    smallest, capacity = estimate["min_gpus"], estimate["max_micro_batch"]
    images_per_gpu = math.ceil(estimate["batch_size"] / estimate["gpus"])
    text = f"micro-batches of up to {capacity:,} images per GPU" if capacity else "not even one image per GPU fits"
    if 0 < capacity < images_per_gpu:
        text += f" (use --grad-accum {math.ceil(images_per_gpu / capacity)})"
    if smallest is None:
        return f"{text}; without gradient accumulation the batch fits on no number of {gpu}"
    checkpointing = " and activation checkpointing" if smallest["activation_checkpointing"] else ""
    strategy = smallest["strategy"].upper()
    return f"{text}; without gradient accumulation at least {smallest['gpus']:,} x {gpu}, {strategy}{checkpointing}"


def range_text(interval: tuple[float, float], unit: float, unit_name: str) -> str:
    """`12.5 to 14.0 ms`, or one value if both round to it."""
    values = [value / unit for value in interval]
    low, high = (f"{value:,.{0 if value >= 100 else 1 if value >= 1 else 2}f}" for value in values)
    return f"{low} {unit_name}" if low == high else f"{low} to {high} {unit_name}"
