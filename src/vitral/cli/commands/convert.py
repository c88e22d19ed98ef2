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
from vitral.errors import VitralError, shell_quote


@dataclass(frozen=True, kw_only=True)
class ConvertArgs:
    """Convert a checkpoint to another library's format and verify that the result is lossless.

    A home-made checkpoint is converted with a key map, which --explain --write-map starts.
    """

    source: str = argument(f"checkpoint file or folder, run, hf:owner/name[@revision], {BUNDLED}")
    destination: Path | None = argument("file or folder to write; not needed with --explain", default=None)
    to: Literal["vitral", "timm", "transformers", "torchvision", "npz", "vit-pytorch", "open-clip"] = option(
        "vitral", "format to write"
    )
    key_map: Path | None = option(None, "TOML file that names the tensors of a home-made checkpoint")
    explain: bool = option(False, "list all tensors with shapes and the best guess of what they are, and stop")
    write_map: Path | None = option(None, "with --explain: write a key map with the guesses, to check and complete")
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def convert(args: ConvertArgs) -> int:
    check_inputs(args.source)
    if args.explain:
        return explain(args)
    if args.write_map is not None:
        raise VitralError("--write-map needs --explain", f"vitral convert {shell_quote(args.source)} --explain ...")
    if args.destination is None:
        raise VitralError(
            "missing argument DESTINATION: file or folder to write",
            f"To list the tensors instead: vitral convert {shell_quote(args.source)} --explain",
        )
    if args.key_map is not None:
        from vitral.weights.custom_map import load_key_map

        load_key_map(args.key_map)
    from vitral import weights

    options = checkpoint_options(args.checkpoint)
    notes = weights.convert(args.source, args.destination, args.to, options, key_map=args.key_map)
    for note in notes:
        print(note)
    print(f"Wrote {args.destination} ({args.to} format)")
    return 0


def explain(args: ConvertArgs) -> int:
    """Print the tensors and guesses; write a key map if requested."""
    from vitral.weights.explanation import explain, write_starting_map

    explanation = explain(args.source)
    print(*explanation.lines(), sep="\n")
    if args.write_map is not None:
        write_starting_map(explanation, args.write_map)
        destination = args.destination or Path("DESTINATION")
        print(f"Wrote {args.write_map}: check it, then run")
        print(
            f"  vitral convert {shell_quote(args.source)} {shell_quote(destination)} --key-map "
            f"{shell_quote(args.write_map)}"
        )
    return 0


COMMAND = Command("convert", ConvertArgs, convert)
