"""How far each method's maps can be trusted: a table, a picture of the curves, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from vitral.explain.faithfulness import RANDOM, Faithfulness, Score
from vitral.reporting.figures.training import GRAY, save
from vitral.utils.serialization import to_plain


def show(result: Faithfulness) -> None:
    """A table, best first, and which method to use."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    for name in ("deletion ↓", "insertion ↑", "pointing ↑", "seconds"):
        table.add_column(name, justify="right")
    order = sorted(result.rows, key=lambda row: (row.method == RANDOM, row.deletion.mean - row.insertion.mean))
    for row in order:
        style = "bold" if row.method == result.best else "dim" if row.method == RANDOM else ""
        cells = (told(row.deletion), told(row.insertion), told(row.pointing, share=True))
        table.add_row(row.method, *cells, f"{row.seconds:.3f}", style=style)
    console.print(table)
    pairs = f"{result.pairs} pairs" if result.pairs else "no pair that this model knows side by side"
    console.print(
        f"\n{result.images} images, {pairs}; 95 % bootstrap intervals; chance points right half of the time.\n\n"
        f"For this model: [bold]{result.best}[/bold] ({result.why()})",
        soft_wrap=True,
    )


def told(score: Score | None, share: bool = False) -> str:
    if score is None:
        return "–"
    if share:
        return f"{score.mean:.0%} ({100 * score.low:.0f}–{100 * score.high:.0f})"
    return f"{score.mean:.2f} ({score.low:.2f}–{score.high:.2f})"


def as_dict(result: Faithfulness) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(result)
    return plain


def curves(result: Faithfulness, path: Path) -> Path:
    """Both curves of every method, the random baseline dashed."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    deletion, insertion = figure.subplots(1, 2, sharey=True)
    colours = colormaps["viridis"](np.linspace(0, 0.92, max(len(result.rows) - 1, 1)))
    styles = ["-", "--", "-.", (0, (1, 1))]  # told apart without colours too
    for axes, title, curve in (
        (deletion, "covered first: lower is better", "deleted"),
        (insertion, "shown first: higher is better", "inserted"),
    ):
        for index, row in enumerate(result.rows):
            values = getattr(row, curve)
            share = np.linspace(0, 1, len(values))
            chance = row.method == RANDOM
            look: dict[str, Any] = (
                {"color": GRAY, "ls": ":", "lw": 2}
                if chance
                else {
                    "color": colours[index],
                    "ls": styles[index % 4],
                    "lw": 2.5 if row.method == result.best else 1.3,
                }
            )
            axes.plot(share, values, label=row.method, **look)
        axes.set(title=title, xlabel="share of the patches", ylim=(0, 1.02), xlim=(0, 1))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    deletion.set_ylabel("probability of the model's answer")
    insertion.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, path)
