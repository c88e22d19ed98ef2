"""The result of `vitral bench` as a table."""

from __future__ import annotations

from rich.console import Console

from vitral.errors import shell_quote
from vitral.inference.bench_results import BenchResult, BenchRow
from vitral.reporting.terminal.tables import make_table
from vitral.utils.text import count_text

# Short names: ten columns have to fit 80 characters.
COLUMNS = ("engine", "threads", "batch", "p50 ms", "p95", "p99", "images/s", "MB", "agree", "recheck")


def print_bench(result: BenchResult, model: str, *, is_stored: bool, device: str = "CPU") -> None:
    """Print all rows and the recommended engine. Results of checkpoints of other libraries are not stored."""
    console = Console(highlight=False)
    console.print(f"{result.cpu} · {result.versions} · {result.date}")
    console.print(f"{count_text(result.images, 'image')}, calibrated on {result.calibration_images:,} others\n")
    table = make_table(COLUMNS, left=("engine",))
    table.padding, table.pad_edge = (0, 0, 0, 1), False
    previous_group = None
    for row in result.rows:
        group = row.threads, row.batch_size
        if previous_group not in (None, group):
            table.add_row()
        previous_group = group
        table.add_row(
            *bench_cells(row, is_best=(row.engine, *group) == (result.engine, result.threads, result.batch_size))
        )
    console.print(table)
    console.print("[dim]agree: same top-1 label as fp32. recheck: images with a close result, computed again.[/dim]")
    console.print(f"\n[bold]{result.engine}[/bold]: {result.reason}.", soft_wrap=True)
    name = shell_quote(model)
    if not is_stored:
        console.print(f"To store this choice: vitral convert {name} FOLDER, then vitral bench FOLDER", soft_wrap=True)
        return
    console.print(
        f"predict, evaluate and serve use {result.engine} on this {device}. "
        f"See this choice with vitral bench {name} --show, undo it with vitral bench {name} --reset.",
        soft_wrap=True,
    )


def bench_cells(row: BenchRow, is_best: bool) -> list[str]:
    speed = f"{row.images_per_second:,.0f}"
    return [
        f"[bold]{row.engine}[/bold]" if is_best else row.engine,
        str(row.threads),
        str(row.batch_size),
        *(f"{ms:.1f}" for ms in (row.p50_ms, row.p95_ms, row.p99_ms)),
        f"[bold]{speed}[/bold]" if is_best else speed,
        f"{row.memory_mb:,.1f}",
        f"{row.agreement:.1%}",
        f"{row.recheck_rate:.1%}" if row.engine.endswith("-cascade") else "",
    ]
