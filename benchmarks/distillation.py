"""A small student that learns from a teacher, compared with the same student trained from scratch.

    python benchmarks/distillation.py --train photos/train --test photos/val --teacher vit_tiny.safetensors --save
    python benchmarks/distillation.py ... --images more/ other/ --seeds 5
    python benchmarks/distillation.py ... --distill-epochs 2 --tune-epochs 1 --seeds 1 --device cpu

| method           | training                                                                                        |
|------------------|-------------------------------------------------------------------------------------------------|
| scratch          | labels only, for all epochs                                                                     |
| features         | the teacher's features without labels, on the images of --train and --images; then labels only  |
| soft, hard       | labels and the predictions of the teacher, fine-tuned once on the same labels, for all epochs   |
| features+soft    | the teacher's features without labels; then labels and its predictions                          |

All methods train the same model for the same number of epochs on --train; "features" spends --distill-epochs of them
without labels. There is no validation split and no selection: the last epoch is evaluated on --test. The table has mean
and 95% interval over the seeds (Student's t), and the difference from scratch in pairs of seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from _fine_tuning import fine_tune
from _output import add_output_arguments, write_results
from vitral.data.datasets import Split
from vitral.models.uninitialized import meta_state_dict
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training.distillation.setup import resolve_distill_recipe, setup_distillation
from vitral.training.hardware import training_hardware
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training
from vitral.training.trainer_factory import make_trainer

METHODS = ("scratch", "features", "soft", "hard", "features+soft")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by the number of seeds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="labelled images: one folder per class")
    parser.add_argument("--test", required=True, help="images of the same classes that are evaluated")
    parser.add_argument("--teacher", required=True, help="checkpoint of the teacher")
    parser.add_argument("--images", nargs="*", default=[], help="further images without labels")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--distill-epochs", type=int, default=300)
    parser.add_argument("--tune-epochs", type=int, default=30)
    parser.add_argument("--teacher-epochs", type=int, default=10, help="fine-tuning of the teacher for soft and hard")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--device", default="auto")
    add_output_arguments(parser)
    return parser.parse_args()


class Benchmark:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.common = {"device": args.device, "checkpoint_epochs": 0, "batch_size": args.batch_size}
        self.epochs = args.distill_epochs + args.tune_epochs
        self.labelled_teacher: Path | None = None

    def distill_recipe(self) -> Recipe:
        """The recipe of feature distillation, whose student is that of all methods."""
        args = self.args
        recipe = resolve_distill_recipe([args.train, *args.images], args.teacher, None)
        model: ViTConfig = replace(recipe.model, width=args.width, depth=args.depth, heads=max(args.width // 64, 1))
        return replace(recipe, model=model).with_overrides({**self.common, "epochs": args.distill_epochs})

    def label_setup(self, recipe: Recipe, **overrides: Any) -> TrainingSetup:
        """Training on all labelled images, without a validation split."""
        fields = {**self.common, "data.validation": 0.0, "ema": 0.0, **overrides}
        return setup_training(recipe.with_overrides(fields))

    def test_split(self, setup: TrainingSetup) -> Split:
        """The test images as input of the model, with the classes in the order of training."""
        recipe = replace(setup.recipe, data=replace(setup.recipe.data, name=self.args.test))
        test = setup_training(replace(recipe, init_from="", distill=None, tune="full"))
        assert test.dataset.classes == setup.dataset.classes
        return test.dataset.train.to_model_input(setup.preprocessing)

    def tune_teacher(self) -> Path:
        """The teacher with a classifier for the labels, trained once, as a model folder."""
        if self.labelled_teacher is None:
            recipe = resolve_recipe(self.args.train, None, self.args.teacher)
            setup = self.label_setup(recipe, epochs=self.args.teacher_epochs, batch_size=32)
            run = self.train(setup, "teacher")
            self.labelled_teacher = run.path
        return self.labelled_teacher

    def train(self, setup: TrainingSetup, name: str) -> Run:
        path = self.folder / name
        run = Run.create(self.folder, name, path)
        run.recipe_file.write_text(setup.recipe.to_toml())
        make_trainer(setup, run, training_hardware(setup)).fit()
        return run

    def scratch_setup(self, epochs: int, **overrides: Any) -> TrainingSetup:
        recipe, model = resolve_recipe(self.args.train, "folder-scratch"), self.distill_recipe().model
        return self.label_setup(replace(recipe, model=model), epochs=epochs, **overrides)

    def measure(self, method: str, seed: int) -> dict[str, Any]:
        """Train with one method and one seed; returns the accuracy of the last epoch on the test images."""
        overrides: dict[str, Any] = {}
        if method in ("soft", "hard", "features+soft"):
            overrides = {"distill.teacher": str(self.tune_teacher()), "distill.kind": method.rpartition("+")[2]}
        started, agreement = time.perf_counter(), None
        if method.startswith("features"):
            name = f"{method}-{seed}"
            run = self.train(setup_distillation(replace(self.distill_recipe(), seed=seed)), name)
            agreement = run.load_metrics()[-1]["train_cosine"]
            recipe = resolve_recipe(self.args.train, None, str(run.path))
            setup = self.label_setup(recipe, epochs=self.args.tune_epochs, **overrides)
        else:
            setup = self.scratch_setup(self.epochs, **overrides)
        test = self.test_split(setup)
        result = fine_tune(setup, test, seed)
        correct = (result.logits_NK.argmax(dim=1) == test.labels).sum().item()
        return {
            "method": method, "seed": seed, "top1": correct / len(test.labels), "images": len(test.labels),
            "cosine": agreement, "seconds": time.perf_counter() - started,
        }  # fmt: skip


def interval(values: list[float]) -> float:
    """Half of the 95% interval of the mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    return T_95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))


def print_table(rows: list[dict[str, Any]]) -> None:
    scratch = {row["seed"]: row["top1"] for row in rows if row["method"] == "scratch"}
    print(f"\n{'method':<16} {'top-1':>22} {'minus scratch':>22} {'seconds':>9}")
    for method in dict.fromkeys(row["method"] for row in rows):
        runs = [row for row in rows if row["method"] == method]
        top1 = [100 * row["top1"] for row in runs]
        text = f"{method:<16} {statistics.mean(top1):8.2f}% ± {interval(top1):5.2f} n={len(top1)}"
        differences = [100 * (row["top1"] - scratch[row["seed"]]) for row in runs if row["seed"] in scratch]
        if method != "scratch" and differences:
            text += f" {statistics.mean(differences):+12.2f} ± {interval(differences):5.2f}"
        else:
            text += " " * 21
        print(f"{text} {statistics.mean(row['seconds'] for row in runs):9.1f}", flush=True)


def main() -> None:
    args = parse_arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(args, Path(folder))
        student = benchmark.scratch_setup(1)
        parameters = sum(t.numel() for t in meta_state_dict(student.recipe.variant, student.recipe.model).values())
        print(f"student: {parameters / 1e6:.2f} M parameters, {len(student.dataset.train)} labelled images", flush=True)
        for seed in range(args.seeds):
            for method in args.methods:
                rows.append(benchmark.measure(method, seed))
                row = rows[-1]
                print(f"seed {seed} {method:<16} {row['top1']:.2%} {row['seconds']:7.1f} s", flush=True)
                write_results(args, rows, {"parameters": parameters})
    print_table(rows)


if __name__ == "__main__":
    main()
