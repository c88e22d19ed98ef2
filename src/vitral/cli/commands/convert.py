"""vitral convert: convert checkpoints between libraries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitral.cli.checks import check_inputs
from vitral.cli.messages import BUNDLED, HEADS_HELP
from vitral.cli.parsing import Command, argument, option


@dataclass(frozen=True, kw_only=True)
class ConvertArgs:
    """Convert a checkpoint to another library's format and verify that the result is lossless."""

    source: str = argument(f"checkpoint file or folder, run, hf:owner/name[@revision], {BUNDLED}")
    destination: Path = argument("file or folder to write")
    to: Literal["vitral", "timm", "transformers", "torchvision", "npz", "vit-pytorch"] = option(
        "vitral", "format to write"
    )
    heads: int | None = option(None, HEADS_HELP)
    image_size: tuple[int, int] | None = option(None, "image size in pixels, for a checkpoint that does not store it")


def convert(args: ConvertArgs) -> int:
    check_inputs(args.source)
    from vitral import weights

    notes = weights.convert(args.source, args.destination, to=args.to, heads=args.heads, image_size=args.image_size)
    for note in notes:
        print(note)
    print(f"Wrote {args.destination} ({args.to} format)")
    return 0


COMMAND = Command("convert", ConvertArgs, convert)
