"""Pieces of HTML: everything that comes from outside is escaped here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from vitral.evaluation.bootstrap import Interval


def in_script(value: Any) -> str:
    """JSON that no class name can break out of."""
    return (
        json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def text(value: object) -> str:
    return escape(str(value))


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


def between(figure: Interval, digits: int = 2) -> str:
    return f"{percent(figure.low, digits)} – {percent(figure.high, digits)}"


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Two columns: a name and what it is."""
    return '<div class="wide"><table>' + "".join(
        f'<tr><th scope="row">{text(name)}</th><td class="text">{text(value)}</td></tr>' for name, value in pairs
    ) + "</table></div>"  # fmt: skip


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], caption: str = "") -> str:
    """The first column names the row. Cells are text."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{text(line[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in line[1:])}</tr>'
        for line in lines
    )
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def note(words: str) -> str:
    return f'<p class="note">{text(words)}</p>'
