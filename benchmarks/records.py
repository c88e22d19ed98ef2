"""Recipes against the clock, seed after seed in one process: start-up and compiling are paid once.

    python benchmarks/records.py cifar10-94 cifar10-patch --seeds 20 [--set epochs=17 --set augment.mixed=0.3]
    python benchmarks/records.py --try "cifar10-94 epochs=16 model.conv.widths=32,128,256" --try "cifar10-94 batch=512"

A variant is a recipe and changes to it, FIELD=VALUE, read as `vitral train --FIELD VALUE` reads them; --set changes all
variants. Each run is the product's own: images prepared, run folder made, fitted and asked as `vitral train` does, but
without figures and report. One line a run, at once; --out is written anew after each, so that a kill loses nothing.

accuracy     on the test images, with the recipe's views and with one; the mean ± its standard error, and whether it is
             at least --target, or the number that the recipe's name ends in
training     seconds of the steps alone, by the product's clock, which leaves out compiling: as the epochs came, and
             the median epoch times the epochs
everything   from images in the computer's memory to the end of the last epoch: copied to the GPU, first weights,
             kernels tried, compiled and recorded, steps, the model written. The first run of a process and the first
             with a model or batch of another shape compile, with the caches as they find them, and stand apart

--budget begins no run that would not end in time, judged by the one before. --keep leaves each variant's best run in
DIR/VARIANT (`vitral report` draws it). A variant that fails says so, and the next one follows.
Without a GPU: a toy on scikit-learn's digits, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contestants import NEEDS_A_GPU, on_gpu, what_failed

TOY = "digits"


@dataclass(frozen=True)
class Variant:
    """A recipe's name, or file, and what is changed in it."""

    recipe: str
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.recipe, *self.changes))

    def plan(self) -> Any:
        from vitral.cli.parsing import parse
        from vitral.recipes.schema import Recipe
        from vitral.training.setup import plan_for

        words = [word for change in self.changes for word in as_flags(change)]
        return parse(Recipe, words, "train", default=plan_for(None, self.recipe))

    def shape(self) -> tuple[Any, ...]:
        """What code is compiled for: a variant of the same needs no compiling."""
        from vitral.errors import VitralError

        with suppress(VitralError):  # which its run will say
            plan = self.plan()
            return plan.variant, plan.model, plan.batch, plan.accumulate, plan.precision, plan.compile
        return ()

    def target(self, asked: float | None) -> float | None:
        found = re.search(r"-(\d\d(\.\d+)?)$", self.recipe)
        percent = asked if asked is not None else float(found[1]) if found else None
        return None if percent is None else percent / 100


def as_flags(change: str) -> list[str]:
    """`optim.lr=6e-3` as the command line says it."""
    name, _, value = change.partition("=")
    name = name.replace("_", "-")
    if value.lower() in ("true", "false"):  # a switch
        group, dot, last = name.rpartition(".")
        return [f"--{group}{dot}{'no-' if value.lower() == 'false' else ''}{last}"]
    return [f"--{name}", *filter(None, value.split(","))]


@lru_cache(maxsize=1)
def prepared(plan: Any) -> Any:
    """A variant's images are read once."""
    from vitral.training.setup import prepare

    return prepare(plan)


def play(plan: Any, folder: Path) -> dict[str, Any]:
    """One run, as vitral.api_train.train goes about it."""
    from vitral.device.hardware import choose
    from vitral.distributed.parallel import way_of
    from vitral.evaluation.metrics import measure
    from vitral.evaluation.tta import answers
    from vitral.inference.predictor import Predictor
    from vitral.runs.run import Run
    from vitral.training.callbacks import Watch
    from vitral.training.provenance import create
    from vitral.training.setup import of_size
    from vitral.training.trainer import fit

    class Ends(Watch):
        at, notes = 0.0, ""

        def epoch(self, row: dict[str, Any], seconds_left: float) -> None:
            self.at = time.perf_counter()

        def said(self, what: str) -> None:
            self.notes += f"   {what}"

    ready = prepared(replace(plan, seed=0))
    plan, dataset, watch = replace(ready.recipe, seed=plan.seed), ready.dataset, Ends()
    began = time.perf_counter()
    steps = max(len(dataset.train) // plan.batch, 1) * plan.epochs
    wishes = {"device": plan.device, "precision": plan.precision, "compile": plan.compile}
    hardware = choose(**wishes, width=plan.model.width, steps=steps, scratch=not plan.init)
    run = Run(create(plan, dataset, hardware, way_of(plan, hardware), folder))
    fit(plan, dataset, ready.preprocessing, run, hardware, watch, ready.start)
    predictor, rows = Predictor.load(run.path, device=plan.device), run.metrics()
    test = of_size(dataset.test, predictor.card.preprocessing)

    def asked(views: Any) -> Any:
        return measure(answers(predictor.logits_together, test.images, views).cpu(), test.labels, predictor.classes)

    said, epochs = asked(plan.views), [row["training_seconds"] for row in rows]
    run.test_file.write_text(json.dumps(said.as_dict() | {"views": plan.views}) + "\n")
    top1 = said.top1
    return {
        "top1": top1,
        "top1_one_view": top1 if plan.views == "one" else asked("one").top1,
        "training_s": sum(epochs),
        "by_median_epoch_s": statistics.median(epochs) * len(epochs),
        "everything_s": watch.at - began,
        "epochs": len(epochs),
        "steps": rows[-1]["step"],
        "ms_a_step": sum(epochs) / rows[-1]["step"] * 1000,
        "train_loss": rows[-1]["train_loss"],
        "train_top1": rows[-1]["train_top1"],
        "hardware": str(hardware),
        "notes": watch.notes,
    }


def in_one_line(run: dict[str, Any]) -> str:
    said: str = f"{run['variant']}, seed {run['seed']}: "
    if "failed" in run:
        return f"{said}{run['failed']}"
    first = f" (first of the {run['first']})" if run["first"] else ""
    return said + (
        f"{run['top1']:.2%}, one view {run['top1_one_view']:.2%}   training {run['training_s']:.2f} s, by its "
        f"median epoch {run['by_median_epoch_s']:.2f} s, everything {run['everything_s']:.1f} s{first}   "
        f"{run['steps']:,} steps of {run['ms_a_step']:.2f} ms   last epoch: loss {run['train_loss']:.3f}, "
        f"{run['train_top1']:.1%}{run['notes']}"
    )


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {"mean": statistics.mean(values), "lowest": min(values), "highest": max(values)}
    sd = statistics.stdev(values) if len(values) > 1 else None
    return found if sd is None else found | {"sd": sd, "se": sd / len(values) ** 0.5}


def summary(runs: Sequence[dict[str, Any]], targets: dict[str, float | None]) -> dict[str, Any]:
    """By variant. What a first run took with everything stands apart: it compiled."""
    found: dict[str, Any] = {}
    for variant, target in targets.items():
        mine = [run for run in runs if run["variant"] == variant and "failed" not in run]
        row: dict[str, Any] = {"n": len(mine), "target": target}
        for name in ("top1", "top1_one_view", "training_s", "by_median_epoch_s", "ms_a_step"):
            row[name] = spread([run[name] for run in mine])
        row["everything_s"] = spread([run["everything_s"] for run in mine if not run["first"]])
        row["everything_first_s"] = next((run["everything_s"] for run in mine if run["first"]), None)
        row["reached"] = row["top1"]["mean"] >= target if mine and target is not None else None
        found[variant] = row
    return found


def told(result: dict[str, Any]) -> str:
    def seconds(of: dict[str, float] | None) -> str:
        return f"{of['mean']:.2f} s ({of['lowest']:.2f} – {of['highest']:.2f})" if of else "not measured again"

    lines = []
    for variant, row in result.items():
        if not row["n"]:
            lines.append(f"{variant}: no run")
            continue
        top1, goal = row["top1"], ""
        sure = f" ± {100 * top1['se']:.2f} (sd {100 * top1['sd']:.2f})" if "se" in top1 else ""
        if row["target"] is not None:
            goal = f"   {100 * row['target']:g} %: {'reached' if row['reached'] else 'NOT reached'}"
        lines.append(
            f"{variant}: n = {row['n']}   {top1['mean']:.2%}{sure}, {top1['lowest']:.2%} – {top1['highest']:.2%}, "
            f"one view {row['top1_one_view']['mean']:.2%}{goal}\n   training {seconds(row['training_s'])}, by median "
            f"epochs {seconds(row['by_median_epoch_s'])}, everything {seconds(row['everything_s'])}"
            + (f", at first {row['everything_first_s']:.1f} s" if row["everything_first_s"] else "")
        )
    return "\n".join(lines)


def about() -> dict[str, Any]:
    import torch

    names = {name for name in ("vitral", "torch", "triton") if find_spec(name)}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if on_gpu() else None,
        "machine": platform.platform(),
        "versions": {name: getattr(import_module(name), "__version__", "?") for name in sorted(names)},
    }


def graphs() -> int:
    """That were compiled in this process."""
    known = sys.modules.get("torch._dynamo.utils")
    return int(known.counters["stats"]["unique_graphs"]) if known else 0


def one(variant: Variant, seed: int, first: str, keep: Path | None, best: float) -> dict[str, Any]:
    """A run, or why there is none. One that is better than `best` is kept."""
    import torch

    from vitral.errors import VitralError
    from vitral.training.signals import Interrupted

    run: dict[str, Any] = {"variant": str(variant), "recipe": variant.recipe, "changes": variant.changes}
    run |= {"seed": seed, "first": first}
    began, compiled = time.perf_counter(), graphs()
    try:
        with tempfile.TemporaryDirectory(dir=keep) as folder:
            run |= play(replace(variant.plan(), seed=seed), Path(folder, "run"))
            if keep and run["top1"] > best:
                place = keep / re.sub(r"[^\w.=,+-]+", "_", str(variant))
                shutil.rmtree(place, ignore_errors=True)
                run["kept"] = str(Path(folder, "run").rename(place))
    except Interrupted:
        raise SystemExit("stopped") from None
    except VitralError as error:
        run["failed"] = error.what
    except Exception as error:  # a GPU's, a compiler's, of whatever kind
        run["failed"] = what_failed(error)
    gc.collect()
    run |= {"compiled": graphs() - compiled, "wall_s": time.perf_counter() - began}
    return run | {"left_gib": torch.cuda.memory_allocated() / 2**30 if on_gpu() else 0.0}


def measure(variants: Sequence[Variant], asked: argparse.Namespace) -> None:
    import torch

    from vitral.runs.run import write_atomically

    began, runs, left_out = time.perf_counter(), list[dict[str, Any]](), 0
    targets = {str(variant): variant.target(asked.target) for variant in variants}
    known, shape = about(), tuple[Any, ...]()
    for variant in variants:
        mine: list[dict[str, Any]] = []
        before, shape = shape, variant.shape()
        # After eight shapes of one function the compiler gives up on it, and what it saw in two sizes becomes slower.
        if shape != before and "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            needed = max((run["wall_s"] for run in mine[-1:] or runs[-1:]), default=0.0)
            if time.perf_counter() - began + needed > asked.budget:
                left_out += 1
                continue
            trained = [run for run in runs if "failed" not in run]
            first = "process" if not trained else "shape" if shape != before and not mine else ""
            run = one(variant, seed, first, asked.keep, max((run["top1"] for run in mine), default=-1.0))
            runs.append(run)
            mine.append(run)
            print(in_one_line(run), flush=True)
            if asked.out:
                content = {"about": known, "variants": summary(runs, targets), "runs": runs}
                write_atomically(asked.out, json.dumps(content, indent=1) + "\n")
            if "failed" in run:
                break
    if left_out:
        print(f"{left_out} runs would not have ended within {asked.budget:g} s")
    print("\n" + told(summary(runs, targets)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names (vitral recipes) or TOML files")
    parser.add_argument("--try", dest="tried", action="append", default=[], metavar="'RECIPE FIELD=VALUE …'")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE", help="in all of them"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--target", type=float, metavar="PERCENT")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="JSON")
    asked = parser.parse_args()
    variants = [Variant(recipe, tuple(asked.changes)) for recipe in asked.recipes]
    for words in map(str.split, filter(str.strip, asked.tried)):
        variants.append(Variant(words[0], (*asked.changes, *words[1:])))
    if not on_gpu():
        print(NEEDS_A_GPU)
        variants = [variant for variant in variants if variant.recipe == TOY] or [Variant(TOY, ("epochs=2",))]
        asked.seeds = min(asked.seeds, 2)
    if not variants:
        parser.error("which recipes? cifar10-94, for example, or --try 'cifar10-94 epochs=16'")
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
    measure(list(dict.fromkeys(variants)), asked)


if __name__ == "__main__":
    main()
