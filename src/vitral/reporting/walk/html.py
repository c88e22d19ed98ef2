"""The walk as one HTML page: no network, light and dark, for a desk and for a phone."""

from __future__ import annotations

import base64
import html
import io
import re
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitral.reporting.walk.steps import Answer, Code, Picture, Step, Walk
from vitral.reporting.walk.texts import PAGE

WIDEST = 400  # pixels of a picture
STYLE = """
:root { --paper: #fdfdfb; --ink: #1d2430; --soft: #5b6675; --line: #dfe3e8; --box: #f3f4f2; --accent: #00639c; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e4e8ee; --soft: #9aa6b5; --line: #2c343e; --box: #1c2229; --accent: #6cb8ea; }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.6 system-ui, "Apple SD Gothic Neo",
  "Noto Sans KR", "Malgun Gothic", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.2rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.3rem; margin: 0; }
p { margin: .6rem 0; max-width: 42rem; word-break: keep-all; overflow-wrap: break-word; }
.soft { color: var(--soft); font-size: .88rem; }
nav ol { columns: 16rem; padding-left: 1.4rem; margin: .4rem 0 0; font-size: .95rem; }
a { color: var(--accent); }
section { border-top: 1px solid var(--line); margin-top: 2.2rem; padding-top: 1.6rem; }
.head { display: flex; gap: .9rem; align-items: baseline; flex-wrap: wrap; }
.count { color: var(--soft); font-weight: normal; margin-right: .4rem; }
.shape { font: .85rem ui-monospace, monospace; background: var(--box); border-radius: .4rem; padding: .1rem .5rem; }
.equation { font: 1.15rem/1.5 "STIX Two Math", "Cambria Math", Georgia, serif; margin: .8rem 0; overflow-x: auto;
  max-width: 100%; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.2rem; margin: 1rem 0; }
figure { margin: 0; max-width: 100%; }
figure img { display: block; max-width: 100%; image-rendering: pixelated; border: 1px solid var(--line);
  border-radius: 3px; }
figure.small { width: 7.5rem; }
figure.small img { width: 100%; }
figcaption { color: var(--soft); font-size: .82rem; line-height: 1.35; margin-top: .35rem; max-width: 22rem; }
details { margin-top: .6rem; }
summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
pre { background: var(--box); border-radius: .5rem; padding: .8rem 1rem; overflow-x: auto;
  font: .82rem/1.5 ui-monospace, "SF Mono", Menlo, monospace; margin: .5rem 0; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: normal; font-size: .85rem; }
.bar { display: inline-block; height: .7rem; background: var(--accent); border-radius: 2px; vertical-align: middle;
  margin-right: .5rem; min-width: 1px; }
@media print { details pre { display: block; } nav { display: none; } section { break-inside: avoid; } }
"""


def page(walk: Walk) -> str:
    words = PAGE[walk.lang]
    contents = "".join(f'<li><a href="#{step.key}">{html.escape(step.title)}</a></li>' for step in walk.steps)
    steps = "".join(section(walk, index, step) for index, step in enumerate(walk.steps))
    return (
        f'<!doctype html>\n<html lang="{walk.lang}">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(walk.title)}</title>\n<style>{STYLE}</style>\n<main>\n"
        f"<header><h1>{html.escape(walk.title)}</h1><p>{html.escape(walk.lead)}</p>"
        f'<p class="soft">{html.escape(words["colours"])}</p>'
        f'<nav aria-label="{words["contents"]}"><ol>{contents}</ol></nav></header>\n{steps}</main>\n</html>\n'
    )


def section(walk: Walk, index: int, step: Step) -> str:
    words = PAGE[walk.lang]
    small = len(step.pictures) > 6
    pictures = "".join(figure(picture, small) for picture in step.pictures)
    code = "".join(listing(one, words["line"]) for one in step.code)
    table = answers(walk) if step.key == "logits" else ""
    title = f'<h2><span class="count">{index + 1}</span> {html.escape(step.title)}</h2>'
    shape = f'<span class="shape" title="{words["shape"]}">{step.shape}</span>'
    where = ", ".join(html.escape(one.where) for one in step.code)
    return (
        f'<section id="{step.key}"><div class="head">{title}{shape}</div>'
        f'<p>{html.escape(step.text)}</p><div class="equation">{equation(step.equation)}</div>'
        f'<div class="pictures">{pictures}</div>{table}'
        f"<details open><summary>{words['source']}: {where}</summary>{code}</details></section>\n"
    )


def equation(text: str) -> str:
    """z_{0} and x^{2} as indices and powers."""
    text = html.escape(text)
    return re.sub(r"\^\{([^}]*)\}", r"<sup>\1</sup>", re.sub(r"_\{([^}]*)\}", r"<sub>\1</sub>", text))


def figure(picture: Picture, small: bool) -> str:
    caption = html.escape(picture.caption)
    height, width = picture.pixels.shape[:2]
    width, height = (round(side * min(1, WIDEST / width)) for side in (width, height))
    size = f' width="{width}" height="{height}"' if not small else ""
    auto = ' style="height: auto"' if not small else ""
    return (
        f'<figure{" class=small" if small else ""}><img src="{data_of(picture)}" alt="{caption}"{size}{auto}>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def data_of(picture: Picture) -> str:
    """PNG; JPEG where that is much smaller, which it is for photographs and not for numbers."""
    lossless, photo = encoded(picture, "PNG"), encoded(picture, "JPEG")
    kind, data = ("jpeg", photo) if 3 * len(photo) < len(lossless) else ("png", lossless)
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def encoded(picture: Picture, kind: Literal["PNG", "JPEG"]) -> bytes:
    file = io.BytesIO()
    how: dict[str, Any] = {"optimize": True} if kind == "PNG" else {"quality": 88}
    Image.fromarray(np.ascontiguousarray(picture.pixels)).save(file, kind, **how)
    return file.getvalue()


def listing(code: Code, line: str) -> str:
    return f'<div class="soft">{html.escape(code.where)}, {line} {code.line}</div><pre>{html.escape(code.text)}</pre>'


def answers(walk: Walk) -> str:
    names = "".join(f"<th>{PAGE[walk.lang][word]}</th>" for word in ("class", "logit", "probability"))
    return f"<table><tr>{names}</tr>{''.join(answer_row(answer) for answer in walk.answers)}</table>"


def answer_row(answer: Answer) -> str:
    bar = f'<span class="bar" style="width: {8 * answer.probability:.2f}rem"></span>'
    return (
        f"<tr><td>{html.escape(answer.name)}</td><td>{answer.logit:.2f}</td><td>{bar}{answer.probability:.1%}</td></tr>"
    )
