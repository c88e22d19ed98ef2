"""vitral convert: convert checkpoints between libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs
from vitral.cli.messages import BUNDLED
from vitral.cli.options import checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, argument, option


@dataclass(frozen=True, kw_only=True)
class ConvertArgs:
    """Convert a checkpoint to another library's format and verify that the result is lossless."""

    source: str = argument(f"checkpoint file or folder, run, hf:owner/name[@revision], {BUNDLED}")
    destination: Path = argument("file or folder to write")
    to: Literal["vitral", "timm", "transformers", "torchvision", "npz", "vit-pytorch"] = option(
        "vitral", "format to write"
    )
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def convert(args: ConvertArgs) -> int:
    check_inputs(args.source)
    from vitral import weights

    options = checkpoint_options(args.checkpoint)
    notes = weights.convert(args.source, args.destination, args.to, options)
    for note in notes:
        print(note)
    print(f"Wrote {args.destination} ({args.to} format)")
    return 0


COMMAND = Command("convert", ConvertArgs, convert)
