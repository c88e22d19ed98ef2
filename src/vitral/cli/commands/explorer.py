"""vitral explorer: a static site in which models run in the browser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import LABELS_HELP, MODEL_HELP, announce_downloads, find_image_files, print_notes, status_line
from vitral.cli.options import checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, argument, option


@dataclass(frozen=True, kw_only=True)
class ExplorerArgs:
    """Write a static site in which a ViT runs in the browser: follow an image through it, look at every tensor, take
    the model apart. It needs no server and no network; open index.html.

    Without a model, the site contains the bundled ones. A run that kept its checkpoints (--keep-checkpoints) gets a
    slider over its epochs.
    """

    models: tuple[str, ...] = argument(MODEL_HELP)
    out: Path = option(Path("site"), "folder to write")
    images: tuple[Path, ...] = option((), "example images for the page: files and folders")
    precision: Literal["auto", "fp32", "bf16", "int8"] = option(
        "auto", "precision of the weights; auto: exact for bundled and small models, int8 above 4 million parameters"
    )
    faithfulness: str | None = option(
        None, "dataset or folder: rank the explanation methods on its images (default: the bundled models' ranking)"
    )
    faithfulness_images: int = option(32, "number of images, and of image pairs, to rank on")
    epochs: int = option(8, "number of earlier epochs to include from a run's checkpoints")
    labels: Path | None = option(None, LABELS_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def explorer(args: ExplorerArgs) -> int:
    check_inputs(*args.models, images=args.images, data=args.faithfulness, labels=args.labels)
    check_output(args.out)
    from vitral import api

    announce_downloads(args.faithfulness)
    files = find_image_files(args.images) if args.images else []
    with status_line("Loading") as log:
        site = api.explorer(
            args.models,
            args.out,
            images=files,
            labels=args.labels,
            options=checkpoint_options(args.checkpoint),
            precision=args.precision,
            faithfulness=args.faithfulness,
            faithfulness_images=args.faithfulness_images,
            epochs=args.epochs,
            log=log,
        )
    print_notes(site.notes)
    print(f"Wrote {site.page} ({', '.join(site.models)}; {site.size / 1e6:.1f} MB)")
    print("Open it in a browser, or copy the folder to any web server.")
    return 0


COMMAND = Command("explorer", ExplorerArgs, explorer)
