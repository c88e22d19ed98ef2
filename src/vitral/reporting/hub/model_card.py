"""The model card: a README.md with metadata for the Hugging Face hub.

The metadata between two lines of dashes is YAML. JSON is valid YAML, so it is written with the json module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral.errors import VitralError, error_reason
from vitral.evaluation.metrics import Metrics
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.model_io import ModelConfig, published_name
from vitral.runs.run import Run
from vitral.utils.intervals import Interval
from vitral.utils.json_toml import dump_json, read_json_object
from vitral.utils.serialization import field_names, from_dict, to_dict
from vitral.weights.checkpoint import describe_architecture
from vitral.weights.preprocessing import describe_preprocessing

RECIPE_FILE = "training.toml"  # the name recipe.toml would mark the folder as a run folder
MAX_NAMED_CLASSES = 12
MAX_TABLE_CLASSES = 100
LOADED_BY = {  # file format to the libraries that load it, the simplest first
    "timm": ("vitral", "timm", "transformers"),
    "transformers": ("vitral", "transformers"),
    "vitral": ("vitral",),
}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Test results, recipe and environment of a run folder; empty for a model without run."""

    test: dict[str, Any]
    recipe: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        run = Run(path)
        recipe = read_recipe(run.recipe_file) if run.recipe_file.is_file() else None
        return cls(
            test=_load_test(run.test_file),
            recipe=to_dict(_published_recipe(recipe)) if recipe else {},
            environment=run.load_environment(),
        )

    @property
    def split(self) -> str:
        return str(self.test.get("split", "test"))

    @property
    def init_from(self) -> str:
        return str(self.recipe.get("init_from", ""))


def _published_recipe(recipe: Recipe) -> Recipe:
    """A recipe without the paths of this machine."""
    names = {"data.name": published_name(recipe.data.name)}
    return recipe.with_overrides(names | ({"init_from": published_name(recipe.init_from)} if recipe.init_from else {}))


def _load_test(file: Path) -> dict[str, Any]:
    """The content of test.json, whose metrics are complete; empty if there is no such file."""
    if not file.is_file():
        return {}
    hint = "Delete the file to publish the model without results"
    try:
        test = read_json_object(file)
        metrics = {name: test[name] for name in field_names(Metrics) if test.get(name) is not None}
        from_dict(Metrics, {"loss": math.nan} | metrics | {"confusion": ()})  # the card does not show the matrix
        if (plain := test.get("accuracy_without_tta")) is not None:
            from_dict(Interval, plain)
    except (OSError, ValueError) as error:
        raise VitralError(f"cannot read {file}: {error_reason(error)}", hint) from error
    except VitralError as error:
        raise VitralError(f"{file}: {error.what}", hint) from error
    return test


def render_model_card(
    config: ModelConfig,
    record: RunRecord,
    repository: str,
    family: str,
    notes: Sequence[str] = (),
    license: str | None = None,
) -> str:
    """The complete README.md."""
    metadata = {key: value for key, value in _metadata(config, record, repository, family, license).items() if value}
    lines = ["---", *(f"{key}: {dump_json(value, ensure_ascii=False)}" for key, value in metadata.items()), "---", ""]
    names = ", ".join(config.classes[:MAX_NAMED_CLASSES])
    if len(config.classes) > MAX_NAMED_CLASSES:
        names += f" and {len(config.classes) - MAX_NAMED_CLASSES} more"
    lines += [
        f"# {repository.split('/')[-1]}",
        "",
        f"A Vision Transformer that classifies images into {len(config.classes)} classes: {names}.",
        "",
        *results_section(record),
        *training_section(config, record, RECIPE_FILE),
        "## Model",
        "",
        f"- {describe_architecture(config.architecture, config.variant)}",
        f"- Preprocessing: {describe_preprocessing(config.preprocessing)}",
    ]
    if config.calibration.temperature != 1:
        lines.append(
            f"- Calibrated probabilities: softmax(logits / {config.calibration.temperature:.4g}), temperature fitted "
            f"on the {config.calibration.fitted_on} images"
        )
    lines += [f"- {note}" for note in notes]
    lines += ["", "## Usage", ""]
    for library in LOADED_BY[family]:
        lines += [f"With {library}:", "", "```python", *_usage(library, repository), "```", ""]
    lines.append(f"Created with vitral {__version__}.")
    return "\n".join(lines) + "\n"


def _metadata(
    config: ModelConfig, record: RunRecord, repository: str, family: str, license: str | None
) -> dict[str, Any]:
    init_from = record.init_from
    metadata: dict[str, Any] = {
        "license": license,
        "library_name": LOADED_BY[family][-1] if family != "timm" else "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "vision-transformer", "vitral", *(["timm"] if family == "timm" else [])],
        "base_model": init_from.removeprefix("hf:").split("@")[0] if init_from.startswith("hf:") else None,
    }
    if record.test:
        plain = record.test.get("accuracy_without_tta") or {"value": record.test["top1"]}
        metric = {"type": "accuracy", "name": "top-1 accuracy", "value": round(plain["value"], 6)}
        dataset = {"name": _dataset_name(config, record), "type": "image-folder", "split": record.split}
        task = {"type": "image-classification", "name": "image classification"}
        metadata["model-index"] = [
            {"name": repository.split("/")[-1], "results": [{"task": task, "dataset": dataset, "metrics": [metric]}]}
        ]
    return metadata


def _dataset_name(config: ModelConfig, record: RunRecord) -> str:
    return str(record.recipe["data"]["name"]) if record.recipe else published_name(config.trained_on)


def results_section(record: RunRecord) -> list[str]:
    test = record.test
    if not test:
        return ["No evaluation results are available.", ""]
    calibrated_on_test = "every other test image" in str(_nested(test, "bundled", "calibrated_on"))
    caveats = {
        "test": " (half of them were also used for calibration)" if calibrated_on_test else " (evaluated once)",
        "validation": " (also used to select the best epoch, so slightly optimistic)",
    }
    with_tta = "" if test.get("tta", "none") == "none" else " with test-time augmentation"
    lines = [
        "## Evaluation results",
        "",
        f"{test['images']:,} {record.split} images{caveats.get(record.split, '')}:",
        "",
        "| Metric | Value | 95% interval |",
        "|---|---|---|",
        f"| Top-1 accuracy{with_tta} | {test['top1']:.2%} | {100 * test['top1_low']:.2f}-{test['top1_high']:.2%} |",
        *(
            [f"| Top-1 accuracy | {plain['value']:.2%} | {100 * plain['low']:.2f}-{plain['high']:.2%} |"]
            if (plain := test.get("accuracy_without_tta"))
            else []
        ),
        *([f"| Top-5 accuracy | {test['top5']:.2%} | |"] if len(test["per_class"]) > 5 else []),
        *([f"| Cross-entropy (uncalibrated) | {test['loss']:.4f} | |"] if test["loss"] is not None else []),
        "",
    ]
    if len(test["per_class"]) <= MAX_TABLE_CLASSES:
        lines += ["| Class | Precision | Recall | Images |", "|---|---|---|---|"]
        lines += [
            f"| {row['name']} | {row['precision']:.2%} | {row['recall']:.2%} | {row['support']:,} |"
            for row in test["per_class"]
        ]
        lines.append("")
    return lines


def training_section(config: ModelConfig, record: RunRecord, recipe_file: str) -> list[str]:
    recipe, environment = record.recipe, record.environment
    if not recipe:
        return []
    optim, fingerprint = recipe["optim"], _nested(environment, "data", "fingerprint")
    has_validation = recipe["data"]["validation"]
    selection = "best on the validation images" if has_validation else "last epoch; no validation images"
    tuned = f", tuned: {tune}" if (tune := recipe.get("tune", "full")) != "full" else ""
    lines = [
        "## Training",
        "",
        f"- Dataset: {_dataset_name(config, record)}" + (f" (fingerprint {fingerprint})" if fingerprint else ""),
        f"- Initialised from {record.init_from}" if record.init_from else "- Trained from scratch",
        f"- Recipe {recipe['name']}: {optim['name']}, lr {optim['lr']}, {recipe['epochs']} epochs, "
        f"batch size {recipe['batch_size']}, {optim['schedule']} schedule, seed {recipe['seed']}{tuned}",
        f"- Weights of epoch {config.epoch} ({selection})",
    ]
    if environment:
        lines.append(
            f"- vitral {environment.get('vitral')}, PyTorch {environment.get('torch')}, {environment.get('hardware')}, "
            f"{environment.get('precision')}"
        )
    return [*lines, f"- Complete recipe: `{recipe_file}`", ""]


def _nested(values: dict[str, Any], group: str, name: str) -> Any:
    """`values[group][name]`; None if there is no such value."""
    inner = values.get(group)
    return inner.get(name) if isinstance(inner, dict) else None


def _usage(library: str, repository: str) -> list[str]:
    if library == "timm":
        return [
            "import timm",
            "",
            f'model = timm.create_model("hf-hub:{repository}", pretrained=True).eval()',
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
            'model.pretrained_cfg["label_names"]  # class names',
        ]
    if library == "transformers":
        return [
            "from transformers import pipeline",
            "",
            f'pipeline("image-classification", model="{repository}")("photo.jpg")',
        ]
    return ["import vitral", "", f'vitral.load("hf:{repository}").predict("photo.jpg").best']
