"""A run as one HTML file: no network, light and dark, to read, click, print and send.

Everything from outside, class names and commands, is escaped; the page allows itself its own style and script and
nothing else (Content-Security-Policy with their hashes).
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral.evaluation.report import Evaluation
from vitral.reporting.html import charts
from vitral.reporting.html.charts import Chart, around
from vitral.reporting.html.confusion_matrix import MOST_CLASSES, Cells, confusion, galleries
from vitral.reporting.html.markup import between, in_script, note, percent, rows, table, text
from vitral.reporting.html.report_data import Material
from vitral.runs.run import write_atomically

FILES = ("report.css", "report.js")
STYLES = "abcde"


def write_report(material: Material, path: Path) -> Path:
    write_atomically(path, page(material))
    return path


def page(material: Material) -> str:
    style, script = (files("vitral.reporting.html").joinpath("page", name).read_text("utf-8") for name in FILES)
    cells = Cells.of(material)
    sections = [
        ("summary", "Summary", summary(material)),
        ("learning", "How it learned", learning(material.epochs)),
        ("confusion", "What it takes for what", confusion(material, cells)),
        ("mistakes", "Where it fails", galleries(material)),
        ("trust", "Can its probabilities be believed?", trust(material.found)),
        ("unknown", "Does it notice what it does not know?", unknown(material)),
        ("robustness", "What if pictures get worse?", robustness(material)),
        ("data", "The data", data(material)),
        ("repeat", "To repeat it", repeat(material)),
    ]
    written = [(name, title, content) for name, title, content in sections if content]
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, _ in written)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
        for name, title, content in written
    )
    policy = (
        f"default-src 'none'; img-src data:; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(material.title)}</title>'
        f"<style>{style}</style></head><body>"
        f"<header><h1>{text(material.title)}</h1>{headline(material)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>{body}</main>'
        f"<footer>Made by vitral {__version__}. One file, nothing is fetched.</footer>"
        f'<script type="application/json" id="material">{in_script(cells.for_page(material))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


# sections


def headline(material: Material) -> str:
    found = material.found
    line = found.headline
    boxes = [
        (percent(line.accuracy.value), f"accuracy ({between(line.accuracy)})"),
        (f"{found.images:,}", f"{material.split_name} images, {len(found.per_class)} classes"),
        (percent(line.ece.value), f"calibration error ({between(line.ece)})"),
    ]
    if found.unknown is not None:
        boxes.append((percent(found.unknown.best.auroc.value, 1), f"AUROC against {found.unknown.against}"))
    if found.robustness is not None:
        boxes.append((percent(found.robustness.relative.value, 1), "of the accuracy left on damaged pictures"))
    return (
        '<div class="big">' + "".join(f"<div><b>{text(a)}</b><span>{text(b)}</span></div>" for a, b in boxes) + "</div>"
    )


def summary(material: Material) -> str:
    line, found = material.found.headline, material.found
    figures = [("accuracy", line.accuracy, True), ("top-5", line.top5, True), ("macro F1", line.macro_f1, True)]
    figures += [("cross-entropy", line.nll, False), ("Brier score", line.brier, False)]
    figures += [("calibration error (ECE)", line.ece, True), ("area under risk–coverage", line.aurc, False)]
    lines = [
        (name, percent(f.value), between(f)) if share else (name, f"{f.value:.4f}", f"{f.low:.4f} – {f.high:.4f}")
        for name, f, share in figures
        if name != "top-5" or len(found.per_class) > 5
    ]
    what = table(("figure", material.split_name, "95 % interval"), lines)
    chose = "These images also chose the epoch: new ones will do a little worse. "
    return f'<div class="pair"><div>{rows(material.facts)}</div><div>{what}</div></div>' + note(
        f"{chose if material.split_name == 'validation' else ''}Intervals: Wilson's for accuracy, 1,000 bootstrap "
        f"resamples of the images for the others. Probabilities are those after temperature {found.temperature:.3f}, "
        f"fitted on {found.fitted_on}."
    )


def learning(epochs: tuple[dict[str, Any], ...]) -> str:
    if not epochs:
        return ""
    steps = [row["epoch"] for row in epochs]
    drawn = []
    for what, name, style in (("loss", "loss", charts.number), ("top1", "accuracy", charts.percent)):
        held_out = all(f"validation_{what}" in row for row in epochs)
        splits = ("train", "validation") if held_out else ("train",)
        both = [[float(row.get(f"{split}_{what}", float("nan"))) for row in epochs] for split in splits]
        label = f"{name} by epoch: training ends at {style(both[0][-1])}"
        chart = Chart(
            label=label + (f", validation at {style(both[1][-1])}" if held_out else ""),
            x="epoch",
            y=name,
            x_range=(min(steps) - 0.2, max(steps) + 0.2),
            y_range=around([y for ys in both for y in ys], floor=0.0),
            y_format=style,
            x_ticks=[x for x in charts.nice(min(steps), max(steps), 8) if x == int(x)] or steps[:1],
        )
        for ys, colour, label in zip(both, "ba", ("training (augmented)", "validation"), strict=False):
            chart.line(steps, ys, colour, label)
            if len(steps) <= 60:
                chart.dots(steps, ys, colour)
        best = max((row["epoch"] for row in epochs if row.get("best")), default=None)
        if held_out and best is not None and len(steps) > 1:
            chart.rule(best, "g", f"best epoch ({best})")
        drawn.append(chart.svg())
    return f'<div class="pair">{"".join(drawn)}</div>'


def trust(found: Evaluation) -> str:
    low = min(min(b.confidence, b.low) for b in found.calibrated.bins)
    low = max(min(low, 0.9) - 0.03, 0.0)
    chart = Chart(
        label=f"reliability diagram: calibration error {percent(found.calibrated.ece)}",
        x="how sure it was",
        y="how often it was right",
        x_range=(low, 1.0),
        y_range=(low, 1.0),
        x_format=charts.percent,
        y_format=charts.percent,
    )
    chart.line([low, 1], [low, 1], "g dashed", "means what it says")
    bins = found.calibrated.bins
    sure = [b.confidence for b in bins]
    chart.spans(sure, [b.low for b in bins], [b.high for b in bins], "a")
    chart.dots(sure, [b.accuracy for b in bins], "a", "bins of equally many images, with 95 % intervals")
    curve = Chart(
        label=f"risk and coverage: {percent(found.selective.risk[-1])} wrong if all images get an answer",
        x="share of images that get an answer, the surest first",
        y="wrong among them",
        x_range=(0.0, 1.0),
        y_range=(0.0, max(*found.selective.risk, 1e-3) * 1.08),
        x_format=charts.percent,
        y_format=charts.percent,
    )
    curve.line(found.selective.coverage, found.selective.risk, "a")
    lines = [
        (name, f"{one.nll:.4f}", f"{one.brier:.4f}", percent(one.ece), percent(one.confidence))
        for name, one in (("as trained", found.raw), (f"temperature {found.temperature:.3f}", found.calibrated))
    ]
    heads = ("", "cross-entropy", "Brier score", "calibration error", "mean confidence")
    return f'<div class="pair"><div>{chart.svg()}</div><div>{curve.svg()}</div></div>' + table(heads, lines)


def unknown(material: Material) -> str:
    found = material.found.unknown
    calibration = material.predictor.card.calibration
    if found is None:
        below = calibration.unknown_below
        told = (
            "No picture is called unknown: there were too few validation images to choose a threshold on."
            if below is None
            else f"A picture whose {calibration.score} score is below {below:.2f} is called unknown; the threshold was "
            f"chosen on {calibration.fitted_on}."
        )
        return f"<p>{text(told)}</p>" + ask(material, "--unknown DATASET_OR_FOLDER", "Measure it against other images:")
    drawn = []
    for score in found.scores:
        shares = [[count / max(sum(side), 1) for count in side] for side in (score.known, score.unknown)]
        chart = Chart(
            label=f"{score.name}: known against unknown, AUROC {percent(score.auroc.value)}",
            x=f"{score.name} score: AUROC {percent(score.auroc.value, 1)}",
            y="share of images",
            x_range=(score.edges[0], score.edges[-1]),
            y_range=(0.0, max(map(max, shares)) * 1.05),
            y_format=charts.percent,
        )
        chart.steps(score.edges, shares[0], "a", "known")
        chart.steps(score.edges, shares[1], "b", found.against)
        if score.below is not None:
            chart.rule(score.below, "g", "threshold")
        drawn.append(f"<div>{chart.svg()}</div>")
    lines = [
        (
            score.name,
            f"{percent(score.auroc.value)} ({between(score.auroc)})",
            f"{percent(score.fpr95.value)} ({between(score.fpr95)})",
            "–" if score.below is None else percent(score.caught, 1),
            "–" if score.below is None else percent(score.false_alarms, 1),
        )
        for score in found.scores
    ]
    heads = ("score", "AUROC", "unknown taken for known¹", "unknown noticed²", "false alarms²")
    return (
        f"<p>{found.images:,} images of {text(found.against)} against {found.known_images:,} known ones.</p>"
        f'<div class="pair three">{"".join(drawn)}</div>{table(heads, lines)}'
        + note("¹ where 95 % of the known images are. ² at a threshold chosen on images that were held out.")
    )


def robustness(material: Material) -> str:
    found = material.found.robustness
    if found is None:
        return ask(
            material, "", "Not measured in this quick version. With noise, blur, pale, JPEG and turned pictures:"
        )
    chart = Chart(
        label=f"accuracy by severity of damage; {percent(found.relative.value, 1)} of it is left on average",
        x="severity",
        y="accuracy",
        x_range=(0.8, 5.2),
        y_range=(0.0, 1.0),
        y_format=charts.percent,
        x_ticks=(1, 2, 3, 4, 5),
    )
    chart.line([0.8, 5.2], [found.clean, found.clean], "g dashed", "undamaged")
    for damage, style in zip(found.damages, STYLES, strict=True):
        severity = list(range(1, len(damage.accuracy) + 1))
        chart.spans(severity, [a.low for a in damage.accuracy], [a.high for a in damage.accuracy], style)
        values = [a.value for a in damage.accuracy]
        chart.line(severity, values, style, damage.kind)
        chart.dots(severity, values, style)
    lines = [
        (
            d.kind,
            *(percent(a.value, 1) for a in d.accuracy),
            f"{percent(d.relative.value, 1)} ({between(d.relative, 1)})",
        )
        for d in found.damages
    ]
    heads = ("damage", "1", "2", "3", "4", "5", "left of the accuracy")
    return (
        f"<p>{text(percent(found.relative.value, 1))} of the accuracy is left on average "
        f"({between(found.relative, 1)}), {found.images:,} images, undamaged {percent(found.clean)}.</p>"
        f'<div class="pair roomy"><div>{chart.svg()}</div>{table(heads, lines)}</div>'
    )


def ask(material: Material, flags: str, words: str) -> str:
    command = f"{material.more} {flags}".strip()
    return f"<p>{text(words)}</p><pre>{text(command)}</pre>" if material.more else ""


def data(material: Material) -> str:
    health = "".join(f"<li>{text(line)}</li>" for line in material.health)
    written = f"<ul>{health}</ul>" if health else ""
    if not material.counts:
        return written
    names = [figures.name for figures in material.found.per_class]
    most = max((max(counts, default=0) for _, counts in material.counts), default=1) or 1
    head = "".join(f'<th scope="col">{text(split)}</th>' for split, _ in material.counts)
    total = "".join(f"<td>{sum(counts):,}</td>" for _, counts in material.counts)
    body = "".join(
        f'<tr><th scope="row">{text(name)}</th>'
        + "".join(f"<td>{counts[k]:,}</td>" for _, counts in material.counts)
        + f'<td><svg class="bar" width="120" height="9" aria-hidden="true"><rect class="area a" height="9" '
        f'width="{120 * material.counts[0][1][k] / most:.1f}"/></svg></td></tr>'
        for k, name in enumerate(names)
    )
    return (
        f"{written}<details{' open' if len(names) <= MOST_CLASSES else ''}><summary>Images of each class</summary>"
        f'<div class="wide"><table><thead><tr><th scope="col">class</th>{head}<th></th></tr></thead><tbody>'
        f'<tr><th scope="row">all</th>{total}<td></td></tr>{body}</tbody></table></div></details>'
    )


def repeat(material: Material) -> str:
    commands = "\n".join(material.repeat)
    written = f"<pre>{text(commands)}</pre>" if commands else ""
    if material.recipe:
        written += f"<details><summary>recipe.toml, complete</summary><pre>{text(material.recipe)}</pre></details>"
    if material.environment:
        written += f"<h3>Environment</h3>{rows(material.environment)}"
    return written
