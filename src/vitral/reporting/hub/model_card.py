"""The card of a model that is handed on: what it is, what it learned from, how good it is, how to load it.

A README.md as the hub reads it: settings between two lines of dashes, then Markdown. JSON is YAML, so the settings
need no library.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral.runs.run import ModelCard
from vitral.weights.checkpoint import described
from vitral.weights.preprocessing import seen

RECIPE = "training.toml"  # not recipe.toml: that would make a run folder of it
# What a folder of each family is loaded by, the first line being a person's shortest way.
LOADED_BY = {
    "timm": ("vitral", "timm", "transformers"),
    "transformers": ("vitral", "transformers"),
    "vitral": ("vitral",),
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the run folder says about a model beyond the model itself. Empty where there is no run."""

    test: dict[str, Any]
    recipe: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def by(cls, run: Path) -> Told:
        def read(name: str) -> dict[str, Any]:
            try:
                text = (run / name).read_text(encoding="utf-8")
                found = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
            except (OSError, ValueError):
                return {}
            return found if isinstance(found, dict) else {}

        return cls(test=read("test.json"), recipe=read("recipe.toml"), environment=read("environment.json"))


def card_text(
    card: ModelCard, told: Told, repository: str, family: str, notes: Sequence[str] = (), license: str | None = None
) -> str:
    """The whole README.md."""
    front = {key: value for key, value in _settings(card, told, repository, family, license).items() if value}
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", ""]
    name = repository.split("/")[-1]
    few = ", ".join(card.classes[:12]) + (f" and {len(card.classes) - 12} more" if len(card.classes) > 12 else "")
    lines += [
        f"# {name}",
        "",
        f"A Vision Transformer that tells {len(card.classes)} classes apart: {few}.",
        "",
        *results(told),
        *training(card, told, RECIPE),
        "## The model",
        "",
        f"- {described(card.architecture, card.variant)}",
        f"- sees images so: {seen(card.preprocessing)}",
    ]
    if card.calibration.temperature != 1:
        lines.append(
            f"- its probabilities are softmax(logits / {card.calibration.temperature:.4g}): the temperature was fitted "
            f"on {card.calibration.fitted_on}"
        )
    lines += [f"- {note}" for note in notes]
    lines += ["", "## How to load it", ""]
    for library in LOADED_BY[family]:
        lines += [f"With {library}:", "", "```python", *_loading(library, repository), "```", ""]
    lines.append(f"Written by vitral {__version__}.")
    return "\n".join(lines) + "\n"


def _settings(card: ModelCard, told: Told, repository: str, family: str, license: str | None) -> dict[str, Any]:
    init = str(told.recipe.get("init", ""))
    settings: dict[str, Any] = {
        "license": license,
        "library_name": LOADED_BY[family][-1] if family != "timm" else "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "vision-transformer", "vitral", *(["timm"] if family == "timm" else [])],
        "base_model": init.removeprefix("hf:").split("@")[0] if init.startswith("hf:") else None,
    }
    if told.test:
        measured = {"type": "accuracy", "name": "top-1 accuracy", "value": round(told.test["top1"], 6)}
        data = {"name": _data(card, told), "type": "image-folder", "split": _split(told)}
        task = {"type": "image-classification", "name": "image classification"}
        settings["model-index"] = [
            {"name": repository.split("/")[-1], "results": [{"task": task, "dataset": data, "metrics": [measured]}]}
        ]
    return settings


def _data(card: ModelCard, told: Told) -> str:
    """The name of the data, without the path to it on somebody's machine."""
    name = str(told.recipe.get("data", {}).get("name", card.trained_on)).rstrip("/")
    return Path(name).name or name


def _split(told: Told) -> str:
    return str(told.test.get("split", "test"))


def results(told: Told) -> list[str]:
    test = told.test
    if not test:
        return ["It comes without measured results.", ""]
    fitted = "every other test image" in str(told.test.get("box", {}).get("calibrated_on", ""))
    how = {
        "test": "images that were opened after training; half of them set its probabilities right too"
        if fitted
        else "images that were opened once, after training",
        "validation": "images on which the best epoch was chosen too: a little too kind",
    }
    lines = [
        "## Measured",
        "",
        f"On {test['images']:,} {_split(told)} {how.get(_split(told), 'images')}:",
        "",
        "| | | 95 % interval |",
        "|---|---|---|",
        f"| top-1 accuracy | {test['top1']:.2%} | {test['top1_low']:.2%} – {test['top1_high']:.2%} |",
        *([f"| top-5 accuracy | {test['top5']:.2%} | |"] if len(test["per_class"]) > 5 else []),
        f"| loss, before any temperature | {test['loss']:.4f} | |",
        "",
    ]
    if len(test["per_class"]) <= 100:
        lines += ["| class | precision | recall | images |", "|---|---|---|---|"]
        lines += [
            f"| {row['name']} | {row['precision']:.2%} | {row['recall']:.2%} | {row['images']:,} |"
            for row in test["per_class"]
        ]
        lines.append("")
    return lines


def training(card: ModelCard, told: Told, recipe_file: str) -> list[str]:
    recipe, environment = told.recipe, told.environment
    if not recipe:
        return []
    optim, data = recipe.get("optim", {}), environment.get("data", {})
    lines = ["## How it was trained", "", f"- on {_data(card, told)}"]
    if data.get("fingerprint"):
        lines[-1] += f" (fingerprint {data['fingerprint']})"
    init = str(recipe.get("init", ""))
    lines.append(
        f"- beginning from {init if init.startswith('hf:') else Path(init).name}" if init else "- from scratch"
    )
    held_out = recipe.get("data", {}).get("validation", 1)
    chosen = "the best on validation images" if held_out else "the last: no image was held out"
    frozen = f", frozen: {recipe['freeze']}" if recipe.get("freeze") else ""
    lines.append(
        f"- recipe {recipe.get('name')}: {optim.get('name')} {optim.get('lr')}, {recipe.get('epochs')} epochs, "
        f"batch {recipe.get('batch')}, {optim.get('schedule')} schedule, seed {recipe.get('seed')}{frozen}; "
        f"the weights are those of epoch {card.epoch}, {chosen}"
    )
    if environment:
        lines.append(
            f"- with vitral {environment.get('vitral')}, PyTorch {environment.get('torch')} on "
            f"{environment.get('hardware')}, {environment.get('precision')}"
        )
    return [*lines, f"- the complete recipe is in `{recipe_file}`", ""]


def _loading(library: str, repository: str) -> list[str]:
    if library == "timm":
        return [
            "import timm",
            "",
            f'model = timm.create_model("hf-hub:{repository}", pretrained=True).eval()',
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
            'model.pretrained_cfg["label_names"]  # the classes, in order',
        ]
    if library == "transformers":
        return [
            "from transformers import pipeline",
            "",
            f'pipeline("image-classification", model="{repository}")("photo.jpg")',
        ]
    return ["import vitral", "", f'vitral.load("hf:{repository}").predict("photo.jpg").best']
