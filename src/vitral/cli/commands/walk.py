"""vitral walk: follow one image through the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitral import bundled
from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import BUNDLED, LABELS_HELP, print_notes
from vitral.cli.options import checkpoint_flags, checkpoint_options
from vitral.cli.output import prediction_text
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError, error_reason, shell_quote

MIN_SATURATION = 32  # of 255; images below it count as greyscale


@dataclass(frozen=True, kw_only=True)
class WalkArgs:
    """Follow one image through a ViT from pixels to prediction: every step with its equation, shape, source code and
    actual values, on the terminal or as a page."""

    image: Path = argument("image file")
    model: str | None = option(
        None, f"run or model folder, checkpoint file, {BUNDLED} (default: the newest run, otherwise a bundled model)"
    )
    lang: Literal["en", "ko"] = option("en", "language")
    layer: int = option(1, "block to show, counted from 1")
    head: int = option(1, "attention head to show, counted from 1")
    labels: Path | None = option(None, LABELS_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    code: bool = option(True, "show the source code on the terminal")
    out: Path | None = option(None, "page to write: .html (self-contained) or .md (images in files next to it)")


def walk(args: WalkArgs) -> int:
    if args.out is not None and args.out.suffix.lower() not in (".html", ".htm", ".md"):
        raise VitralError(f"--out must end in .html or .md, got {args.out}", "For example: --out walk.html")
    if args.model is None and (args.image.is_dir() or str(bundled.resolve(args.image)) != str(args.image)):
        example = f"For example: vitral walk photo.jpg --model {shell_quote(args.image)}"
        raise VitralError(f"{args.image} is not an image", example)
    check_inputs(args.model, images=(args.image,), labels=args.labels)
    check_output(args.out)
    from vitral.data.decode import decode_native
    from vitral.explain import load_explainable
    from vitral.inference.prediction import Label
    from vitral.inference.task_support import require_task
    from vitral.reporting.walk import terminal
    from vitral.reporting.walk.steps import walk as build_walk

    # Without --model, decode first: an unreadable image is reported before a model is chosen.
    if not args.model:
        decode_native(args.image)
    source = args.model or default_model(args.image)
    predictor = load_explainable(source, args.labels, checkpoint_options(args.checkpoint))
    predictor.require_head()
    require_task(predictor, "vitral walk", "classification", "multilabel")
    print_notes(predictor.notes if args.model else [f"using {source}; choose another model with --model"])
    steps = build_walk(predictor, args.image, args.lang, args.layer, args.head)
    if args.out is None:
        terminal.print_walk(steps, code=args.code)
        return 0
    write_walk(steps, args.out)
    best = [Label(name=score.name, probability=score.probability) for score in steps.top_classes[:1]]
    print(f"{args.image}   {prediction_text(best, steps.is_ood)}")
    print(f"Wrote {args.out} ({len(steps.steps)} steps)")
    return 0


def write_walk(steps: Any, path: Path) -> None:
    from vitral.reporting.walk import html, markdown
    from vitral.utils.atomic import atomic_write

    if path.suffix.lower() != ".md":
        atomic_write(path, html.render_html(steps))
        return
    try:
        markdown.write_markdown(steps, path)
    except OSError as error:
        raise VitralError(f"cannot write {path}: {error_reason(error)}", "Choose another --out") from error


def default_model(image: Path) -> Path | str:
    """The run that finished last; without runs, the bundled model for colour or greyscale images."""
    from vitral.runs.run import RUNS

    configs = list(RUNS.glob("*/model/config.json"))
    if not configs:
        return bundled.PREFIX + ("cifar10" if is_colour(image) else "mnist")
    return max(configs, key=lambda config: config.stat().st_mtime).parent.parent


def is_colour(path: Path) -> bool:
    """Whether an image has saturated pixels; False if it cannot be read, which is reported later."""
    from vitral.data.decode import ImageDecodeError, decode_native
    from vitral.data.pixels import to_display

    try:
        saturation = to_display(decode_native(path)).convert("RGB").resize((32, 32)).convert("HSV").tobytes()[1::3]
    except ImageDecodeError:
        return False
    return max(saturation) > MIN_SATURATION


COMMAND = Command("walk", WalkArgs, walk)
