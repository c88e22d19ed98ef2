"""vitral embed: write feature vectors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import (
    ENGINE_HELP,
    MODEL_HELP,
    find_image_files,
    load_model,
    missing_images_error,
    status_line,
)
from vitral.cli.options import EngineFlag, checkpoint_flags
from vitral.cli.output import exit_status
from vitral.cli.parsing import Command, argument, option, required_option
from vitral.utils.text import count_text


@dataclass(frozen=True, kw_only=True)
class EmbedArgs:
    """Write one feature vector per image: the input of the classification head.

    .parquet and .csv contain the file names; those of features.npy are written to features.names.txt, one per line.
    """

    model: str = argument(MODEL_HELP)
    files: tuple[Path, ...] = argument("image files and folders")
    out: Path = required_option("file to write: .npy, .parquet or .csv")
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    engine: EngineFlag = option("auto", ENGINE_HELP)


def embed(args: EmbedArgs) -> int:
    if not args.files:
        raise missing_images_error("embed", args.model)
    check_inputs(args.model, images=args.files)
    check_output(args.out)
    from vitral import api
    from vitral.reporting.feature_files import names_path

    with status_line("Computing features"):
        predictor = load_model(args.model, args.checkpoint, engine=args.engine)
        count, errors, _ = api.embed(predictor, find_image_files(args.files), args.out)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    names = f", file names in {names_path(args.out)}" if args.out.suffix.lower() == ".npy" else ""
    print(f"Wrote {args.out} ({count_text(count, 'image')}){names}")
    return exit_status(len(errors), count + len(errors))


COMMAND = Command("embed", EmbedArgs, embed)
