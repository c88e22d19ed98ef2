"""The walk on a terminal: figures in half blocks, two pixels per character, or in shades without colour support."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from PIL import Image
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text

from vitral.reporting.figures.style import Array
from vitral.reporting.walk.steps import StepFigure, Walk, WalkStep
from vitral.reporting.walk.texts import PAGE_TEXTS

SHADES = " ░▒▓█"
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
MAX_FIGURE_WIDTH = 56  # characters
MAX_FIGURES = 4  # of a step with more figures, the first and the last are shown


def print_walk(walk: Walk, console: Console | None = None, code: bool = True) -> None:
    console = console or Console(highlight=False)
    console.print(f"[bold]{escape(walk.title)}[/bold]\n")
    console.print(Text(walk.intro))
    for number, step in enumerate(walk.steps, start=1):
        print_step(number, step, console, PAGE_TEXTS[walk.lang]["line"] if code else None)
    for score in walk.top_classes:
        bar = "█" * round(20 * score.probability)
        console.print(f"   {escape(score.name):<22} {score.logit:8.2f}   {score.probability:6.1%} [cyan]{bar}[/cyan]")


def print_step(number: int, step: WalkStep, console: Console, line_text: str | None) -> None:
    """Print one step. line_text: template for the line number of source code; None: no source code."""
    console.print(f"\n[bold cyan]{number}  {escape(step.title)}[/bold cyan]   [dim]{step.shape}[/dim]")
    console.print(Padding(Text(step.text), (0, 0, 0, 3), expand=False))
    console.print(Padding(Text(render_equation(step.equation), style="italic"), (1, 0, 1, 3), expand=False))
    figures = step.figures if len(step.figures) <= MAX_FIGURES else (step.figures[0], step.figures[-1])
    for figure in figures:
        console.print(Padding(render_figure(figure, console), (0, 0, 1, 3), expand=False))
    if line_text is None:
        return
    for excerpt in step.code:
        console.print(f"   [dim]{escape(excerpt.location)}, {line_text.format(line=excerpt.line)}[/dim]")
        syntax = Syntax(excerpt.text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        console.print(Padding(syntax, (0, 0, 1, 3), expand=False))


def render_equation(text: str) -> str:
    """z_{0} → z₀, x^{2} → x²; other subscripts and superscripts keep _ or ^."""

    def subscript(match: re.Match[str]) -> str:
        return match[1].translate(SUBSCRIPT) if match[1].isdigit() else f"_{match[1]}"

    def superscript(match: re.Match[str]) -> str:
        exponent = match[1] if len(match[1]) == 1 else f"({match[1]})"
        return match[1].translate(SUPERSCRIPT) if match[1].isdigit() else f"^{exponent}"

    return re.sub(r"\^\{([^}]*)\}", superscript, re.sub(r"_\{([^}]*)\}", subscript, text))


def render_figure(figure: StepFigure, console: Console) -> RenderableType:
    caption = Text(figure.caption, style="dim")
    pixels = fit(figure.pixels, min(MAX_FIGURE_WIDTH, max(console.width - 6, 8)))
    lines = half_blocks(pixels) if console.color_system else shades(pixels)
    return Group(*lines, caption)


def fit(pixels_hw3: Array, max_side: int) -> Array:
    """Shrink to at most `max_side` pixels in both directions, with an even height."""
    h, w, _ = pixels_hw3.shape
    scale = min(max_side / w, max_side / h, 1.0)
    size = max(round(w * scale), 1), max(round(h * scale / 2), 1) * 2
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels_hw3)).resize(size, Image.Resampling.BOX))


def half_blocks(pixels_hw3: Array) -> Iterator[Text]:
    for upper_row, lower_row in zip(pixels_hw3[::2], pixels_hw3[1::2], strict=True):
        line = Text()
        for upper, lower in zip(upper_row.tolist(), lower_row.tolist(), strict=True):
            style = Style(color="rgb({},{},{})".format(*upper), bgcolor="rgb({},{},{})".format(*lower))
            line.append("▀", style=style)
        yield line


def shades(pixels_hw3: Array) -> Iterator[Text]:
    """Brightness only. Two rows are averaged, because characters are twice as high as wide."""
    brightness = pixels_hw3.astype(float).mean(axis=2).reshape(-1, 2, pixels_hw3.shape[1]).mean(axis=1)
    value_range = max(float(np.ptp(brightness)), 1.0)
    levels = ((brightness - brightness.min()) / value_range * (len(SHADES) - 1)).round().astype(int)
    for row in levels.tolist():
        yield Text("".join(SHADES[level] for level in row))
