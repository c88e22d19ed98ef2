"""What `vitral bench` measured, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vitral.errors import typed
from vitral.inference.engine_selection import Measured


def show_measured(measured: Measured, source: str = "") -> None:
    """`source`: a checkpoint of another library, which keeps nothing."""
    console = Console(highlight=False)
    console.print(f"{measured.cpu} · {measured.made_by} · {measured.images:,} images compared\n")
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)  # ten columns in a terminal of 80
    for name in ("numbers", "cores", "batch", "p50 ms", "p95", "p99", "images/s", "MB", "as fp32", "twice"):
        table.add_column(name, justify="left" if name == "numbers" else "right", header_style="dim", no_wrap=True)
    last = None
    for row in measured.rows:
        if last is not None and (row.threads, row.batch) != last:
            table.add_row()
        last = row.threads, row.batch
        best = (row.precision, row.threads, row.batch) == (measured.precision, measured.threads, measured.batch)
        table.add_row(
            f"[bold]{row.precision}[/bold]" if best else row.precision,
            str(row.threads),
            str(row.batch),
            *(f"{ms:.1f}" for ms in (row.p50_ms, row.p95_ms, row.p99_ms)),
            f"[bold]{row.images_per_second:,.0f}[/bold]" if best else f"{row.images_per_second:,.0f}",
            f"{row.memory_mb:,.1f}",
            f"{row.agreement:.1%}",
            f"{row.again:.1%}" if row.precision.endswith("-checked") else "",
        )
    console.print(table)
    console.print("[dim]as fp32: the same first label. twice: asked again in surer numbers, where it was close.[/dim]")
    console.print(f"\n[bold]{measured.precision}[/bold]: {measured.why}. ", end="")
    console.print(
        f"To keep it, for predict and serve: vitral convert {typed(source)} FOLDER, then vitral bench FOLDER"
        if source
        else "predict and serve use it on this CPU.",
        soft_wrap=True,
    )
