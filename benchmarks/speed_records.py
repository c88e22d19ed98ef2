"""Training time to a target accuracy: recipes on several seeds in one process, so start-up and compilation happen once.

    python benchmarks/speed_records.py cifar10-94 cifar10-patch --seeds 20 [--set epochs=17 --set augment.mix_prob=0.3]
    python benchmarks/speed_records.py --variant "cifar10-94 epochs=16 model.conv.widths=32,128,256" --save

A variant is a recipe with changes FIELD=VALUE, parsed as `vitral train --FIELD VALUE` parses them (FIELD= empties a
list); --set changes all variants. Each run goes through the same code as `vitral train`, without figures and report.
Result files are rewritten after every run, so an interrupted benchmark loses nothing.

accuracy      on the test set, with the recipe's TTA and without: mean ± standard error, compared with --target or
              with the number at the end of the recipe's name
training_s    time of the optimizer steps, without compilation, as recorded in metrics.jsonl; also the median epoch
              times the number of epochs
wall_clock_s  from images in host memory to the end of the last epoch: copy to the GPU, initialisation, self-checks,
              compilation, graph capture, steps, checkpoint. The first run of the process and the first run with another
              model or batch shape compile; they are reported separately.

--budget skips runs that would not finish in time, judging by the previous one. --keep keeps the best run folder of each
variant in DIR/VARIANT. A variant that fails is reported, and the next one follows. Without a GPU: a toy on
scikit-learn's digits, which only shows that everything runs.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _output import add_output_arguments, write_results
from peers import NO_GPU_NOTICE, error_summary, has_gpu

if TYPE_CHECKING:
    from vitral.recipes.schema import Recipe
    from vitral.training.setup import TrainingSetup

TOY_RECIPE = "digits"


@dataclass(frozen=True)
class Variant:
    """A recipe's name, or file, and changes to it."""

    recipe: str
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.recipe, *self.changes))

    def resolve(self) -> Recipe:
        from vitral.cli.commands.train import COMMAND
        from vitral.training.setup import resolve_recipe

        words = [word for change in self.changes if not change.endswith("=") for word in to_flags(change)]
        emptied = {change.removesuffix("="): () for change in self.changes if change.endswith("=")}
        return resolve_recipe(None, self.recipe).with_overrides({**COMMAND.parse(words).overrides, **emptied})

    def compile_key(self) -> tuple[Any, ...]:
        """What compiled code depends on: variants with the same key need no compilation."""
        from vitral.errors import VitralError

        with suppress(VitralError):  # reported by the run
            recipe = self.resolve()
            return recipe.variant, recipe.model, recipe.batch_size, recipe.grad_accum, recipe.precision, recipe.compile
        return ()

    def target(self, requested: float | None) -> float | None:
        """Target accuracy: as requested in percent, or the number at the end of the recipe's name."""
        match = re.search(r"-(\d\d(\.\d+)?)$", self.recipe)
        percent = requested if requested is not None else float(match[1]) if match else None
        return None if percent is None else percent / 100


def to_flags(change: str) -> list[str]:
    """`optim.lr=6e-3` as command-line words: `--optim.lr 6e-3`."""
    name, _, value = change.partition("=")
    name = name.replace("_", "-")
    if value.lower() in ("true", "false"):
        group, dot, last = name.rpartition(".")
        return [f"--{group}{dot}{'no-' if value.lower() == 'false' else ''}{last}"]
    return [f"--{name}", *value.split(",")]


@lru_cache(maxsize=1)
def cached_setup(recipe: Recipe) -> TrainingSetup:
    """The data of a variant is loaded once."""
    from vitral.training.setup import setup_training

    return setup_training(recipe)


def train_and_evaluate(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """One run, in the order of vitral.api.train."""
    from vitral.evaluation.data import load_eval_target
    from vitral.evaluation.metrics import compute_metrics
    from vitral.evaluation.tta import tta_logits
    from vitral.inference.predictor import Predictor
    from vitral.runs.run import Run
    from vitral.training.callbacks import Callback
    from vitral.training.hardware import parallel_plan, training_hardware
    from vitral.training.provenance import create_run
    from vitral.training.trainer import Trainer

    class EndOfTraining(Callback):
        def __init__(self) -> None:
            self.time, self.messages = 0.0, list[str]()

        def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
            self.time = time.perf_counter()

        def on_message(self, message: str) -> None:
            self.messages.append(message)

    shared = cached_setup(replace(recipe, seed=0))
    setup, end = replace(shared, recipe=replace(shared.recipe, seed=recipe.seed)), EndOfTraining()
    start = time.perf_counter()
    hardware = training_hardware(setup)
    parallel = parallel_plan(setup.recipe, hardware)
    run = Run(create_run(setup.recipe, setup.dataset, hardware, parallel, folder))
    Trainer(
        setup.recipe,
        setup.dataset,
        setup.preprocessing,
        run,
        hardware,
        parallel=parallel,
        callbacks=[end],
        initial_weights=setup.initial_weights,
    ).fit()
    metrics = run.load_metrics()
    predictor = Predictor.load(run.path, device=recipe.device)
    test = load_eval_target(predictor, dataset=setup.dataset, split="test").split

    def test_accuracy(tta: Any) -> float:
        logits = tta_logits(predictor.logits, test.images, tta).cpu()
        return compute_metrics(logits, test.labels, predictor.classes).top1

    accuracy, epoch_seconds = test_accuracy(recipe.tta), [epoch["training_seconds"] for epoch in metrics]
    return {
        "test_accuracy": accuracy,
        "test_accuracy_without_tta": accuracy if recipe.tta == "none" else test_accuracy("none"),
        "training_s": sum(epoch_seconds),
        "training_by_median_epoch_s": statistics.median(epoch_seconds) * len(epoch_seconds),
        "wall_clock_s": end.time - start,
        "epochs": len(epoch_seconds),
        "steps": metrics[-1]["step"],
        "ms_per_step": sum(epoch_seconds) / metrics[-1]["step"] * 1000,
        "train_loss": metrics[-1]["train_loss"],
        "train_accuracy": metrics[-1]["train_top1"],
        "engine": str(predictor.engine),
        "hardware": str(hardware),
        "messages": "; ".join(end.messages),
    }


def format_run(run: dict[str, Any]) -> str:
    prefix: str = f"{run['variant']}, seed {run['seed']}: "
    if "failed" in run:
        return f"{prefix}{run['failed']}"
    first = f" (first run of the {run['first']})" if run["first"] else ""
    messages = f"   {run['messages']}" if run["messages"] else ""
    return prefix + (
        f"{run['test_accuracy']:.2%}, without TTA {run['test_accuracy_without_tta']:.2%}   training "
        f"{run['training_s']:.2f} s, by median epoch {run['training_by_median_epoch_s']:.2f} s, wall clock "
        f"{run['wall_clock_s']:.1f} s{first}   {run['steps']:,} steps of {run['ms_per_step']:.2f} ms   last epoch: "
        f"loss {run['train_loss']:.3f}, accuracy {run['train_accuracy']:.1%}{messages}"
    )


def statistics_of(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    result = {"mean": statistics.mean(values), "min": min(values), "max": max(values)}
    if len(values) > 1:
        std = statistics.stdev(values)
        result |= {"std": std, "sem": std / math.sqrt(len(values))}
    return result


def summarise(runs: Sequence[dict[str, Any]], targets: dict[str, float | None]) -> dict[str, Any]:
    """Statistics per variant. The wall clock of first runs includes compilation and is separate."""
    summaries: dict[str, Any] = {}
    for variant, target in targets.items():
        finished = [run for run in runs if run["variant"] == variant and "failed" not in run]
        summary: dict[str, Any] = {"n": len(finished), "target": target}
        for name in (
            "test_accuracy", "test_accuracy_without_tta", "training_s", "training_by_median_epoch_s", "ms_per_step",
        ):  # fmt: skip
            summary[name] = statistics_of([run[name] for run in finished])
        summary["wall_clock_s"] = statistics_of([run["wall_clock_s"] for run in finished if not run["first"]])
        summary["first_wall_clock_s"] = next((run["wall_clock_s"] for run in finished if run["first"]), None)
        reached = summary["test_accuracy"]["mean"] >= target if finished and target is not None else None
        summaries[variant] = summary | {"reached": reached}
    return summaries


def format_summary(summaries: dict[str, Any]) -> str:
    def seconds(values: dict[str, float] | None) -> str:
        return f"{values['mean']:.2f} s ({values['min']:.2f} - {values['max']:.2f})" if values else "not measured"

    lines = []
    for variant, summary in summaries.items():
        if not summary["n"]:
            lines.append(f"{variant}: no finished run")
            continue
        accuracy, target = summary["test_accuracy"], ""
        spread = f" ± {100 * accuracy['sem']:.2f} (std {100 * accuracy['std']:.2f})" if "sem" in accuracy else ""
        if summary["target"] is not None:
            target = f"   target {100 * summary['target']:g}%: {'reached' if summary['reached'] else 'NOT reached'}"
        first = summary["first_wall_clock_s"]
        lines.append(
            f"{variant}: n = {summary['n']}   {accuracy['mean']:.2%}{spread}, {accuracy['min']:.2%} - "
            f"{accuracy['max']:.2%}, without TTA {summary['test_accuracy_without_tta']['mean']:.2%}{target}\n"
            f"   training {seconds(summary['training_s'])}, by median epoch "
            f"{seconds(summary['training_by_median_epoch_s'])}, wall clock {seconds(summary['wall_clock_s'])}"
            + (f", first run {first:.1f} s" if first else "")
        )
    return "\n".join(lines)


def num_compiled_graphs() -> int:
    """Graphs that torch.compile has compiled in this process."""
    dynamo_utils = sys.modules.get("torch._dynamo.utils")
    return int(dynamo_utils.counters["stats"]["unique_graphs"]) if dynamo_utils else 0


def run_variant(variant: Variant, seed: int, first: str, keep: Path | None, best: float) -> dict[str, Any]:
    """One run, or the reason why it failed. A run better than `best` is kept in `keep`."""
    import torch

    from vitral.errors import Interrupted, VitralError

    run: dict[str, Any] = {"variant": str(variant), "seed": seed, "first": first}
    start, graphs_before = time.perf_counter(), num_compiled_graphs()
    try:
        with tempfile.TemporaryDirectory(dir=keep) as folder:
            run |= train_and_evaluate(replace(variant.resolve(), seed=seed), Path(folder, "run"))
            if keep and run["test_accuracy"] > best:
                path = keep / re.sub(r"[^\w.=,+-]+", "_", str(variant))
                shutil.rmtree(path, ignore_errors=True)
                run["kept"] = str(Path(folder, "run").rename(path))
    except Interrupted:
        raise SystemExit("interrupted") from None
    except VitralError as error:
        run["failed"] = error.what
    except Exception as error:  # of any kind: from the GPU, the compiler or the code
        run["failed"] = error_summary(error)
    gc.collect()
    run |= {"compiled_graphs": num_compiled_graphs() - graphs_before, "total_s": time.perf_counter() - start}
    return run | {"leaked_gib": torch.cuda.memory_allocated() / 2**30 if has_gpu() else 0.0}


def measure(variants: Sequence[Variant], args: argparse.Namespace) -> None:
    import torch

    start, runs, num_skipped = time.perf_counter(), list[dict[str, Any]](), 0
    targets = {str(variant): variant.target(args.target) for variant in variants}
    compile_key = tuple[Any, ...]()
    for variant in variants:
        variant_runs: list[dict[str, Any]] = []
        previous_key, compile_key = compile_key, variant.compile_key()
        # torch.compile gives up on a function after eight shapes, and compiles slower code for varying sizes.
        if compile_key != previous_key and "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            expected_s = max((run["total_s"] for run in variant_runs[-1:] or runs[-1:]), default=0.0)
            if time.perf_counter() - start + expected_s > args.budget:
                num_skipped += 1
                continue
            is_first = all("failed" in run for run in runs)
            first = "process" if is_first else "shape" if compile_key != previous_key and not variant_runs else ""
            best = max((run["test_accuracy"] for run in variant_runs), default=-1.0)
            run = run_variant(variant, seed, first, args.keep, best)
            runs.append(run)
            variant_runs.append(run)
            print(format_run(run), flush=True)
            write_results(args, runs, {"summary": summarise(runs, targets)}, packages=("torch", "triton"))
            if "failed" in run:
                break
    if num_skipped:
        print(f"{num_skipped} runs skipped: they would not have finished within {args.budget:g} s")
    print("\n" + format_summary(summarise(runs, targets)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names (see `vitral recipes`) or TOML files")
    parser.add_argument("--variant", action="append", default=[], metavar="'RECIPE FIELD=VALUE ...'")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE", help="in all runs")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--target", type=float, metavar="PERCENT", help="target accuracy")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the best run folder of each variant here")
    add_output_arguments(parser)
    args = parser.parse_args()
    args.variants = [Variant(recipe, tuple(args.changes)) for recipe in args.recipes]
    for words in map(str.split, filter(str.strip, args.variant)):
        args.variants.append(Variant(words[0], (*args.changes, *words[1:])))
    if not args.variants and has_gpu():
        parser.error("no recipe given; for example: cifar10-94, or --variant 'cifar10-94 epochs=16'")
    return args


def main() -> None:
    args = parse_arguments()
    variants = args.variants
    if not has_gpu():
        print(NO_GPU_NOTICE)
        variants = [v for v in variants if v.recipe == TOY_RECIPE] or [Variant(TOY_RECIPE, ("epochs=2",))]
        args.seeds = min(args.seeds, 2)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    measure(list(dict.fromkeys(variants)), args)


if __name__ == "__main__":
    main()
