"""vitral push: upload a model to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs
from vitral.cli.messages import MODEL_HELP, print_notes
from vitral.cli.options import checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, argument, option


@dataclass(frozen=True, kw_only=True)
class PushArgs:
    """Upload a model with a model card to the Hugging Face Hub, in a format that timm and transformers load.

    If neither supports the architecture, the model is written in vitral's format and the reason is printed.
    """

    model: str = argument(MODEL_HELP)
    destination: str = argument("hf:owner/name")
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    folder: Path | None = option(None, "write the files to this folder and keep them (default: a temporary folder)")
    dry_run: bool = option(False, "write and verify the files without uploading them")
    private: bool = option(False, "create the repository as private")
    license: str | None = option(None, "license for the model card, e.g. apache-2.0, mit, cc-by-4.0")


def push(args: PushArgs) -> int:
    check_inputs(args.model)
    from vitral import api

    result = api.push(
        args.model,
        args.destination,
        options=checkpoint_options(args.checkpoint),
        folder=args.folder,
        dry_run=args.dry_run,
        private=args.private,
        license=args.license,
        log=lambda note: print_notes([note]),
    )
    for note in result.notes:
        print(note)
    for name, size in result.files:
        print(f"  {name:<24}{size:>14,} bytes")
    print(f"Loads in {', '.join(result.loaded_by)}")
    if args.dry_run:
        print(f"Dry run: nothing was uploaded{f'; the files are in {args.folder}' if args.folder else ''}")
    if result.url:
        print(result.url)
    return 0


COMMAND = Command("push", PushArgs, push)
