"""Turn a finished run into a bundled model: src/vitral/bundled/NAME with bf16 weights and a model card.

    python tools/bundle_model.py runs/cifar10-97-1116-a3 [--ood cifar100]

NAME is the dataset of the run. Every figure in the card was recorded by the run or is measured here, on the whole test
set, with the weights that are shipped. The run is refused if rounding changes the accuracy, if its recorded accuracy
cannot be reproduced, or if all bundled models together become too large for the package.
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

from vitral import __version__, bundled
from vitral.errors import VitralError, unknown_name_error
from vitral.evaluation.calibration import fit_calibration
from vitral.evaluation.data import load_eval_target
from vitral.evaluation.ood import load_ood_images
from vitral.evaluation.report import build_report
from vitral.evaluation.tta import TTA_DESCRIPTIONS
from vitral.recipes.schema import read_recipe
from vitral.reporting.hub.model_card import RunRecord, results_section, training_section
from vitral.runs.model_io import load_model, load_model_config, save_model_config, save_weights
from vitral.runs.run import Run
from vitral.utils.atomic import atomic_write
from vitral.weights.checkpoint import describe_architecture
from vitral.weights.preprocessing import describe_preprocessing

MAX_BYTES = 12_000_000  # of all bundled models
ROUNDING_TOLERANCE = 0.001  # change of the accuracy that rounding may cause
TTA_TOLERANCE = 0.02  # difference to the recorded accuracy if the run evaluated with test-time augmentation
HALF_OF_TEST = "every other test image"


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What a run does not record about its dataset."""

    images: str
    source: str
    limitations: tuple[str, ...]


DATASETS = {
    "mnist": DatasetInfo(
        images="handwritten digits, light on black, centred, 28×28 pixels, greyscale",
        source=(
            "MNIST by Yann LeCun, Corinna Cortes and Christopher Burges, derived from NIST special databases 1 and 3 "
            "(Gradient-based learning applied to document recognition, 1998). Its page does not name a licence; the "
            "Keras documentation says CC BY-SA 3.0. This package contains none of its images"
        ),
        limitations=(
            "Digits in dark ink on light paper. `vitral predict` reports if the inverted image would be recognised",
            "Several digits in one image, letters, printed or seven-segment digits. Crop and centre a single digit",
            "Unchecked use wherever a wrong digit is costly",
        ),
    ),
    "fashion-mnist": DatasetInfo(
        images="product images of clothes, light on black, 28×28 pixels, greyscale",
        source=(
            "Fashion-MNIST by Zalando Research (arXiv 1708.07747), MIT licence. This package contains none of its "
            "images"
        ),
        limitations=(
            "Photographs of people wearing clothes, or of clothes on a light background",
            "Any decision about people",
        ),
    ),
    "cifar10": DatasetInfo(
        images="colour photographs of single objects, 32×32 pixels",
        source=(
            "CIFAR-10 by Alex Krizhevsky, Vinod Nair and Geoffrey Hinton (Learning multiple layers of features from "
            "tiny images, 2009): images from the web, labelled by hand. Its page does not name a licence and asks for "
            "this citation. The images were taken from 80 Million Tiny Images, which was withdrawn in 2020 because of "
            "offensive labels; these ten classes have none. This package contains none of its images"
        ),
        limitations=(
            "Objects of other classes: the prediction is the most similar of the ten classes",
            "Small objects in large photographs: the image is resized to 32×32 pixels and cropped to its centre",
            "Counting, localisation, fine-grained classes such as breeds, and any use in which errors cause harm",
        ),
    ),
}  # fmt: skip


def bundle(run: Run, ood_data: str | None = None) -> tuple[Path, str]:
    """Create the bundled model; returns its folder and a summary for the user."""
    recipe = read_recipe(run.recipe_file)
    if (name := recipe.data.name) not in DATASETS:
        raise unknown_name_error("dataset with a documented source and licence", name, DATASETS)
    if not run.has_model or not run.test_file.is_file():
        raise VitralError(f"{run} is not finished", f"Resume it with: vitral train --resume {run}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        round_to_bf16(run, folder)
        atomic_write(folder / "recipe.toml", recipe.with_overrides({"device": "auto"}).to_toml())
        atomic_write(folder / "environment.json", json.dumps(public_environment(run), indent=2) + "\n")
        atomic_write(folder / "metrics.jsonl", run.metrics_file.read_bytes())
        atomic_write(folder / "test.json", json.dumps(measure(run, folder, ood_data), indent=1) + "\n")
        atomic_write(folder / "README.md", model_card(folder))
        others = [bundled.BUNDLED_DIR / other for other in bundled.model_names() if other != name]
        total = sum(map(folder_bytes, [*others, folder]))
        if total > MAX_BYTES:
            raise VitralError(
                f"the bundled models would have {total / 1e6:.1f} MB; the limit is {MAX_BYTES / 1e6:.0f} MB",
                "Train a narrower or shallower model",
            )
        target = bundled.BUNDLED_DIR / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    test = RunRecord.load(target).test
    details = test["bundled"]
    return target, (
        f"{target}: {test['top1']:.2%} on {test['images']:,} test images ({details['top1_before_rounding']:.2%} "
        f"before rounding; {details['predictions_changed']} predictions changed)\n"
        f"Calibrated on {details['calibrated_on']}; {folder_bytes(target) / 1e6:.2f} MB, all bundled models "
        f"{total / 1e6:.2f} MB"
    )


def round_to_bf16(run: Run, folder: Path) -> None:
    model, config = load_model(run.path)
    (folder / "model").mkdir(parents=True)
    weights = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    save_weights(folder / "model" / "weights.safetensors", weights)
    save_model_config(folder / "model", config)


def measure(run: Run, folder: Path, ood_data: str | None) -> dict[str, Any]:
    """Evaluate the run and the rounded model on the whole test set; returns the content of test.json.

    Without validation images, the calibration is fitted on every other test image and evaluated on the others.
    """
    original, rounded = (load_eval_target(path, None, "test", engine="reference") for path in (run.path, folder))
    predictor, labels = rounded.predictor, rounded.split.labels
    original_logits = original.predictor.logits_distributed(original.split.images)
    logits = predictor.logits_distributed(rounded.split.images)
    original_top1 = float((original_logits.argmax(dim=1) == labels).double().mean())
    top1 = float((logits.argmax(dim=1) == labels).double().mean())
    recorded = recorded_result(run)
    tolerance = ROUNDING_TOLERANCE if recorded["tta"] == "none" else TTA_TOLERANCE
    check_accuracy(f"{run}: accuracy here and as recorded", original_top1, recorded["top1"], tolerance)
    check_accuracy(f"{run}: accuracy in bf16 and in fp32", top1, original_top1, ROUNDING_TOLERANCE)
    calibration, held_out = predictor.model_config.calibration, slice(None)
    if not len(rounded.dataset.validation):
        calibration = replace(fit_calibration(logits[::2], labels[::2]), fitted_on=HALF_OF_TEST)
        held_out = slice(1, None, 2)
        save_model_config(folder / "model", replace(predictor.model_config, calibration=calibration))
    report = build_report(logits, labels, predictor.classes, calibration, engine=predictor.engine.info())
    held_out_report = build_report(logits[held_out], labels[held_out], predictor.classes, calibration)
    ece = held_out_report.headline.ece
    details: dict[str, Any] = {
        "weights": "bf16",
        "top1_before_rounding": original_top1,
        "predictions_changed": int((original_logits.argmax(dim=1) != logits.argmax(dim=1)).sum()),
        "calibrated_on": calibration.fitted_on,
        "held_out_images": held_out_report.images,
        "ece": {"value": ece.value, "low": ece.low, "high": ece.high},
        "uncalibrated_ece": held_out_report.uncalibrated.ece,
        "false_positive_rate": float(calibration.is_ood(logits[held_out]).double().mean()),
        "recorded": recorded,
    }
    if ood_data is not None:
        images = load_ood_images(ood_data, predictor)
        detection_rate = float(calibration.is_ood(predictor.logits(images)).double().mean())
        details["ood"] = {"dataset": ood_data, "images": len(images), "detection_rate": detection_rate}
    return report.as_dict() | {"bundled": details}


def check_accuracy(what: str, actual: float, expected: float, tolerance: float) -> None:
    if abs(actual - expected) > tolerance:
        raise VitralError(f"{what} differ: {actual:.2%} and {expected:.2%}", f"The tolerance is {tolerance:.1%}")


def recorded_result(run: Run) -> dict[str, Any]:
    """The result on the test set that the run recorded."""
    test = json.loads(run.test_file.read_text(encoding="utf-8"))
    return {name: test[name] for name in ("top1", "top1_low", "top1_high", "images")} | {"tta": test.get("tta", "none")}


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def public_environment(run: Run) -> dict[str, Any]:
    """environment.json without paths and host names of the machine."""
    environment: dict[str, Any] = json.loads(run.environment_file.read_text(encoding="utf-8"))
    public = {name: value for name, value in environment.items() if name not in ("launch_id", "platform")}
    return public | {"command": public_command(str(environment.get("command", "")))}


def public_command(command: str) -> str | None:
    """The training command without --out, or None if it depends on files of the machine."""
    program, *arguments = shlex.split(command) or [""]
    if Path(program).name not in ("vitral", "__main__.py") or arguments[:1] != ["train"]:
        return None
    kept: list[str] = []
    for argument in arguments:
        if kept[-1:] == ["--out"]:
            kept.pop()
        elif not argument.startswith("--out="):
            kept.append(argument)
    if any("/" in argument or argument.endswith(".toml") for argument in kept):
        return None
    return shlex.join(["vitral", *kept])


def model_card(folder: Path) -> str:
    """README.md, from the other files of a bundled model's folder."""
    name, record = folder.name, RunRecord.load(folder)
    dataset, config = DATASETS[name], load_model_config(folder / "model" / "config.json")
    command = record.environment.get("command")
    lines = [
        f"# {name}",
        "",
        f"A bundled Vision Transformer that classifies images into {len(config.classes)} classes: "
        f"{', '.join(config.classes)}. Training images: {dataset.images}.",
        "",
        f"    vitral predict {name} photo.jpg",
        f"    vitral explain {name} photo.jpg",
        f"    vitral serve {name}",
        "",
        *results_section(record),
        *calibration_lines(record.test),
        *training_section(config, record, "recipe.toml")[:-1],
        *([f"- Command: `{command}`"] if command else []),
        f'- Repeat with: `vitral train --recipe "$(vitral models where {name})/recipe.toml"`',
        "",
        "## Model",
        "",
        f"- {describe_architecture(config.architecture, config.variant)}",
        f"- Preprocessing: {describe_preprocessing(config.preprocessing)}",
        f"- {folder_bytes(folder / 'model') / 1e6:.2f} MB; weights stored in bf16, computed in fp32",
        "",
        "## Not intended for",
        "",
        *(f"- {limitation}" for limitation in dataset.limitations),
        "",
        "## Licence and data",
        "",
        "The weights are licensed under Apache-2.0, like vitral.",
        f"{dataset.source}.",
        "",
        f"Created with vitral {__version__}, {time.strftime('%Y-%m-%d')}.",
    ]
    return "\n".join(lines) + "\n"


def calibration_lines(test: dict[str, Any]) -> list[str]:
    """Calibration, OOD detection and the effect of rounding."""
    details = test["bundled"]
    ece, recorded = details["ece"], details["recorded"]
    tta = TTA_DESCRIPTIONS[recorded["tta"]]
    fitted_on = details["calibrated_on"]
    fitted_on = f"{fitted_on}, evaluated on the others" if fitted_on == HALF_OF_TEST else f"the {fitted_on} images"
    lines = [
        f"- Expected calibration error {ece['value']:.2%} (95% interval {100 * ece['low']:.2f}-{ece['high']:.2%}), "
        f"{details['uncalibrated_ece']:.2%} before calibration; temperature {test['temperature']:.3f} fitted on "
        f"{fitted_on}",
        f"- OOD detection: {details['false_positive_rate']:.1%} of {details['held_out_images']:,} test images are "
        "rejected as unknown",
    ]
    if ood := details.get("ood"):
        lines[-1] += f", and {ood['detection_rate']:.1%} of {ood['images']:,} images of {ood['dataset']}"
    return [
        *lines,
        f"- Accuracy before rounding to bf16: {details['top1_before_rounding']:.2%}; rounding changed "
        f"{details['predictions_changed']} of {test['images']:,} predictions",
        f"- Accuracy recorded by the run: {recorded['top1']:.2%}" + (f" ({tta})" if tta else ""),
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="finished run folder")
    parser.add_argument("--ood", metavar="DATA", help="dataset of other images, to measure how many are rejected")
    arguments = parser.parse_args()
    try:
        _, summary = bundle(Run.open(arguments.run), arguments.ood)
    except VitralError as error:
        print(f"error: {error.what}\n       {error.hint}", file=sys.stderr)
        return 2
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
