"""Text for people."""

from __future__ import annotations


def count_text(count: int, noun: str) -> str:
    """ "1 image", "2,000 images" """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
