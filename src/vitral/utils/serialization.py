"""Frozen dataclasses to plain dictionaries and back, with every mistake named: for TOML, JSON and checkpoints."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from vitral.errors import VitralError, nearest

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses to dictionaries, tuples to lists, fields that are None left out."""
    if dataclasses.is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_plain(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], values: Mapping[str, Any], where: str = "", kinds: Mapping[str, type] | None = None) -> T:
    """A dataclass from a dictionary: unknown fields are refused with the nearest known one, types are checked.

    `kinds`: what stands in a field whose annotation is a base class.
    """
    hints = typing.get_type_hints(cls) | dict(kinds or {})
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            inside = next((f"{group}.{name}" for group in known if name in fields_of(hints[group])), "")
            raise VitralError(
                f"no field '{where}{name}'.{f' Did you mean {where}{inside}?' if inside else nearest(name, known)}",
                f"Known{' in ' + where[:-1] if where else ''}: {', '.join(known)}",
            )
    needed = [
        name
        for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if lacking := [f"'{where}{name}'" for name in needed if name not in values]:
        several = f"fields {', '.join(lacking)} are" if len(lacking) > 1 else f"field {lacking[0]} is"
        raise VitralError(f"the {several} missing", f"needed: {', '.join(needed)}; all others have defaults")
    arguments = {name: _typed(hints[name], value, where + name) for name, value in values.items()}
    try:
        return cls(**arguments)
    except ValueError as error:
        raise VitralError(str(error), "put that value right") from error


def fields_of(hint: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(hint)} if dataclasses.is_dataclass(hint) else set()


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The value as its field wants it, or an error that names the field."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_plain(typing.cast(Any, hint), value, where + ".")
    if origin is Literal and value in choices:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(next(c for c in choices if c is not type(None)), value, where)
    if origin is tuple and isinstance(value, list | tuple):
        inner = choices[:1] * len(value) if choices[-1] is Ellipsis else choices
        if len(inner) == len(value):
            return tuple(_typed(kind, item, where) for kind, item in zip(inner, value, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    kind = hint.__name__ if isinstance(hint, type) else str(hint)
    wanted = f"one of {', '.join(map(str, choices))}" if origin is Literal else kind
    raise VitralError(
        f"{where} must be {wanted}, not {value!r}", "numbers are written bare, text in quotes, lists in brackets"
    )
