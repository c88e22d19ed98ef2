"""A finished run becomes a model that comes with vitral: src/vitral/box/NAME, weights in bf16, with a card.

    python tools/bundled.py runs/cifar10-97-1116-a3 [--unknown cifar100]

NAME is that of the set it was trained on. Nothing is typed by hand: what the card says was recorded by the run, or is
measured here, on the whole test set, with the weights that are shipped. There is no new model where rounding moved the
accuracy, where the run's own figure is not found again, or where all models together are larger than the package bears.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral import bundled
from vitral.errors import VitralError, unknown_name_error
from vitral.evaluation import evaluate as judge
from vitral.evaluation.calibration import fit_calibration
from vitral.evaluation.data import load_eval_target
from vitral.evaluation.report import EvaluationReport, build_report
from vitral.evaluation.tta import TTA_DESCRIPTIONS
from vitral.recipes.schema import read_recipe
from vitral.reporting.hub.model_card import RunRecord, results_section, training_section
from vitral.runs.model_io import find_model_dir, load_model, load_model_config, save_model_config, save_weights
from vitral.runs.run import Run
from vitral.utils.atomic import atomic_write
from vitral.weights.checkpoint import described
from vitral.weights.preprocessing import seen

MOST_BYTES = 12_000_000  # of all models in the box
MOVED = 0.001  # share of the test images: more is not rounding
OTHER_VIEWS = 0.02  # the same, where the run averaged several views of an image and one is asked here


@dataclass(frozen=True, kw_only=True)
class About:
    """What no run can know of the images it learned from."""

    images: str
    source: str
    not_for: tuple[str, ...]


ABOUT = {
    "mnist": About(
        images="handwritten digits, light on black, centred, 28×28 pixels, gray",
        source=(
            "MNIST, by Yann LeCun, Corinna Cortes and Christopher Burges, from NIST's special databases 1 and 3 "
            "(Gradient-based learning applied to document recognition, 1998). Its page names no licence; Keras's "
            "documentation says CC BY-SA 3.0. No image of it is in this package"
        ),
        not_for=(
            "digits as they stand on paper: dark on light. `vitral predict` says when the negative is what it knows",
            "several digits at once, letters, printed or seven-segment digits: cut out one digit and centre it",
            "anything where a wrong digit costs money or worse, without a check",
        ),
    ),
    "fashion-mnist": About(
        images="product pictures of clothes, light on black, 28×28 pixels, gray",
        source=(
            "Fashion-MNIST, by Zalando Research (arXiv 1708.07747), MIT licence. No image of it is in this package"
        ),
        not_for=(
            "photographs of people wearing clothes, or of clothes on a light ground",
            "any decision about people",
        ),
    ),
    "cifar10": About(
        images="colour photographs of one thing each, 32×32 pixels",
        source=(
            "CIFAR-10, by Alex Krizhevsky, Vinod Nair and Geoffrey Hinton (Learning multiple layers of features from "
            "tiny images, 2009): pictures found on the web, labelled by hand. Its page names no licence and asks for "
            "that citation. They were taken from 80 Million Tiny Images, which was withdrawn in 2020 for offensive "
            "labels; these ten classes have none. No image of it is in this package"
        ),
        not_for=(
            "anything but the ten classes: of other things it names the nearest",
            "small things in large photographs: a picture is scaled to 32×32 pixels, its middle cut out",
            "counting, finding, or telling breeds and makes apart; anything where a mistake does harm",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the test images said of the weights that are shipped."""

    all: EvaluationReport
    apart: EvaluationReport  # on images that temperature and threshold were not fitted to
    fitted_on: str
    exact: float  # accuracy before rounding
    changed: int  # answers, by rounding
    recorded: dict[str, Any]  # by the run
    false_positive_rate: float  # share of `apart` that is called unknown
    others: str = ""  # images of other things,
    other_images: int = 0  # so many,
    noticed: float = 0.0  # and the share of them that is called unknown


def make(run: Run, against: str | None = None) -> tuple[Path, str]:
    """The folder of the new model, and what happened in a few lines."""
    plan = read_recipe(run.recipe_file)
    if (name := plan.data.name) not in ABOUT:
        raise unknown_name_error("set with something known about its source and its licence", name, ABOUT)
    if not run.has_model or not run.test_file.is_file():
        raise VitralError(f"{run} is not finished", f"vitral train --resume {run}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        round_to_bf16(run, folder)
        atomic_write(folder / "recipe.toml", plan.with_overrides({"device": "auto"}).to_toml())
        atomic_write(folder / "environment.json", json.dumps(environment(run), indent=2) + "\n")
        atomic_write(folder / "metrics.jsonl", run.metrics_file.read_bytes())
        found = measure(run, folder, against)
        atomic_write(folder / "test.json", json.dumps(as_dict(found), indent=1) + "\n")
        atomic_write(folder / "README.md", card(name, folder, found))
        size = sum(size_of(bundled.BUNDLED_DIR / other) for other in bundled.model_names() if other != name) + size_of(folder)
        if size > MOST_BYTES:
            raise VitralError(
                f"with this model the box holds {size / 1e6:.1f} MB; the most is {MOST_BYTES / 1e6:.0f}",
                "train a narrower or shallower one",
            )
        place = bundled.BUNDLED_DIR / name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
    return place, (
        f"{place}: {found.all.top1:.2%} of {found.all.images:,} test images "
        f"(before rounding {found.exact:.2%}; {found.changed} answers changed)\n"
        f"calibrated on {found.fitted_on}; {size_of(place) / 1e6:.2f} MB, the whole box {size / 1e6:.2f} MB"
    )


def measure(run: Run, folder: Path, against: str | None) -> Found:
    """Ask both models the whole test set. Where nothing was held out, half of it sets the probabilities right."""
    before, after = (load_eval_target(path, None, "test") for path in (run.path, folder))
    predictor, labels = after.predictor, after.split.labels
    exact_logits = before.predictor.logits_distributed(before.split.images)
    logits = predictor.logits_distributed(after.split.images)
    exact = float((exact_logits.argmax(dim=1) == labels).double().mean())
    recorded = summary_of(json.loads(run.test_file.read_text(encoding="utf-8")))
    most = MOVED if recorded["views"] == "one" else OTHER_VIEWS
    check(f"{run}: its weights here, against what it recorded", exact, recorded["top1"], most)
    rounded = float((logits.argmax(dim=1) == labels).double().mean())
    check(f"{run}: rounded to bf16, against fp32", rounded, exact, MOVED)
    apart, fitted_on = slice(None), "the validation images"
    calibration = predictor.model_config.calibration
    if not len(after.dataset.validation):
        calibration = replace(fit_calibration(logits[::2], labels[::2]), fitted_on="every other test image")
        apart, fitted_on = slice(1, None, 2), f"{calibration.fitted_on}; calibration is judged on the rest"
        save_model_config(folder / "model", replace(predictor.model_config, calibration=calibration))
    strange = judge.load_ood_images(against, predictor) if against is not None else logits.new_empty(0)
    called = calibration.is_ood(predictor.logits(strange)) if len(strange) else logits.new_zeros(1)
    return Found(
        all=build_report(logits, labels, predictor.classes, calibration),
        apart=build_report(logits[apart], labels[apart], predictor.classes, calibration),
        fitted_on=fitted_on,
        exact=exact,
        changed=int((exact_logits.argmax(dim=1) != logits.argmax(dim=1)).sum()),
        recorded=recorded,
        false_positive_rate=float(calibration.is_ood(logits[apart]).double().mean()),
        others=against or "",
        other_images=len(strange),
        noticed=float(called.double().mean()),
    )


def as_dict(found: Found) -> dict[str, Any]:
    """test.json: as a run has it, and how these weights came about."""
    box = {"weights": "bf16", "top1_before_rounding": found.exact, "answers_changed": found.changed}
    return found.all.as_dict() | {"box": box | {"calibrated_on": found.fitted_on, "recorded": found.recorded}}


def round_to_bf16(run: Run, folder: Path) -> None:
    model, found = load_model(run.path)
    (folder / "model").mkdir(parents=True)
    weights = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_weights(folder / "model" / "weights.safetensors", weights)
    save_model_config(folder / "model", found)


def check(what: str, found: float, wanted: float, most: float) -> None:
    if abs(found - wanted) > most:
        raise VitralError(f"{what}: {found:.2%} instead of {wanted:.2%}", f"at most {most:.1%} apart is rounding")


def summary_of(recorded: dict[str, Any]) -> dict[str, Any]:
    """What the run itself said of its test images."""
    return {name: recorded[name] for name in ("top1", "top1_low", "top1_high", "images")} | {
        "views": recorded.get("views", "one")
    }


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def environment(run: Run) -> dict[str, Any]:
    """environment.json, without the paths and the host of the machine it was made on."""
    told: dict[str, Any] = json.loads(run.environment_file.read_text(encoding="utf-8"))
    return {name: value for name, value in told.items() if name not in ("command", "launch", "platform")} | {
        "command": command(str(told.get("command", "")))
    }


def command(told: str) -> str:
    """What was typed, if others can type it too; else nothing."""
    program, *words = shlex.split(told) or [""]
    if Path(program).name not in ("vitral", "__main__.py") or words[:1] != ["train"]:
        return ""
    kept: list[str] = []
    for word in words:
        if kept[-1:] == ["--out"]:
            kept.pop()
        elif not word.startswith("--out="):
            kept.append(word)
    return "" if any("/" in word or word.endswith(".toml") for word in kept) else shlex.join(["vitral", *kept])


def card(name: str, folder: Path, found: Found) -> str:
    """README.md."""
    about, model = ABOUT[name], load_model_config(find_model_dir(folder) / "config.json")
    told = RunRecord.load(folder)
    where = f'"$(vitral box where {name})/recipe.toml"'
    typed = told.environment.get("command")
    repeat = [f"- begun with `{typed}`" if typed else "", f"- repeat it: `vitral train --recipe {where}`"]
    lines = [
        f"# {name}",
        "",
        f"A Vision Transformer that comes with vitral and tells {len(model.classes)} classes apart: "
        f"{', '.join(model.classes)}. It learned from {about.images}.",
        "",
        f"    vitral predict {name} photo.jpg",
        f"    vitral explain {name} photo.jpg",
        f"    vitral serve {name}",
        "",
        *results_section(told),
        *measured(found),
        *training_section(model, told, "recipe.toml")[:-1],
        *filter(None, repeat),
        "",
        "## The model",
        "",
        f"- {described(model.architecture, model.variant)}",
        f"- sees images so: {seen(model.preprocessing)}",
        f"- {size_of(folder / 'model') / 1e6:.2f} MB, weights in bf16, computed with in fp32",
        "",
        "## What it is not for",
        "",
        *(f"- {what}" for what in about.not_for),
        "",
        "## Licence and data",
        "",
        "The weights are Apache-2.0, like vitral.",
        f"{about.source}.",
        "",
        f"Written by vitral {__version__}, {time.strftime('%Y-%m-%d')}.",
    ]
    return "\n".join(lines) + "\n"


def measured(found: Found) -> list[str]:
    """Calibration, unknown images, rounding."""
    ece, recorded = found.apart.headline.ece, found.recorded
    views = TTA_DESCRIPTIONS[recorded["views"]]
    lines = [
        f"- calibration error {ece.value:.2%} ({ece.low:.2%} – {ece.high:.2%}), {found.apart.uncalibrated.ece:.2%} before its "
        f"probabilities were set right: temperature {found.all.temperature:.3f}, fitted on {found.fitted_on}",
        f"- it calls {found.false_positive_rate:.1%} of {found.apart.images:,} test images unknown",
    ]
    if found.others:
        lines[-1] += f", and {found.noticed:.1%} of {found.other_images:,} images of {found.others}"
    return [
        *lines,
        f"- with the weights before rounding: {found.exact:.2%}; rounding changed the answer for {found.changed} of "
        f"{found.all.images:,} images",
        f"- the run itself recorded {recorded['top1']:.2%}" + (f", {views}" if views else ""),
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="a finished run folder")
    parser.add_argument("--unknown", help="a set of other things, to measure whether they are noticed")
    chosen = parser.parse_args()
    try:
        _, told = make(Run.open(chosen.run), chosen.unknown)
    except VitralError as error:
        print(f"error: {error.what}\n       {error.hint}", file=sys.stderr)
        return 2
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
