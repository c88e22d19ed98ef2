"""The walk as a self-contained HTML page, with light and dark theme, for large and small screens."""

from __future__ import annotations

import base64
import html
import io
import re
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitral.reporting.walk.source import SourceExcerpt
from vitral.reporting.walk.steps import ClassScore, StepFigure, Walk, WalkStep
from vitral.reporting.walk.texts import PAGE_TEXTS

MAX_WIDTH = 400  # pixels of a figure
MAX_LARGE_FIGURES = 6  # a step with more figures shows them smaller
STYLE = """
:root { --background: #fdfdfb; --surface: #f3f4f2; --text: #1d2430; --muted: #5b6675; --line: #dfe3e8;
  --accent: #00639c; }
@media (prefers-color-scheme: dark) {
  :root { --background: #14181d; --surface: #1c2229; --text: #e4e8ee; --muted: #9aa6b5; --line: #2c343e;
    --accent: #6cb8ea; }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--background); color: var(--text); font: 17px/1.6 system-ui, "Apple SD Gothic Neo",
  "Noto Sans KR", "Malgun Gothic", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.2rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.3rem; margin: 0; }
p { margin: .6rem 0; max-width: 42rem; word-break: keep-all; overflow-wrap: break-word; }
.muted { color: var(--muted); font-size: .88rem; }
nav ol { columns: 16rem; column-gap: 2.4rem; padding-left: 1.4rem; margin: .4rem 0 0; font-size: .95rem; }
a { color: var(--accent); }
section { border-top: 1px solid var(--line); margin-top: 2.2rem; padding-top: 1.6rem; }
.heading { display: flex; gap: .9rem; align-items: baseline; flex-wrap: wrap; }
.number { color: var(--muted); font-weight: normal; margin-right: .4rem; }
.shape { font: .85rem ui-monospace, monospace; background: var(--surface); border-radius: .4rem; padding: .1rem .5rem; }
.equation { font: 1.15rem/1.5 "STIX Two Math", "Cambria Math", Georgia, serif; margin: .8rem 0; overflow-x: auto;
  max-width: 100%; }
.figures { display: flex; flex-wrap: wrap; gap: 1.2rem; margin: 1rem 0; }
figure { margin: 0; max-width: 100%; width: min-content; min-width: min(9rem, 100%); }
.four figure { width: calc(25% - .9rem); }
.four img { width: 100%; }
@media (max-width: 40rem) { .four figure { width: calc(50% - .6rem); } }
figure img { display: block; max-width: 100%; image-rendering: pixelated; border: 1px solid var(--line);
  border-radius: 3px; }
figure.small { width: 7.5rem; }
figure.small img { width: 100%; }
figcaption { color: var(--muted); font-size: .82rem; line-height: 1.35; margin-top: .35rem; max-width: 22rem; }
details { margin-top: .6rem; }
summary { cursor: pointer; color: var(--muted); font-size: .9rem; }
pre { background: var(--surface); border-radius: .5rem; padding: .8rem 1rem; overflow-x: auto;
  font: .77rem/1.5 ui-monospace, "SF Mono", Menlo, monospace; margin: .5rem 0; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: normal; font-size: .85rem; }
.bar { display: inline-block; height: .7rem; background: var(--accent); border-radius: 2px; vertical-align: middle;
  margin-right: .5rem; min-width: 1px; }
@media print { details pre { display: block; } nav { display: none; } section { break-inside: avoid; } }
"""


def render_html(walk: Walk) -> str:
    texts = PAGE_TEXTS[walk.lang]
    contents = "".join(f'<li><a href="#{step.key}">{html.escape(step.title)}</a></li>' for step in walk.steps)
    sections = "".join(render_step(walk, number, step) for number, step in enumerate(walk.steps, start=1))
    return (
        f'<!doctype html>\n<html lang="{walk.lang}">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(walk.title)}</title>\n<style>{STYLE}</style>\n<main>\n"
        f"<header><h1>{html.escape(walk.title)}</h1><p>{html.escape(walk.intro)}</p>"
        f'<p class="muted">{html.escape(texts["colours"])}</p>'
        f'<nav aria-label="{texts["contents"]}"><ol>{contents}</ol></nav></header>\n{sections}</main>\n</html>\n'
    )


def render_step(walk: Walk, number: int, step: WalkStep) -> str:
    texts = PAGE_TEXTS[walk.lang]
    small = len(step.figures) > MAX_LARGE_FIGURES
    figures = "".join(render_figure(figure, small) for figure in step.figures)
    code = "".join(render_code(excerpt, texts["line"]) for excerpt in step.code)
    table = class_table(walk) if step.key == "logits" else ""
    title = f'<h2><span class="number">{number}</span> {html.escape(step.title)}</h2>'
    shape = f'<span class="shape" title="{texts["shape"]}">{step.shape}</span>'
    return (
        f'<section id="{step.key}"><div class="heading">{title}{shape}</div>'
        f'<p>{html.escape(step.text)}</p><div class="equation">{render_equation(step.equation)}</div>'
        f'<div class="{"figures four" if len(step.figures) == 4 else "figures"}">{figures}</div>{table}'
        f"<details open><summary>{texts['source']}</summary>{code}</details></section>\n"
    )


def render_equation(text: str) -> str:
    """z_{0} and x^{2} with <sub> and <sup>."""
    text = html.escape(text)
    return re.sub(r"\^\{([^}]*)\}", r"<sup>\1</sup>", re.sub(r"_\{([^}]*)\}", r"<sub>\1</sub>", text))


def render_figure(figure: StepFigure, small: bool) -> str:
    caption = html.escape(figure.caption)
    if small:
        return (
            f'<figure class="small"><img src="{data_uri(figure)}" alt="{caption}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    height, width = figure.pixels.shape[:2]
    scale = min(1, MAX_WIDTH / width)
    size = f'width="{round(width * scale)}" height="{round(height * scale)}" style="height: auto"'
    return f'<figure><img src="{data_uri(figure)}" alt="{caption}" {size}><figcaption>{caption}</figcaption></figure>'


def data_uri(figure: StepFigure) -> str:
    """PNG; JPEG where that is much smaller, which is the case for photographs but not for matrices."""
    png, jpeg = encode_image(figure, "PNG"), encode_image(figure, "JPEG")
    kind, data = ("jpeg", jpeg) if 3 * len(jpeg) < len(png) else ("png", png)
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def encode_image(figure: StepFigure, image_format: Literal["PNG", "JPEG"]) -> bytes:
    file = io.BytesIO()
    options: dict[str, Any] = {"optimize": True} if image_format == "PNG" else {"quality": 88}
    Image.fromarray(np.ascontiguousarray(figure.pixels)).save(file, image_format, **options)
    return file.getvalue()


def render_code(excerpt: SourceExcerpt, line_text: str) -> str:
    location = f"{html.escape(excerpt.location)}, {line_text.format(line=excerpt.line)}"
    return f'<div class="muted">{location}</div><pre>{html.escape(excerpt.text)}</pre>'


def class_table(walk: Walk) -> str:
    texts = PAGE_TEXTS[walk.lang]
    header = "".join(f"<th>{texts[key]}</th>" for key in ("class", "logit", "probability"))
    return f"<table><tr>{header}</tr>{''.join(class_row(score) for score in walk.top_classes)}</table>"


def class_row(score: ClassScore) -> str:
    bar = f'<span class="bar" style="width: {8 * score.probability:.2f}rem"></span>'
    return f"<tr><td>{html.escape(score.name)}</td><td>{score.logit:.2f}</td><td>{bar}{score.probability:.1%}</td></tr>"
