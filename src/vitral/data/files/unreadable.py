"""Images that cannot be decoded.

In the training split, an unreadable image is replaced by another image of its class, so that classes keep their
weight; if images have several labels or real values, by the one with the closest labels. In the validation and test
splits it is dropped, so that no image counts twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from vitral.data.pixels import SUPPORTED_FORMATS
from vitral.data.targets import closest_rows
from vitral.errors import VitralError

HINT = "Repair or remove the files, or allow a larger fraction with --data.unreadable"


def check_unreadable_fraction(errors: Iterable[str], count: int, max_fraction: float) -> None:
    """Raise VitralError if more than `max_fraction` of `count` images are unreadable."""
    messages = sorted(errors)
    if messages and len(messages) == count:
        raise VitralError(f"none of the {count:,} images can be read: {messages[0]}", SUPPORTED_FORMATS)
    if len(messages) > max_fraction * count:
        fraction = math.ceil(100 * len(messages) / count) / 100
        files = "; ".join(message.split(": ")[0] for message in messages[:5])
        verb = "is" if len(messages) == 1 else "are"
        raise VitralError(
            f"{len(messages):,} of {count:,} images {verb} unreadable, more than {max_fraction:.1%}: {messages[0]}",
            f"{HINT} {fraction}. Unreadable: {files}",
        )


def replacement_for(row: int, labels: np.ndarray[Any, Any], unreadable_rows: Iterable[int]) -> int:
    """The readable image that replaces an unreadable one: the next one of its class, or with the closest labels."""
    unreadable = set(unreadable_rows)
    for other in closest_rows(row, labels):
        if other not in unreadable:
            return other
    raise VitralError("all images of a class are unreadable", "Repair or remove the files, or remove the class")


def replace_or_drop_unreadable(
    images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], errors: dict[int, str], *, replace: bool
) -> np.ndarray[Any, Any]:
    """Replace unreadable rows in place, or move the readable ones to the front. Returns the labels that remain."""
    if not errors:
        return labels
    if replace:
        for row in errors:
            source = replacement_for(row, labels, errors)
            images[row] = images[source]
            if labels.ndim > 1:  # the replacement may have other labels
                labels[row] = labels[source]
        return labels
    readable = np.array([row for row in range(len(labels)) if row not in errors], dtype=np.int64)
    for new, old in enumerate(readable):
        if new != old:
            images[new] = images[old]
    return labels[readable]


def warn_unreadable(error: str) -> None:
    print(f"warning: unreadable image replaced by another one: {error}", file=sys.stderr)
