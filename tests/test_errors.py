"""Helpers for error messages."""

from __future__ import annotations

from vitral.errors import one_line


def test_control_characters_are_escaped_and_other_text_is_kept() -> None:
    assert one_line("a\nb\x1b[31m\0\u202e é 한국어 \udcff") == "a\\nb\\x1b[31m\\x00\\u202e é 한국어 \udcff"


def test_the_middle_of_a_long_text_is_left_out() -> None:
    text = one_line("a" * 10**6 + "b")
    assert len(text) < 1010
    assert text.startswith("aaa")
    assert text.endswith("ab")
