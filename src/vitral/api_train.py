"""A model is made: train, demo, and ways to make one compared. From what was asked to a finished run folder."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vitral import __version__
from vitral import bundled as box
from vitral.data.datasets import Dataset, Split
from vitral.data.datasets import load as load_dataset
from vitral.data.files.file_dataset import PREFIX
from vitral.data.preprocess import adapt
from vitral.data.sequence import Items, check_sequence, is_sequence, name_of
from vitral.device.hardware import Hardware, choose
from vitral.distributed.parallel import Way, way_of
from vitral.errors import VitralError, typed
from vitral.evaluation import evaluate as judge
from vitral.evaluation.metrics import Metrics
from vitral.evaluation.report import assess
from vitral.evaluation.tta import VIEWS, answers
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS
from vitral.recipes.schema import CAN_CHANGE, Recipe, read_recipe
from vitral.reporting.figures import training as figures
from vitral.reporting.html.report import write_report
from vitral.reporting.html.report_data import gather
from vitral.runs.run import RUNS, ModelCard, Run, fresh, write_atomically
from vitral.training.compare_strategies import Comparison
from vitral.training.compare_strategies import check as check_comparison
from vitral.training.compare_strategies import compare as compare_ways
from vitral.training.progress import Display, Waiting
from vitral.training.provenance import began_in_fp8, check_same_data, create, earlier_attempt
from vitral.training.setup import Prepared, of_size, plan_for, prepare
from vitral.training.trainer import check_splits, fit

BESIDE = 2_000  # images that the demo's model and the one in the box are both asked about


def train(
    data: str | Path | Items | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = True,
    **changes: Any,
) -> Predictor:
    """Train a ViT and return it, ready to be asked.

    `data` is a known set ("mnist"), a folder with class folders, a CSV list, shards, or any sequence of (image, label),
    torchvision's and Hugging Face's data sets among them; `recipe` a name, a TOML file or a Recipe (default: the one
    that suits the data); `changes` are fields of the recipe, `init` among them:
    `train("photos/", init="vit.safetensors", epochs=3, **{"optim.lr": 1e-3})`, `preset`, a model of the tables ("S/16",
    "R26+S/32"), and `heads`, for a checkpoint that does not tell. With `resume`, an interrupted run goes on exactly
    where it was; a sequence must be given again.
    """
    check_sequence(data)
    items = data if is_sequence(data) else None
    name = name_of(items) if items is not None else str(data) if data is not None else None
    if resume is not None:
        if (data is not None and items is None) or recipe or out or set(changes) - set(CAN_CHANGE):
            raise VitralError(
                "--resume goes on with a run as it is, so it takes no data, recipe, out or other settings",
                f"only {', '.join(CAN_CHANGE)} may be changed",
            )
        plan = read_recipe(Run.open(resume).recipe_file)
    else:
        asked = {name: changes.pop(name, None) for name in ("init", "preset", "heads")}
        plan = plan_for(name, recipe, **asked).changed(changes)
    world = choose(device=plan.device).world
    console = Console(quiet=quiet or not world.first, highlight=False)
    run = None
    begun, changed = world.tell(lambda: (resume, changes) if resume else (earlier_attempt(out), {}))
    if begun:
        run = Run.open(begun)
        if run.finished and run.test_file.is_file():
            raise VitralError(f"{run} is finished", f"vitral evaluate {typed(run)} says how good it is")
        plan = read_recipe(run.recipe_file).changed(changed)
    elif out is not None:  # before anything is fetched
        world.tell(lambda: Run.check_free(Path(out)))
    console.print(f"vitral {__version__}\n")
    ready = world.each(lambda: prepare(plan, progress=not console.quiet, items=items))
    plan, dataset = ready.recipe, ready.dataset
    world.each(lambda: check_splits(plan, dataset))
    steps = max(len(dataset.train) // plan.batch, 1)
    hardware = choose(
        device=plan.device,
        precision=plan.precision,
        compile=plan.compile,
        width=plan.model.width,
        steps=steps * plan.epochs,
        scratch=not plan.init and (run is None or began_in_fp8(run)),  # a run goes on as it began
    )
    way = way_of(plan, hardware)
    if run is None:
        run = Run(world.tell(lambda: create(plan, dataset, hardware, way, out)))
    else:
        check_same_data(run, dataset)
        world.tell(lambda: write_atomically(run.recipe_file, plan.to_toml()))
    introduce(console, ready, hardware, way, run)
    with world.guarded(f"vitral train --resume {typed(run)}"), ExitStack() as held:
        world.tell(lambda: held.enter_context(run.alone()))
        with Display(console, steps) as watch:
            fit(plan, dataset, ready.preprocessing, run, hardware, watch, ready.start)
        return finish(run, plan, dataset, console)


def introduce(console: Console, ready: Prepared, hardware: Hardware, way: Way, run: Run) -> None:
    plan, dataset = ready.recipe, ready.dataset
    with torch.device("meta"):
        parameters = sum(p.numel() for p in VARIANTS[plan.variant](plan.model).parameters())
    m, o = plan.model, plan.optim
    epochs = "epoch" if plan.epochs == 1 else "epochs"
    size, kind = "×".join(map(str, m.image_size)), "ViT" if plan.variant == "plain" else f"{plan.variant} ViT"
    source = dataset.source.removeprefix(f"from {dataset.name}").removeprefix(", ")  # a folder is named once
    console.print(
        f"data      {dataset.name}: {len(dataset.train):,} train · {len(dataset.validation):,} validation"
        f"{source and ', '}{source}\n"
        f"model     {kind} {size}/{m.patch_size}, width {m.width}, depth {m.depth}, heads {m.heads}: "
        f"{parameters / 1e6:.2f} M parameters, {m.grid[0] * m.grid[1]} patches\n"
        + "".join(f"          {note}\n" for note in ready.notes)
        + f"recipe    {plan.name}: {o.name} {o.lr * plan.lr_scale:g}, {plan.epochs} {epochs}, batch {plan.batch}, "
        f"{o.schedule} schedule\n"
        f"hardware  {hardware}\n"
        + (f"parallel  {way.name}: {way.reason}\n" if hardware.world.size > 1 else "")
        + f"run       {run}\n",
        soft_wrap=True,
        markup=False,
    )


def finish(run: Run, plan: Recipe, dataset: Dataset, console: Console) -> Predictor:
    """Read the test set, once, all processes together; the first draws the pictures and says what came out."""
    predictor = Predictor.load(run.path, device=plan.device)
    world = predictor.hardware.world
    if len(dataset.test):
        split, name, seen = (
            of_size(dataset.test, predictor.card.preprocessing),
            "test",
            "images the model had never seen",
        )
    else:
        split, name, seen = dataset.validation, "validation", "images, on which the epoch was chosen: no test images"
    asked = judge.Asked(predictor=predictor, plan=plan, dataset=dataset, name=name, split=split)
    logits = answers(predictor.logits_together, split.images, plan.views)

    def rest() -> ModelCard:
        if len(dataset.validation):
            judge.calibrate_model(predictor, dataset.validation)
        conclude(run, plan, asked, logits, seen, console)
        return predictor.card

    predictor.card = world.tell(rest)
    return predictor


def conclude(run: Run, plan: Recipe, asked: judge.Asked, logits: torch.Tensor, seen: str, console: Console) -> None:
    """What the test set said: as a file, as pictures, as a page, and for the person, with what to try next."""
    predictor, dataset, split, name = asked.predictor, asked.dataset, asked.split, asked.name
    metrics = assess(logits, split.labels, predictor.classes, predictor.card.calibration, split=name)
    said = metrics.as_dict() | ({"views": plan.views} if plan.views != "one" else {})
    write_atomically(run.test_file, json.dumps(said, indent=2) + "\n")
    try:
        example = draw(run, predictor, split, metrics)
    except OSError as error:
        raise VitralError(
            f"the pictures cannot be written into {run.figures}: {error.strerror or error}",
            f"the model is whole and its test accuracy is {metrics.top1:.2%}: vitral evaluate {typed(run)}",
        ) from error
    page = write_report(gather(asked, metrics, logits, run.path), run.report_file)
    mistakes = ", ".join(f"{true}→{said} ({count})" for true, said, count in metrics.mistakes(3))
    console.print(
        f"\n{name:<9} [bold]{metrics.top1:.2%}[/bold]  ({metrics.top1_low:.2%} – {metrics.top1_high:.2%})   "
        f"{metrics.images:,} {seen}\n{VIEWS[plan.views]}",
        soft_wrap=True,
    )
    console.print(
        f"It confuses most often:   {mistakes or 'nothing'}\n"
        f"Which it takes for which: {run.figures / 'confusion.png'}\n"
        f"What it looked at:        {run.figures / 'attention.png'}\n"
        f"How it learned:           {run.figures / 'curves.png'}\n"
        f"Everything in one page:   {page}\n\n"
        f"Next:  {command()} predict {typed(run)} {typed(example)}\n"
        f"       {command()} walk {typed(example)} --model {typed(run)}      how it gets from the pixels to its answer",
        soft_wrap=True,
        markup=False,
    )
    if not dataset.name.startswith(PREFIX):  # only Python can give a sequence again
        console.print(
            f"       {command()} evaluate {typed(run)}\n"
            f"       {command()} train {typed(dataset.name)} --recipe {typed(run.recipe_file)} "
            f"--epochs {2 * plan.epochs}",
            soft_wrap=True,
            markup=False,
        )


def command() -> str:
    """How to call vitral from this shell: `make demo` leaves it in .venv, which is not on everybody's path."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "vitral" and not shutil.which("vitral") else "vitral"


def draw(run: Run, predictor: Predictor, test: Split, metrics: Metrics) -> Path:
    """The run's pictures; returns one test image as a file, to try things with."""
    images = test.images
    shown = figures.choose_examples(predictor.probabilities(images), test.labels)
    figures.curves(run.metrics(), run.figures / "curves.png")
    figures.confusion(metrics, run.figures / "confusion.png", title=f"{metrics.top1:.2%} of {metrics.images:,} right")
    figures.attention(predictor, images[shown], test.labels[shown], run.figures / "attention.png")
    figures.glass(predictor, images[shown[0]], run.figures / "glass.png")
    return figures.picture(predictor.card.preprocessing.framed(images[shown[0]]), run.figures / "example.png")


def compare(
    data: str | None = None,
    init: str | None = None,
    *,
    recipe: Recipe | None = None,
    seeds: int = 3,
    out: str | Path | None = None,
    quiet: bool = True,
    **changes: Any,
) -> Comparison:
    """From scratch, a linear probe, or fine-tuning: all on the same split, with a sentence which to take.

    Everything is kept in `out`, and what is already there is not repeated. `recipe` and `changes`: of the fine-tuning.
    """
    plan = (recipe if recipe is not None else plan_for(data, None, init)).changed(changes)
    check_comparison(plan, seeds)
    folder = Path(out) if out else fresh(RUNS, "compare")
    console = Console(quiet=quiet, highlight=False)
    console.print(f"vitral {__version__}\n\n{folder}: what is finished there is not repeated\n", soft_wrap=True)
    with console.status("reading the images") as status:
        waiting = Waiting(status)
        result = compare_ways(plan, folder, seeds=seeds, said=console.print, begins=waiting.begins, watch=waiting)
    figures.comparison(result, folder / "comparison.png")
    return result


def demo(*, out: str | Path | None = None, quiet: bool = True) -> Predictor:
    """Train a small ViT in about a minute, on MNIST if it can be had, otherwise on the digits that come along; then ask
    a model that comes along about the same images."""
    console = Console(quiet=quiet, highlight=False)
    if out is not None:
        Run.check_free(Path(out))  # before anything is fetched
    try:
        load_dataset("mnist", progress=not quiet)
        recipe = "mnist-quick"
    except VitralError as error:
        console.print(f"{error.what}\nTraining on scikit-learn's digits instead: they come along with vitral.\n")
        recipe = "digits"
    predictor = train(recipe=recipe, out=out, quiet=quiet)
    beside_the_box(predictor, console)
    return predictor


def beside_the_box(predictor: Predictor, console: Console) -> None:
    """The model that comes along for the same digits, asked the same test images, and where it looked in one."""
    boxed, asked = Predictor.load(f"{box.PREFIX}mnist"), judge.question(predictor, None, None)
    some = judge.spread(len(asked.split), BESIDE)
    images, labels = asked.split.images[some], asked.split.labels[some]
    theirs = adapt(images, boxed.card.preprocessing)
    named = torch.tensor([predictor.classes.index(name) for name in boxed.classes])
    ours_right = predictor.logits(images).argmax(dim=1) == labels
    theirs_right = named[boxed.logits(theirs).argmax(dim=1)] == labels
    only_theirs = theirs_right & ~ours_right
    telling = int((theirs_right.int() + only_theirs.int()).argmax())
    assert predictor.path is not None
    drawn = figures.glass(boxed, theirs[telling], Run(predictor.path).figures / "box.png")
    said = boxed.probabilities(theirs[telling : telling + 1])[0]
    answer = f"{boxed.classes[int(said.argmax())]} ({figures.percent(said.max().item())})"
    strange = "" if asked.dataset.name == boxed.card.trained_on else ", which never saw such images,"
    console.print(
        f"\nvitral comes with trained models: {', '.join(box.names())}.\n"
        f"Of {len(labels):,} of these test images yours has {int(ours_right.sum()):,} right, "
        f"mnist from the box{strange} {int(theirs_right.sum()):,}.\n"
        f"One that {'only it reads' if only_theirs.any() else 'it reads'}, and where it looked: {answer}   {drawn}\n\n"
        f"Ask them:  {command()} predict mnist your-digit.png\n"
        + "".join(f"           {command()} predict {name} photo.jpg\n" for name in box.names() if name != "mnist")
        + f"           {command()} box",
        soft_wrap=True,
    )
