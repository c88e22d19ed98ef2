"""The last part of `vitral demo`: the trained model next to the bundled one on the same test images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from vitral import bundled
from vitral.data.classes import class_indices
from vitral.data.preprocess import to_model_input
from vitral.evaluation.data import EvalTarget, evenly_spaced_indices
from vitral.inference.predictor import Predictor
from vitral.reporting.figures.style import format_percent
from vitral.reporting.figures.training import plot_attention_overview
from vitral.reporting.terminal.training import vitral_command

MAX_IMAGES = 2_000
BUNDLED_MODEL = "mnist"


@dataclass(frozen=True, kw_only=True)
class BundledComparison:
    images: int
    correct: int  # of the trained model
    bundled_correct: int
    same_dataset: bool  # whether the bundled model was trained on the dataset of these images
    example: str  # prediction of the bundled model for one image
    only_bundled_correct: bool  # whether the trained model misclassifies that image
    figure: Path  # attention of the bundled model on that image


def compare_with_bundled(target: EvalTarget, figure: Path) -> BundledComparison:
    """Evaluate the bundled digit model on the test images, and draw its attention on one that only it gets right."""
    predictor, bundled_predictor = target.predictor, Predictor.load(f"{bundled.PREFIX}{BUNDLED_MODEL}")
    indices = evenly_spaced_indices(len(target.split), MAX_IMAGES)
    images, labels = target.split.images[indices], target.split.labels[indices]
    bundled_images = to_model_input(images, bundled_predictor.model_config.preprocessing)
    class_map = class_indices(bundled_predictor.classes, predictor.classes)
    correct = predictor.logits(images).argmax(dim=1) == labels
    bundled_correct = class_map[bundled_predictor.logits(bundled_images).argmax(dim=1)] == labels
    only_bundled = bundled_correct & ~correct
    index = int((bundled_correct.int() + only_bundled.int()).argmax())
    probabilities = bundled_predictor.probabilities(bundled_images[index : index + 1])[0]
    name = bundled_predictor.classes[int(probabilities.argmax())]
    return BundledComparison(
        images=len(labels),
        correct=int(correct.sum()),
        bundled_correct=int(bundled_correct.sum()),
        same_dataset=target.dataset.name == bundled_predictor.model_config.trained_on,
        example=f"{name} {format_percent(probabilities.max().item())}",
        only_bundled_correct=bool(only_bundled.any()),
        figure=plot_attention_overview(bundled_predictor, bundled_images[index], figure),
    )


def print_bundled_comparison(console: Console, comparison: BundledComparison) -> None:
    note = "" if comparison.same_dataset else " (trained on another dataset)"
    example = "misclassified by your model" if comparison.only_bundled_correct else "of the test set"
    lines = [
        f"\nBundled models    {', '.join(bundled.model_names())}",
        f"Same test images  {comparison.correct:,} of {comparison.images:,} correct with your model, "
        f"{comparison.bundled_correct:,} with the bundled model {BUNDLED_MODEL}{note}",
        f"Example           an image {example}; {BUNDLED_MODEL} predicts {comparison.example}: {comparison.figure}",
        "",
        *(f"  {vitral_command()} predict {name} image.png" for name in bundled.model_names()),
        f"  {vitral_command()} models",
    ]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
