"""The walk on a terminal: pictures in half blocks, two pixels a character; in shades where there are no colours."""

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

from vitral.reporting.walk.steps import Array, Picture, Walk
from vitral.reporting.walk.texts import PAGE

SHADES = " ░▒▓█"
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
ACROSS = 56  # characters of a picture, at most


def show(walk: Walk, console: Console | None = None, code: bool = True) -> None:
    console = console or Console(highlight=False)
    words = PAGE[walk.lang]
    console.print(f"[bold]{escape(walk.title)}[/bold]\n")
    console.print(Text(walk.lead))
    for index, step in enumerate(walk.steps):
        console.print(f"\n[bold cyan]{index + 1}  {escape(step.title)}[/bold cyan]   [dim]{step.shape}[/dim]")
        console.print(Padding(Text(step.text), (0, 0, 0, 3), expand=False))
        console.print(Padding(Text(equation(step.equation), style="italic"), (1, 0, 1, 3), expand=False))
        pictures = step.pictures if len(step.pictures) <= 4 else (step.pictures[0], step.pictures[-1])
        for picture in pictures:
            console.print(Padding(drawn(picture, console), (0, 0, 1, 3), expand=False))
        for one in step.code if code else ():
            console.print(f"   [dim]{escape(one.where)}, {words['line']} {one.line}[/dim]")
            plain = Syntax(one.text, "python", theme="ansi_dark", background_color="default", word_wrap=True)
            console.print(Padding(plain, (0, 0, 1, 3), expand=False))
    for answer in walk.answers:
        bar = "█" * round(20 * answer.probability)
        console.print(
            f"   {escape(answer.name):<22} {answer.logit:8.2f}   {answer.probability:6.1%} [cyan]{bar}[/cyan]"
        )


def equation(text: str) -> str:
    """z_{0} → z₀, x^{2} → x²; what has no such letter stands behind _ or ^."""

    def low(match: re.Match[str]) -> str:
        return match[1].translate(SUBSCRIPT) if match[1].isdigit() else f"_{match[1]}"

    def high(match: re.Match[str]) -> str:
        power = match[1] if len(match[1]) == 1 else f"({match[1]})"
        return match[1].translate(SUPERSCRIPT) if match[1].isdigit() else f"^{power}"

    return re.sub(r"\^\{([^}]*)\}", high, re.sub(r"_\{([^}]*)\}", low, text))


def drawn(picture: Picture, console: Console) -> RenderableType:
    caption = Text(picture.caption, style="dim")
    pixels = fitted(picture.pixels, min(ACROSS, max(console.width - 6, 8)))
    lines = half_blocks(pixels) if console.color_system else shades(pixels)
    return Group(*lines, caption)


def fitted(pixels_hw3: Array, across: int) -> Array:
    """At most `across` pixels wide and as many high, an even number."""
    h, w, _ = pixels_hw3.shape
    shrink = min(across / w, across / h, 1.0)
    size = max(round(w * shrink), 1), max(round(h * shrink / 2), 1) * 2
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels_hw3)).resize(size, Image.Resampling.BOX))


def half_blocks(pixels_hw3: Array) -> Iterator[Text]:
    for upper, lower in zip(pixels_hw3[::2], pixels_hw3[1::2], strict=True):
        line = Text()
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            colour = Style(color="rgb({},{},{})".format(*above), bgcolor="rgb({},{},{})".format(*below))
            line.append("▀", style=colour)
        yield line


def shades(pixels_hw3: Array) -> Iterator[Text]:
    """Light and dark alone: the mean of two rows, for characters are twice as high as they are wide."""
    light = pixels_hw3.astype(float).mean(axis=2).reshape(-1, 2, pixels_hw3.shape[1]).mean(axis=1)
    span = max(float(np.ptp(light)), 1.0)
    steps = ((light - light.min()) / span * (len(SHADES) - 1)).round().astype(int)
    for row in steps.tolist():
        yield Text("".join(SHADES[step] for step in row))
