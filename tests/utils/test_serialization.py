"""Dataclasses as plain dictionaries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from vitral.utils.serialization import to_dict


@dataclass(frozen=True)
class Inner:
    values: tuple[int, ...] = (1, 2)
    missing: int | None = None


@dataclass(frozen=True)
class Outer:
    by_name: Mapping[str, Inner] = field(default_factory=lambda: {"first": Inner()})
    inner: Inner = field(default_factory=Inner)


def test_dataclasses_inside_dictionaries_are_converted() -> None:
    expected = {"by_name": {"first": {"values": [1, 2]}}, "inner": {"values": [1, 2]}}
    assert to_dict(Outer()) == expected
    assert json.loads(json.dumps(to_dict(Outer()))) == expected
