"""Long lines are broken between words, with a hanging indent."""

from __future__ import annotations

import sys

from vitral.utils.wrapping import wrap_line


def test_long_lines_are_continued_with_an_indent_and_words_stay_whole() -> None:
    path = "runs/a-name-that-is-longer-than-the-line"
    lines = wrap_line(f"  mean 0.5 from config.json of {path}  or not", 24, indent=4).splitlines()
    assert lines == ["  mean 0.5 from", "    config.json of", f"    {path}", "    or not"]
    assert wrap_line("  two  spaces", sys.maxsize, indent=4) == "  two  spaces"
