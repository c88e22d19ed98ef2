"""The walk as Markdown with image files next to it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from vitral.reporting.walk.html import encode_image, render_equation
from vitral.reporting.walk.steps import Walk, WalkStep
from vitral.reporting.walk.texts import PAGE_TEXTS

LINE_LENGTH = 100


def write_markdown(walk: Walk, path: Path) -> Path:
    """Write the text to `path` and the figures to images/<stem>/ next to it."""
    image_dir = path.parent / "images" / path.stem
    image_dir.mkdir(parents=True, exist_ok=True)
    colours = PAGE_TEXTS[walk.lang]["colours"]
    parts = [f"# {walk.title}\n\n{wrap(walk.intro)}\n\n{wrap(colours)}\n"]
    for number, step in enumerate(walk.steps, start=1):
        parts.append(render_step(number, step, write_figures(step, image_dir, path.parent), walk))
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def wrap(text: str) -> str:
    return textwrap.fill(text, LINE_LENGTH, break_long_words=False)


def write_figures(step: WalkStep, image_dir: Path, root: Path) -> list[str]:
    """Write the figures of a step; returns a Markdown link for each."""
    links = []
    for number, figure in enumerate(step.figures, start=1):
        file = image_dir / f"{step.key}-{number}.png"
        file.write_bytes(encode_image(figure, "PNG"))
        links.append(f"![{re.sub(r'[][]', '', figure.caption)}]({file.relative_to(root).as_posix()})")
    return links


def render_step(number: int, step: WalkStep, links: list[str], walk: Walk) -> str:
    texts = PAGE_TEXTS[walk.lang]
    captions = "  \n".join(figure.caption for figure in step.figures)
    code = "\n".join(f"`{excerpt.location}`\n\n```python\n{excerpt.text}\n```\n" for excerpt in step.code)
    table = ""
    if step.key == "logits":
        rows = "".join(f"| {c.name} | {c.logit:.2f} | {c.probability:.1%} |\n" for c in walk.top_classes)
        table = f"\n| {texts['class']} | {texts['logit']} | {texts['probability']} |\n|---|---|---|\n{rows}"
    equation = f"{render_equation(step.equation)}  ·  {texts['shape']} {step.shape}"
    return (
        f"## {number}. {step.title}\n\n{wrap(step.text)}\n\n{equation}\n\n"
        f"{' '.join(links)}\n\n{captions}\n{table}\n{code}"
    )
