"""Text for people."""

from __future__ import annotations

import pytest

from vitral.utils.text import count_text


@pytest.mark.parametrize(("count", "expected"), [(0, "0 images"), (1, "1 image"), (2000, "2,000 images")])
def test_a_count_has_its_noun_in_the_right_number(count: int, expected: str) -> None:
    assert count_text(count, "image") == expected
