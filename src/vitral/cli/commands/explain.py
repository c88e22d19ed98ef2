"""vitral explain: heatmaps of what a prediction depends on, and how faithful they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import (
    LABELS_HELP,
    MODEL_HELP,
    announce_downloads,
    find_image_files,
    missing_images_error,
    print_notes,
    status_line,
)
from vitral.cli.options import SplitFlag, checkpoint_flags, checkpoint_options
from vitral.cli.output import display_width, exit_status, label_text, pad, prediction_text
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError
from vitral.utils.json_toml import dump_json


@dataclass(frozen=True, kw_only=True)
class ExplainArgs:
    """Draw heatmaps of the image regions that a prediction depends on, one PNG per image with all methods and classes.

    Methods: attention, rollout, relevance, gradcam, occlusion; with captum (pip install 'vitral[explain]') also
    integrated-gradients, smoothgrad and shapley. Measure how faithful they are for a model with --faithfulness.
    """

    model: str = argument(MODEL_HELP)
    files: tuple[Path, ...] = argument("image files and folders")
    method: tuple[str, ...] = option((), "one or more methods, or all (default: rollout relevance)")
    target: tuple[str, ...] = option((), "classes to explain, by name or index (default: the predicted class)")
    top: int | None = option(None, "explain this many of the most probable classes")
    out: Path = option(Path("explained"), "folder to write to")
    labels: Path | None = option(None, LABELS_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    json: bool = option(False, "print one JSON object per image: prediction and heatmaps, one value per patch")
    overlays: bool = option(False, "also write every heatmap as an overlay of its own", group="Output")
    npy: bool = option(False, "also write every heatmap as .npy, height x width of the model input", group="Output")
    colormap: Literal["inferno", "viridis", "cividis", "magma"] = option("inferno", "colours", group="Output")
    layer: int | None = option(None, "attention, gradcam: block, counted from 1", group="Method options")
    head: int | None = option(
        None, "attention: head, counted from 1 (default: the mean of all heads)", group="Method options"
    )
    residual: bool = option(True, "rollout: include the residual connections", group="Method options")
    fusion: Literal["mean", "max", "min"] = option("mean", "rollout: how heads are combined", group="Method options")
    faithfulness: str | None = option(
        None, "dataset or folder: measure how faithful each method is", group="Faithfulness"
    )
    split: SplitFlag = option("test", "split of that dataset", group="Faithfulness")
    images: int = option(64, "number of images, and of image pairs", group="Faithfulness")


def explain(args: ExplainArgs) -> int:
    if args.faithfulness is not None:
        return measure_faithfulness(args, args.faithfulness)
    if not args.files:
        raise missing_images_error("explain", args.model)
    check_inputs(args.model, images=args.files, labels=args.labels)
    check_output(args.out)
    from vitral.data.pixels import display_note
    from vitral.explain import load_explainable
    from vitral.reporting.figures import heatmaps

    if args.top is not None and (args.target or args.top < 1):
        raise VitralError(
            "--top must be at least 1 and cannot be combined with --target",
            "Use --top 3 for the three most probable classes, or --target NAME for one class",
        )
    methods, options = selected_methods(args), method_options(args)
    predictor = load_explainable(args.model, args.labels, checkpoint_options(args.checkpoint))
    preprocessing = predictor.model_config.preprocessing
    shown = display_note(preprocessing.channels, preprocessing.dtype)
    print_notes([*predictor.notes, *([f"the heatmaps show {shown}"] if shown else [])])
    files = find_image_files(args.files)
    width = max(display_width(str(file)) for file in files)
    names = heatmaps.unique_stems(files)
    succeeded = [
        explain_file(args, predictor, file, name, methods, options, width)
        for file, name in zip(files, names, strict=True)
    ]
    return exit_status(succeeded.count(False), len(files))


def explain_file(
    args: ExplainArgs, predictor: Any, file: Path, name: str, methods: list[str], options: dict[str, Any], width: int
) -> bool:
    """Explain one image and print where the heatmaps are; False if it cannot be read."""
    from vitral.data.decode import ImageDecodeError
    from vitral.explain import explain
    from vitral.reporting.figures import heatmaps

    try:
        targets, inverted = list(args.target), None
        if predictor.has_head:
            prediction = predictor.predict(file, top=args.top or 1)
            targets = targets or [label.name for label in prediction.labels or prediction.values[: args.top or 1]]
            inverted = prediction.inverted
        explanation = explain(predictor, file, methods, targets, options)
    except ImageDecodeError as error:
        print(f"error: {error.what}", file=sys.stderr)
        return False
    written = heatmaps.write_explanation(
        explanation, args.out, name, args.colormap, overlays=args.overlays, npy=args.npy
    )
    if args.json:
        print(dump_json(heatmaps.explanation_to_dict(explanation, predictor, written)))
    else:
        values = ", ".join(map(str, explanation.values))
        text = values or prediction_text(explanation.prediction[:3], explanation.is_ood) if predictor.has_head else ""
        print("   ".join(filter(None, (pad(str(file), width), text, str(written[0])))))
    if inverted is not None:
        print_notes([f"{file}: with inverted brightness, as in the training set: {label_text(inverted)}"])
    return True


def selected_methods(args: ExplainArgs) -> list[str]:
    from vitral.explain import DEFAULT, METHODS
    from vitral.explain.api import find_method

    methods = list(args.method or DEFAULT)
    if args.method == ("all",):
        methods = [name for name, method in METHODS.items() if not method.is_slow]
        slow = " and ".join(METHODS.keys() - set(methods))
        print_notes([f"all methods except {slow}, which needs hundreds of forward passes (use --method {slow})"])
    for name in methods:
        find_method(name)
    return methods


def method_options(args: ExplainArgs) -> dict[str, Any]:
    """Method options that differ from their defaults."""
    options = {
        "layer": args.layer,
        "head": args.head,
        "residual": None if args.residual else False,
        "fusion": None if args.fusion == "mean" else args.fusion,
    }
    return {name: value for name, value in options.items() if value is not None}


def measure_faithfulness(args: ExplainArgs, data: str) -> int:
    if options := method_options(args):
        raise VitralError(
            f"--faithfulness cannot be combined with --{next(iter(options))}",
            "It tests the methods with their default options; select methods with --method",
        )
    check_inputs(args.model, data=data, labels=args.labels)
    check_output(args.out)
    from vitral.evaluation.data import load_eval_target
    from vitral.evaluation.time_estimate import duration_text
    from vitral.explain import faithfulness, load_explainable
    from vitral.inference.task_support import require_task
    from vitral.reporting.figures.faithfulness import plot_faithfulness
    from vitral.reporting.terminal.faithfulness import faithfulness_to_dict, print_faithfulness

    methods = selected_methods(args)
    predictor = load_explainable(args.model, args.labels, checkpoint_options(args.checkpoint))
    print_notes(predictor.notes)
    require_task(predictor, "explain --faithfulness", "classification")
    announce_downloads(data)
    target = load_eval_target(predictor, data, args.split, max_files=faithfulness.max_images(args.images, args.images))
    if not args.method:
        methods = faithfulness.applicable_methods(target.predictor.model)
    available = sum(map(len, target.source_splits))
    sample = f"{min(args.images, len(target.split)):,} of {available:,} {target.noun} of {target.dataset.name}"
    print_notes([*target.notes, sample])
    device = predictor.hardware.device.type
    with status_line() as log:
        result = faithfulness.measure_faithfulness(
            target.predictor,
            target.split,
            methods,
            num_images=args.images,
            num_pairs=args.images,
            log=lambda name: log(f"Testing {name}"),
            on_estimate=lambda seconds: print_notes([f"{len(methods)} methods: {duration_text(seconds, device)}"]),
        )
    if args.json:
        print(dump_json(faithfulness_to_dict(result)))
        return 0
    print_faithfulness(result)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"\nCurves: {plot_faithfulness(result, args.out / 'faithfulness.png')}")
    return 0


COMMAND = Command("explain", ExplainArgs, explain)
