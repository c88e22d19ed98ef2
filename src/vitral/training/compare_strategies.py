"""From scratch, a linear probe or fine-tuning? All three on the same images, and a sentence that follows from them.

    out/compare.json         what is compared, written first
    out/probe/               the checkpoint with a head fitted to its frozen features: a model folder like the others
    out/scratch-0/ …         run folders, one a seed
    out/fine-tune-0/ …
    out/…/answers.json       which of the judged images that part was right about; a part that has one is not repeated

Where there are no test images, the validation images judge, and a share of the training images chooses the epoch in
their place: what judges has chosen nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.datasets import VALIDATION_SEED, Dataset, Split, stratified_holdout
from vitral.data.lazy_images import select_images
from vitral.device.select import select_hardware
from vitral.errors import VitralError
from vitral.evaluation.metrics import compute_logits
from vitral.evaluation.probe import compute_features, fit_linear_head
from vitral.evaluation.strategy_comparison import Strategy, Verdict, rank_strategies
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import ModelConfig, load_model, save_model
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.setup import TrainingSetup, resize_split, resolve_recipe, setup_training
from vitral.training.signals import Interrupted
from vitral.training.trainer import fit
from vitral.utils.atomic import atomic_write
from vitral.utils.serialization import to_dict

CHOOSING = 0.1  # share of the training images that chooses the epoch where the validation images judge
CALLED = {"scratch": "training from scratch", "probe": "the linear probe", "fine-tune": "fine-tuning"}


@dataclass(frozen=True, kw_only=True)
class StrategyComparison:
    verdict: Verdict
    evaluated_on: str  # for people
    descriptions: dict[str, str]  # each way in a few words
    model_folders: dict[str, str]  # a model of each way, to take
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_dict(self)
        return plain


def compare_strategies(
    tuned: Recipe,
    out: Path,
    *,
    seeds: int = 3,
    said: Callable[[str], None] = lambda _: None,
    begins: Callable[[str], None] = lambda _: None,
    watch: Callback | None = None,
) -> StrategyComparison:
    """`tuned` is the recipe of the fine-tuning. Parts that `out` already holds are not repeated.

    `said` hears of each part that is done, `begins` its name before it is, `watch` sees its training.
    """
    check_comparison(tuned, seeds)
    plans = {"scratch": from_scratch(tuned), "fine-tune": tuned}
    keep_settings(out, plans)
    found: dict[str, list[Answers]] = {"scratch": [], "probe": [], "fine-tune": []}
    about: dict[str, str] = {}
    judged_on = ""
    ready = {"scratch": setup_training(plans["scratch"]), "fine-tune": setup_training(plans["fine-tune"])}
    parts = [("probe", 0), *((way, seed) for seed in range(seeds) for way in ("fine-tune", "scratch"))]
    for way, seed in parts:
        part = apart(ready["fine-tune" if way == "probe" else way])
        judged_on = part.judged_on
        about[way] = described(part.ready.recipe, way)
        which = f"seed {seed}" if way != "probe" else ""
        folder = out / ("probe" if way == "probe" else f"{way}-{seed}")
        answers = read_answers(folder, part)
        if answers is None:
            try:
                begins(f"{way} {which}".strip())
                trained, seconds = probe_part(part, folder) if way == "probe" else train_part(part, folder, seed, watch)
                answers = ask(trained, part, folder, seconds)
            except Interrupted as stop:
                raise Interrupted(stop.what, f"go on with the same command and --out {out}") from stop
        found[way].append(answers)
        said(f"{way:<10} {which:<8} {answers.right.mean():7.2%}  {answers.seconds:7.0f} s")
    ways = [
        Strategy(
            name=way,
            correct=np.stack([answers.right for answers in of_way]),
            seconds=float(np.mean([answers.seconds for answers in of_way])),
        )
        for way, of_way in found.items()
    ]
    result = StrategyComparison(
        verdict=rank_strategies(ways, CALLED),
        evaluated_on=judged_on,
        descriptions={way: about[way] for way in found},
        model_folders={way: str(out / ("probe" if way == "probe" else f"{way}-0")) for way in found},
        notes=ready["fine-tune"].notes,
    )
    atomic_write(out / "comparison.json", json.dumps(result.as_dict(), indent=2) + "\n")
    return result


def check_comparison(tuned: Recipe, seeds: int) -> None:
    """What must be so before anything is read or made."""
    if not tuned.init_from:
        raise VitralError("--compare needs a checkpoint to begin from", "name it with --init")
    if seeds < 1:
        raise VitralError(f"seeds must be at least 1, not {seeds}", "leave --seeds out for 3")


def from_scratch(tuned: Recipe) -> Recipe:
    """What one would train without the checkpoint: the recipe for this data, on the same split and the same machine."""
    plan = resolve_recipe(tuned.data.name, None)
    same = {name: getattr(tuned, name) for name in ("device", "precision", "compile", "keep", "checkpoint_minutes")}
    if tuned.epochs != get_recipe("folder-finetune").epochs:  # somebody asked for another number: it holds for both
        same["epochs"] = tuned.epochs
    return replace(plan, data=replace(plan.data, validation=tuned.data.validation), **same)


def keep_settings(out: Path, plans: dict[str, Recipe]) -> None:
    """Write down what is compared here, or find that it is the same as before."""
    settings = {way: plan.result_fields() for way, plan in plans.items()}
    file = out / "compare.json"
    try:
        if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != settings:
            raise VitralError(f"{out} holds a comparison of something else", "choose another --out")
        if not file.is_file():
            Run.check_available(out)
            out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise VitralError(f"cannot use {out}: {error}", "choose another --out") from error
    atomic_write(file, json.dumps(settings, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A training's images with those that judge kept apart."""

    ready: TrainingSetup
    dataset: Dataset  # without the judges
    judges: Split
    judged_on: str


def apart(ready: TrainingSetup) -> Apart:
    dataset = ready.dataset
    if len(dataset.test):
        judges = resize_split(dataset.test, ready.preprocessing)
        return Apart(ready=ready, dataset=dataset, judges=judges, judged_on=f"{len(judges):,} test images")
    chosen = torch.from_numpy(stratified_holdout(dataset.train.labels.numpy(), CHOOSING, seed=VALIDATION_SEED))
    images, labels = dataset.train.images, dataset.train.labels
    choosing = resize_split(Split(images=select_images(images, chosen), labels=labels[chosen]), ready.preprocessing)
    rest = Split(images=select_images(images, ~chosen), labels=labels[~chosen])
    return Apart(
        ready=ready,
        dataset=replace(dataset, train=rest, validation=choosing),
        judges=dataset.validation,
        judged_on=f"{len(dataset.validation):,} validation images; {len(choosing)} training images chose the epoch",
    )


def described(plan: Recipe, way: str) -> str:
    m = plan.model
    with torch.device("meta"):
        millions = sum(p.numel() for p in VARIANTS[plan.variant](m).parameters()) / 1e6
    how = "frozen, head fitted" if way == "probe" else f"{plan.epochs} epoch{'s' if plan.epochs > 1 else ''}"
    return f"{'×'.join(map(str, m.image_size))}/{m.patch_size}, {millions:.1f} M, {how}"


def train_part(part: Apart, folder: Path, seed: int, watch: Callback | None) -> tuple[ViT, float]:
    """A run like any other, gone on with where it was interrupted; the model and its seconds, all sittings together."""
    plan = replace(part.ready.recipe, seed=seed)
    run = Run(folder)
    if not run.recipe_file.is_file():
        run = Run.create(folder.parent, folder.name, folder)
        atomic_write(run.recipe_file, plan.to_toml())
    hardware = select_hardware(
        device=plan.device,
        precision=plan.precision,
        compile=plan.compile,
        width=plan.model.width,
        steps=plan.epochs * max(len(part.dataset.train) // plan.batch_size, 1),
        from_scratch=not plan.init_from,
    )
    with run.lock():
        fit(plan, part.dataset, part.ready.preprocessing, run, hardware, watch, part.ready.initial_weights)
    return load_model(folder)[0], float(run.load_metrics()[-1]["seconds"])


def probe_part(part: Apart, folder: Path) -> tuple[ViT, float]:
    """The checkpoint with a linear head fitted to the features of all images but the judges, and its seconds."""
    begun = time.perf_counter()
    plan, seen, dataset = part.ready.recipe, part.ready.preprocessing, part.dataset
    assert part.ready.initial_weights is not None  # compare() refuses a recipe without a checkpoint
    model = VARIANTS[plan.variant](plan.model)
    model.load_state_dict(part.ready.initial_weights)
    hardware = select_hardware(device=plan.device, precision="fp32", compile="no")
    model.to(hardware.device)
    known = [resize_split(dataset.train, seen), dataset.validation]
    features = torch.cat([compute_features(model, split.images, seen, hardware) for split in known])
    labels = torch.cat([split.labels for split in known])
    put_head(model.cpu(), *fit_linear_head((features, labels), len(dataset.classes)))
    card = ModelConfig(
        architecture=plan.model,
        preprocessing=seen,
        classes=dataset.classes,
        trained_on=dataset.name,
        epoch=0,
        variant=plan.variant,
    )
    save_model(folder / "model", model.eval(), card)
    return model, time.perf_counter() - begun


@torch.no_grad()
def put_head(model: ViT, weight_KE: Tensor, bias_K: Tensor) -> None:
    """Into the one head there is, or shared out between two whose mean is the answer."""
    heads = [module for name, module in model.named_modules() if re.fullmatch(r"head\.(\w+\.)?out", name)]
    for head, weight in zip(heads, weight_KE.chunk(len(heads), dim=1), strict=True):
        assert isinstance(head, torch.nn.Linear)
        head.weight.copy_(weight * len(heads))
        head.bias.copy_(bias_K)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    right: np.ndarray[Any, Any]  # M booleans
    seconds: float


def ask(model: ViT, part: Apart, folder: Path, seconds: float) -> Answers:
    hardware = select_hardware(device=part.ready.recipe.device, precision="fp32", compile="no")
    logits = compute_logits(model.to(hardware.device).eval(), part.judges.images, part.ready.preprocessing, hardware)
    right = (logits.argmax(dim=1).cpu() == part.judges.labels).numpy()
    told = {"seconds": round(seconds, 2), "data": part.dataset.fingerprint, "right": right.astype(int).tolist()}
    atomic_write(folder / "answers.json", json.dumps(told) + "\n")
    return Answers(right=right, seconds=seconds)


def read_answers(folder: Path, part: Apart) -> Answers | None:
    """Of a part that is done; None where there is none, or the images have changed since."""
    try:
        told = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
        right = np.array(told["right"], dtype=bool)
        same = told["data"] == part.dataset.fingerprint and len(right) == len(part.judges)
        return Answers(right=right, seconds=float(told["seconds"])) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
