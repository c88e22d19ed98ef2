"""The model card: a README.md with metadata for the Hugging Face hub.

The metadata between two lines of dashes is YAML. JSON is valid YAML, so it is written with the json module.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral.runs.model_io import ModelConfig
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
    def load(cls, run: Path) -> RunRecord:
        def read(name: str) -> dict[str, Any]:
            try:
                content = (run / name).read_text(encoding="utf-8")
                values = tomllib.loads(content) if name.endswith(".toml") else json.loads(content)
            except (OSError, ValueError):
                return {}
            return values if isinstance(values, dict) else {}

        return cls(test=read("test.json"), recipe=read("recipe.toml"), environment=read("environment.json"))

    @property
    def split(self) -> str:
        return str(self.test.get("split", "test"))

    @property
    def init_from(self) -> str:
        return str(self.recipe.get("init_from", ""))


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
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in metadata.items()), "---", ""]
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
        metric = {"type": "accuracy", "name": "top-1 accuracy", "value": round(record.test["top1"], 6)}
        dataset = {"name": _dataset_name(config, record), "type": "image-folder", "split": record.split}
        task = {"type": "image-classification", "name": "image classification"}
        metadata["model-index"] = [
            {"name": repository.split("/")[-1], "results": [{"task": task, "dataset": dataset, "metrics": [metric]}]}
        ]
    return metadata


def _dataset_name(config: ModelConfig, record: RunRecord) -> str:
    """Name of the dataset, without the path to it on the training machine."""
    name = str(record.recipe.get("data", {}).get("name", config.trained_on)).rstrip("/")
    return Path(name).name or name


def results_section(record: RunRecord) -> list[str]:
    test = record.test
    if not test:
        return ["No evaluation results are available.", ""]
    calibrated_on_test = "every other test image" in str(test.get("bundled", {}).get("calibrated_on", ""))
    caveats = {
        "test": " (half of them were also used for calibration)" if calibrated_on_test else " (evaluated once)",
        "validation": " (also used to select the best epoch, so slightly optimistic)",
    }
    lines = [
        "## Evaluation results",
        "",
        f"{test['images']:,} {record.split} images{caveats.get(record.split, '')}:",
        "",
        "| Metric | Value | 95% interval |",
        "|---|---|---|",
        f"| Top-1 accuracy | {test['top1']:.2%} | {100 * test['top1_low']:.2f}-{test['top1_high']:.2%} |",
        *([f"| Top-5 accuracy | {test['top5']:.2%} | |"] if len(test["per_class"]) > 5 else []),
        f"| Cross-entropy (uncalibrated) | {test['loss']:.4f} | |",
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
    optim, fingerprint = recipe.get("optim", {}), environment.get("data", {}).get("fingerprint")
    init_from = record.init_from if record.init_from.startswith("hf:") else Path(record.init_from).name
    has_validation = recipe.get("data", {}).get("validation", 1)
    selection = "best on the validation images" if has_validation else "last epoch; no validation images"
    frozen = f", frozen: {recipe['freeze']}" if recipe.get("freeze") else ""
    lines = [
        "## Training",
        "",
        f"- Dataset: {_dataset_name(config, record)}" + (f" (fingerprint {fingerprint})" if fingerprint else ""),
        f"- Initialised from {init_from}" if record.init_from else "- Trained from scratch",
        f"- Recipe {recipe.get('name')}: {optim.get('name')}, lr {optim.get('lr')}, {recipe.get('epochs')} epochs, "
        f"batch size {recipe.get('batch_size')}, {optim.get('schedule')} schedule, seed {recipe.get('seed')}{frozen}",
        f"- Weights of epoch {config.epoch} ({selection})",
    ]
    if environment:
        lines.append(
            f"- vitral {environment.get('vitral')}, PyTorch {environment.get('torch')}, {environment.get('hardware')}, "
            f"{environment.get('precision')}"
        )
    return [*lines, f"- Complete recipe: `{recipe_file}`", ""]


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
