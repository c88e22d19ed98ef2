"""The report of a run as one self-contained HTML file, with light and dark theme.

Everything from outside, such as class names and commands, is escaped. The Content-Security-Policy allows only the
page's own style and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from vitral import __version__
from vitral.evaluation.leaks import evaluation_warning, new_images_text
from vitral.reporting.html.confusion_matrix import ConfusionExamples, confusion_section
from vitral.reporting.html.evaluation_sections import (
    calibration_section,
    ood_section,
    prediction_sets_section,
    robustness_section,
)
from vitral.reporting.html.gallery import gallery_section
from vitral.reporting.html.markup import interval, json_for_script, percent, text
from vitral.reporting.html.report_data import ReportData
from vitral.reporting.html.run_sections import data_section, reproduction_section, summary_section, training_section
from vitral.utils.atomic import atomic_write

ASSETS = ("report.css", "report.js")


def write_report(data: ReportData, path: Path) -> Path:
    atomic_write(path, render_report(data))
    return path


def render_report(data: ReportData) -> str:
    style, script = (files("vitral.reporting.html").joinpath("page", name).read_text("utf-8") for name in ASSETS)
    examples = ConfusionExamples.select(data)
    sections = [
        ("summary", "Summary", summary_section(data)),
        ("training", "Training", training_section(data.epochs, data.augmented)),
        ("confusion", "Confusion matrix", confusion_section(data, examples)),
        ("errors", "Errors and uncertain predictions", gallery_section(data)),
        ("calibration", "Calibration", calibration_section(data.evaluation)),
        ("sets", "Prediction sets", prediction_sets_section(data)),
        ("ood", "Out-of-distribution images", ood_section(data)),
        ("robustness", "Robustness to corruptions", robustness_section(data)),
        ("data", "Data", data_section(data)),
        ("reproduction", "Reproduction", reproduction_section(data)),
    ]
    present = [(name, title, content) for name, title, content in sections if content]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in present)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
        for name, title, content in present
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src '{csp_hash(style)}'; script-src '{csp_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(data.title)}</title>'
        f"<style>{style}</style></head><body>"
        f"<header><h1>{text(data.title)}</h1>{leak_banner(data)}{key_figures(data)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>{body}</main>'
        f"<footer>vitral {__version__}. This file is self-contained.</footer>"
        f'<script type="application/json" id="report-data">{json_for_script(examples.to_dict(data))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def csp_hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def leak_banner(data: ReportData) -> str:
    """A warning above the figures if evaluated images were used for training."""
    leak = data.evaluation.leak
    warning = evaluation_warning(leak)
    if leak is None or warning is None:
        return ""
    sentences = [f"{warning[0].upper()}{warning[1:]}.", new_images_text(leak)]
    return f'<p class="warning" role="alert">{text(" ".join(filter(None, sentences)))}</p>'


def key_figures(data: ReportData) -> str:
    """The most important metrics, below the title."""
    evaluation = data.evaluation
    headline, plain = evaluation.headline, evaluation.accuracy_without_tta
    with_tta = "" if evaluation.tta == "none" else " with test-time augmentation"
    boxes = [
        (percent(headline.accuracy.value), f"accuracy{with_tta} ({interval(headline.accuracy)})"),
        (f"{evaluation.images:,}", f"{data.split_name} images, {len(evaluation.per_class)} classes"),
        (percent(headline.ece.value), f"calibration error ({interval(headline.ece)})"),
    ]
    if plain is not None:
        boxes.insert(1, (percent(plain.value), f"without it, as in predict and evaluate ({interval(plain)})"))
    if evaluation.ood is not None:
        boxes.append((percent(evaluation.ood.best.auroc.value, 1), f"OOD AUROC against {evaluation.ood.dataset}"))
    if evaluation.robustness is not None:
        relative = percent(evaluation.robustness.relative_accuracy.value, 1)
        boxes.append((relative, "of the clean accuracy on corrupted images"))
    items = "".join(f"<div><b>{text(value)}</b><span>{text(label)}</span></div>" for value, label in boxes)
    return f'<div class="key-figures">{items}</div>'
