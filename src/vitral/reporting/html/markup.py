"""HTML fragments. Everything that comes from outside, such as class names, is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from vitral.utils.intervals import Interval
from vitral.utils.json_toml import dump_json


def json_for_script(value: Any) -> str:
    """JSON that cannot close the surrounding script element."""
    return (
        dump_json(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )


def text(value: object) -> str:
    return escape(str(value))


def percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f}%"


def interval(value: Interval, digits: int = 2) -> str:
    return f"{100 * value.low:.{digits}f}–{percent(value.high, digits)}"


def definition_table(pairs: Iterable[tuple[str, str]]) -> str:
    """A table of two columns: name and value."""
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th><td class="text">{text(value)}</td></tr>' for name, value in pairs
    )
    return f'<div class="wide"><table class="definitions">{rows}</table></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table of text cells; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    caption = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def note(content: str) -> str:
    return f'<p class="note">{text(content)}</p>'
