"""vitral figures: the figures of the ViT paper for any model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import LABELS_HELP, MODEL_HELP, find_image_files, print_notes, status_line
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError


@dataclass(frozen=True, kw_only=True)
class FiguresArgs:
    """Draw figures 6 and 7 of the ViT paper as PNG and SVG: principal components of the patch embedding filters,
    similarity of position embeddings, attention distance per head, and attention on example images."""

    model: str = argument(MODEL_HELP)
    images: tuple[Path, ...] = option((), "image files and folders (default: test images of the training dataset)")
    count: int = option(32, "maximum number of images")
    labels: Path | None = option(None, LABELS_HELP)
    out: Path | None = option(None, "folder to write to (default: figures/ in the run folder)")


def figures(args: FiguresArgs) -> int:
    check_inputs(args.model, images=args.images, labels=args.labels)
    check_output(args.out)
    from vitral.explain import load_explainable
    from vitral.reporting.figures import paper

    if args.count < 1:
        raise VitralError(f"--count must be at least 1, got {args.count}", "The default is 32")
    predictor = load_explainable(args.model, args.labels)
    print_notes(predictor.notes)
    images = (
        paper.load_sample_images(predictor, find_image_files(args.images), args.count)
        if args.images
        else test_images(predictor, args.count)
    )
    model_path = Path(args.model)
    is_run = (model_path / "recipe.toml").is_file()
    folder = args.out or (model_path / "figures" if is_run else Path("figures"))
    try:
        with status_line("Drawing"):
            written, skipped = paper.plot_paper_figures(predictor, folder, images)
    except OSError as error:
        raise VitralError(f"cannot write to {folder}: {error.strerror or error}", "Choose another --out") from error
    for file in written:
        print(file)
    for reason in skipped:
        print(f"Skipped {reason}")
    return 0


def test_images(predictor: Any, count: int) -> Any:
    """Test or validation images (N, C, H, W) of the dataset that the model was trained on; None if there are none."""
    from vitral.data.preprocess import to_one_size
    from vitral.evaluation.data import evenly_spaced_indices, load_eval_target, run_recipe

    if run_recipe(predictor) is None:
        return None
    try:
        images = load_eval_target(predictor, None, None).split.images
    except VitralError:
        return None
    sample = images[evenly_spaced_indices(len(images), count)]
    return to_one_size(sample, predictor.model_config.preprocessing)


COMMAND = Command("figures", FiguresArgs, figures)
