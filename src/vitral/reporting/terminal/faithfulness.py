"""The faithfulness of explanation methods as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vitral.explain.faithfulness import RANDOM, FaithfulnessResult, Test
from vitral.utils.intervals import Interval
from vitral.utils.serialization import to_dict


def print_faithfulness(result: FaithfulnessResult) -> None:
    """Print the methods, best first, and the recommended one."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    for name in ("deletion ↓", "insertion ↑", "pointing ↑", "s/image"):
        table.add_column(name, justify="right")
    order = sorted(result.rows, key=lambda row: (row.method == RANDOM, row.deletion.value - row.insertion.value))
    for row in order:
        style = "bold" if row.method == result.best else "dim" if row.method == RANDOM else ""
        scores: tuple[tuple[Test, Interval | None], ...] = (
            ("deletion", row.deletion),
            ("insertion", row.insertion),
            ("pointing", row.pointing),
        )
        cells = [
            format_score(score, percent=test == "pointing") + (" " if not row.gains or row.beats_random(test) else "~")
            for test, score in scores
        ]
        table.add_row(row.method, *cells, f"{row.seconds:.3f}", style=style)
    console.print(table)
    pairs = f"{result.pairs} image pairs" if result.pairs else "no usable image pairs"
    console.print(
        f"\n{result.images} images, {pairs}; 95% bootstrap intervals. "
        "Random pointing is correct in 50% of the pairs.\n"
        "~ not better than random: the interval of the difference, paired by image, includes 0.\n\n"
        f"{result.recommendation()}",
        soft_wrap=True,
    )
    if result.best is None:
        console.print("More images give narrower intervals, for example --images 200")


def format_score(score: Interval | None, percent: bool = False) -> str:
    if score is None:
        return "–"
    if percent:
        return f"{score.value:.0%} ({100 * score.low:.0f}–{100 * score.high:.0f})"
    return f"{score.value:.2f} ({score.low:.2f}–{score.high:.2f})"


def faithfulness_to_dict(result: FaithfulnessResult) -> dict[str, Any]:
    """JSON form, in which the value of an interval is called mean."""

    def rename(values: Any) -> Any:
        if isinstance(values, dict):
            return {"mean" if name == "value" else name: rename(item) for name, item in values.items()}
        return [rename(item) for item in values] if isinstance(values, list) else values

    return dict(rename(to_dict(result)))
