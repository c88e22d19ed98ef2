"""Long lines on a terminal, broken between words with a hanging indent."""

from __future__ import annotations

import textwrap


def wrap_line(line: str, width: int, indent: int) -> str:
    """Break a line at `width` columns and indent what follows. Words such as paths are not broken."""
    return textwrap.fill(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
