"""The faithfulness of explanation methods as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vitral.explain.faithfulness import RANDOM, FaithfulnessResult, MeanWithInterval
from vitral.utils.serialization import to_dict


def print_faithfulness(result: FaithfulnessResult) -> None:
    """Print the methods, best first, and the recommended one."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    for name in ("deletion ↓", "insertion ↑", "pointing ↑", "s/image"):
        table.add_column(name, justify="right")
    order = sorted(result.rows, key=lambda row: (row.method == RANDOM, row.deletion.mean - row.insertion.mean))
    for row in order:
        style = "bold" if row.method == result.best else "dim" if row.method == RANDOM else ""
        cells = (format_score(row.deletion), format_score(row.insertion), format_score(row.pointing, percent=True))
        table.add_row(row.method, *cells, f"{row.seconds:.3f}", style=style)
    console.print(table)
    pairs = f"{result.pairs} image pairs" if result.pairs else "no usable image pairs"
    console.print(
        f"\n{result.images} images, {pairs}; 95% bootstrap intervals. "
        "Random pointing is correct in 50% of the pairs.\n\n"
        f"Recommended for this model: [bold]{result.best}[/bold] ({result.recommendation_reason()})",
        soft_wrap=True,
    )


def format_score(score: MeanWithInterval | None, percent: bool = False) -> str:
    if score is None:
        return "–"
    if percent:
        return f"{score.mean:.0%} ({100 * score.low:.0f}–{100 * score.high:.0f})"
    return f"{score.mean:.2f} ({score.low:.2f}–{score.high:.2f})"


def faithfulness_to_dict(result: FaithfulnessResult) -> dict[str, Any]:
    values: dict[str, Any] = to_dict(result)
    return values
