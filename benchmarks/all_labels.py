"""Pretraining and fine-tuning with all labels against training from scratch, in equal total training time.

    python benchmarks/all_labels.py --validation 0.1 --seeds 1                                  # select the idea
    python benchmarks/all_labels.py --idea NAME --first-seed 1 --seeds 3 --processes 3 --save   # measure it

From scratch, the recipe (cifar10-97) is trained for its epochs, which takes T seconds of optimizer steps. Each way of
pretraining uses the same images without labels and takes P seconds; each idea of fine-tuning starts from it and trains
for as many epochs as fit into T - P seconds, judging by the duration of an epoch in a short run of its own. Times are
those of the optimizer steps, as recorded in metrics.jsonl: without start-up and compilation, which pretraining has
twice. Runs side by side slow each other down: --durations then gives the times of undisturbed runs, from which the
numbers of epochs are computed, and nothing is trained from scratch. --pretrained takes a finished run as the
pretraining. With --validation, that fraction of the training images is held out and measured instead of the test
images, so that ideas are not selected on the test images.

Ideas (--idea, once or several times; default: all)
base          the recipe with a lower learning rate, 2e-3
regularised   more drop path (0.3), and a lower learning rate in earlier blocks (layer decay 0.8)
average       EMA of the weights over the last tenth of the run
mixup         mixup and CutMix for all images
resolution    images enlarged by a quarter, to 40x40 pixels
gentle        a quarter of that learning rate, and a lower one in earlier blocks (layer decay 0.75)
short         half as many epochs of pretraining, and more of fine-tuning
short-high-lr the same with the learning rate of training from scratch
teacher       pretraining by MoCo v3, whose model is the EMA teacher (LeJEPA has none)

accuracy_tta is that with the recipe's test-time augmentation. Without a GPU, --toy shows that everything runs: digits
and a tiny model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _output import add_output_arguments, write_results
from _seeds import add_seed_arguments, run_side_by_side, seeds_of
from vitral import api
from vitral.data.datasets import Split, load_builtin_dataset
from vitral.evaluation.tta import tta_logits
from vitral.inference.predictor import Predictor
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run

SCRATCH = "from scratch"
FINE_TUNING = {"optim.lr": 2e-3, "init_schemes": ()}
SHORT = 0.5  # of the epochs of pretraining
SPEED_EPOCHS = 2  # of the short run that measures the duration of an epoch; the last one counts


class Idea(NamedTuple):
    """Changes to the fine-tuning and to the pretraining."""

    fine_tuning: Mapping[str, Any] = {}
    pretraining: Mapping[str, Any] = {}
    length: float = 1.0  # of the pretraining
    resolution: float = 1.0  # of the fine-tuning


IDEAS = {
    "base": Idea(),
    "gentle": Idea({"optim.lr": 5e-4, "optim.layer_decay": 0.75}),
    "regularised": Idea({"model.drop_path": 0.3, "optim.layer_decay": 0.8}),
    "average": Idea({"ema": 0.1}),
    "mixup": Idea({"augment.mixup": 0.8, "augment.mix_prob": 1.0}),
    "resolution": Idea(resolution=1.25),
    "short": Idea(length=SHORT),
    "short-high-lr": Idea({"optim.lr": 5e-3}, length=SHORT),
    "teacher": Idea(pretraining={"pretrain.method": "moco", "pretrain.views.local_views": 0}),
}
TOY_MODEL: dict[str, Any] = {
    "variant": "plain", "model.image_size": (16, 16), "model.patch_size": 4, "model.width": 32, "model.depth": 2,
    "model.heads": 2, "model.mlp_width": 64,
}  # fmt: skip


class Comparison:
    """All runs of one seed, in a folder of their own."""

    def __init__(self, args: argparse.Namespace, seed: int, folder: Path) -> None:
        self.args, self.seed, self.folder = args, seed, folder
        self.dataset = "digits" if args.toy else "cifar10"
        recipe = get_recipe(args.recipe)
        names = ("width", "depth", "heads", "mlp_width")
        self.model = TOY_MODEL if args.toy else {f"model.{name}": getattr(recipe.model, name) for name in names}
        toy = {**TOY_MODEL, "data.name": self.dataset, "epochs": 6, "augment.policy.name": "none"}
        shared = {"data.validation": args.validation, "checkpoint_epochs": 0, "seed": seed}
        self.recipe = recipe.with_overrides({**shared, **(toy if args.toy else {})})
        self.pretrained: dict[tuple[str, ...], tuple[Path, float]] = {}

    def rows(self, ideas: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if self.args.durations:
            self.total = self.args.durations[0]
        else:
            scratch = self.train("scratch", self.recipe, {})
            self.total = scratch["training_s"]
            rows.append({"idea": SCRATCH, "seed": self.seed, **scratch, "pretraining_s": 0.0})
            print(rows[0], flush=True)
        for name in ideas:
            rows.append({"idea": name, "seed": self.seed, **self.fine_tune(name, IDEAS[name])})
            print(rows[-1], flush=True)
        return rows

    def fine_tune(self, name: str, idea: Idea) -> dict[str, Any]:
        """Pretrain, unless another idea has done it in the same way, and use the rest of the time for fine-tuning."""
        weights, seconds = self.pretrain(idea)
        changes = {**FINE_TUNING, **idea.fine_tuning, "init_from": str(weights)}
        if idea.resolution != 1:
            size = tuple(round(idea.resolution * side) for side in self.recipe.model.image_size)
            changes |= {"model.image_size": size, "keep_image_size": True}
        if self.args.durations:
            epoch_seconds = self.args.durations[2] * idea.resolution**2
        else:
            self.train(f"{name}-speed", self.recipe, {**changes, "epochs": SPEED_EPOCHS})
            epoch_seconds = Run(self.folder / f"{name}-speed").load_metrics()[-1]["training_seconds"]
        epochs = max(int((self.total - seconds) / epoch_seconds), 1)
        row = self.train(name, self.recipe, {**changes, "epochs": epochs})
        return {**row, "pretraining_s": round(seconds, 1), "training_s": round(row["training_s"] + seconds, 1)}

    def pretrain(self, idea: Idea) -> tuple[Path, float]:
        """The run folder and the seconds of its steps."""
        if self.args.pretrained and idea.length == 1 and not idea.pretraining:
            return self.args.pretrained, training_seconds(self.args.pretrained)
        epochs = max(round(idea.length * self.args.pretrain_epochs), 1)
        key = (str(epochs), *(f"{field}={value}" for field, value in idea.pretraining.items()))
        if key not in self.pretrained:
            out = self.folder / f"pretrained-{len(self.pretrained)}"
            changes = {**self.model, **idea.pretraining, "epochs": epochs, "seed": self.seed, "checkpoint_epochs": 0}
            images = list(self.training_split().images)
            api.pretrain(images, recipe=get_recipe("pretrain-small").with_overrides(changes), out=out)
            seconds = epochs * self.args.durations[1] if self.args.durations else training_seconds(out)
            self.pretrained[key] = out, seconds
        return self.pretrained[key]

    def training_split(self) -> Split:
        """The images that the fine-tuning trains on, so that held-out ones are not used without labels either."""
        return load_builtin_dataset(self.dataset, validation=self.args.validation).train

    def train(self, name: str, recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
        out = self.folder / name
        fields = dict(changes)
        init_from = fields.pop("init_from", None)
        predictor = api.train(recipe=recipe, init_from=init_from, out=out, allow_leak=True, **fields)
        return {**self.measure(predictor), "epochs": len(Run(out).load_metrics()), "training_s": training_seconds(out)}

    def measure(self, predictor: Predictor) -> dict[str, Any]:
        dataset = load_builtin_dataset(self.dataset, validation=self.args.validation)
        split = dataset.validation if self.args.validation else dataset.test
        split = split.to_model_input(predictor.model_config.preprocessing)

        def accuracy(logits: Any) -> float:
            return float((logits.cpu().argmax(dim=1) == split.labels).double().mean())

        return {
            "accuracy": accuracy(predictor.logits(split.images)),
            "accuracy_tta": accuracy(tta_logits(predictor.logits, split.images, self.recipe.tta)),
        }


def training_seconds(run: Path) -> float:
    return round(sum(line["training_seconds"] for line in Run(run).load_metrics()), 1)


def print_summary(rows: Sequence[Mapping[str, Any]]) -> None:
    """Means, and differences from training from scratch in pairs of seeds, where it was measured."""
    scratch = {row["seed"]: row["accuracy"] for row in rows if row["idea"] == SCRATCH}
    for idea in dict.fromkeys(row["idea"] for row in rows):
        group = [row for row in rows if row["idea"] == idea]
        accuracy = statistics.fmean(row["accuracy"] for row in group)
        tta = statistics.fmean(row["accuracy_tta"] for row in group)
        seconds = statistics.fmean(row["training_s"] for row in group)
        line = f"{idea:<14} {accuracy:.2%}, with TTA {tta:.2%}, {seconds:.0f} s, n = {len(group)}"
        differences = [100 * (row["accuracy"] - scratch[row["seed"]]) for row in group if row["seed"] in scratch]
        if differences:
            spread = f" ± {statistics.stdev(differences):.2f}" if len(differences) > 1 else ""
            line += f", {statistics.fmean(differences):+.2f}{spread} points"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10-97", help="of the training from scratch, and of the fine-tuning")
    parser.add_argument("--pretrain-epochs", type=int, default=60)
    parser.add_argument("--pretrained", type=Path, metavar="RUN", help="pretraining of the ideas that do not change it")
    parser.add_argument("--idea", action="append", choices=[*IDEAS])
    parser.add_argument("--validation", type=float, default=0.0, help="fraction of the training images to measure on")
    parser.add_argument(
        "--durations", type=float, nargs=3, metavar="SECONDS",
        help="training from scratch, one epoch of pretraining and one of fine-tuning, each alone on the GPU",
    )  # fmt: skip
    parser.add_argument("--toy", action="store_true", help="digits and a tiny model")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders")
    add_seed_arguments(parser)
    add_output_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.processes > 1 and args.seeds > 1:
        rows = run_side_by_side(args)
        write_results(args, rows)
    else:
        for seed in seeds_of(args):
            with tempfile.TemporaryDirectory() as temporary:
                rows += Comparison(args, seed, (args.keep or Path(temporary)) / f"seed-{seed}").rows(
                    args.idea or [*IDEAS]
                )
            write_results(args, rows)
    print_summary(rows)


if __name__ == "__main__":
    main()
