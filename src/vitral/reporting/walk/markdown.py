"""The walk as Markdown with pictures beside it: docs/walk.md is made with it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from vitral.reporting.walk.html import encoded, equation
from vitral.reporting.walk.steps import Step, Walk
from vitral.reporting.walk.texts import PAGE


def write(walk: Walk, path: Path) -> Path:
    """The text to `path`, the pictures into images/<name>/ beside it."""
    folder = path.parent / "images" / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    words = PAGE[walk.lang]
    parts = [f"# {walk.title}\n\n{wrapped(walk.lead)}\n\n{wrapped(words['colours'])}\n"]
    for index, step in enumerate(walk.steps):
        parts.append(section(index, step, pictures(step, folder, path.parent), walk))
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False)


def pictures(step: Step, folder: Path, root: Path) -> list[str]:
    links = []
    for index, picture in enumerate(step.pictures):
        file = folder / f"{step.key}-{index + 1}.png"
        file.write_bytes(encoded(picture, "PNG"))
        links.append(f"![{re.sub(r'[][]', '', picture.caption)}]({file.relative_to(root).as_posix()})")
    return links


def section(index: int, step: Step, links: list[str], walk: Walk) -> str:
    words = PAGE[walk.lang]
    told = "  \n".join(f"{picture.caption}" for picture in step.pictures)
    code = "\n".join(f"`{one.where}`\n\n```python\n{one.text}\n```\n" for one in step.code)
    table = ""
    if step.key == "logits":
        rows = "".join(f"| {a.name} | {a.logit:.2f} | {a.probability:.1%} |\n" for a in walk.answers)
        table = f"\n| {words['class']} | {words['logit']} | {words['probability']} |\n|---|---|---|\n{rows}"
    shape = f"{words['shape']} {step.shape}"
    return (
        f"## {index + 1}. {step.title}\n\n{wrapped(step.text)}\n\n{equation(step.equation)}  ·  {shape}\n\n"
        f"{' '.join(links)}\n\n{told}\n{table}\n{code}"
    )
