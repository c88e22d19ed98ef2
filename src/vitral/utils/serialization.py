"""Conversion between frozen dataclasses and plain dictionaries, for TOML, JSON and checkpoints."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from vitral.errors import VitralError, did_you_mean, short_repr

T = TypeVar("T")


class InvalidValueError(VitralError):
    """A field has the right type, but a value that its dataclass refuses."""


def to_dict(value: Any) -> Any:
    """Convert dataclasses to dictionaries and tuples to lists, at any depth. Fields that are None are left out."""
    if dataclasses.is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_dict(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    if isinstance(value, Mapping):
        return {name: to_dict(item) for name, item in value.items()}
    return value


def from_dict(
    cls: type[T], values: Mapping[str, Any], prefix: str = "", field_types: Mapping[str, type] | None = None
) -> T:
    """Build a dataclass from a dictionary. Raises VitralError for unknown fields, missing fields and wrong types.

    `prefix` precedes field names in messages, for example "model.". `field_types` replaces the annotations of fields
    that are annotated with a base class.
    """
    types_by_name = typing.get_type_hints(cls) | dict(field_types or {})
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise _unknown_field_error(name, types_by_name, list(fields), prefix)
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing := [f"'{prefix}{name}'" for name in required if name not in values]:
        subject = f"fields {', '.join(missing)} are" if len(missing) > 1 else f"field {missing[0]} is"
        raise VitralError(f"the {subject} missing", f"Required: {', '.join(required)}; all other fields have defaults")
    arguments = {name: _convert(types_by_name[name], value, prefix + name) for name, value in values.items()}
    try:
        return cls(**arguments)
    except ValueError as error:
        defaults = {prefix + name: f.default for name, f in fields.items()}
        hint = named_values(str(error), defaults)
        raise InvalidValueError(str(error), f"Default: {hint}" if hint else "Change this value, or omit it") from error


def named_values(message: str, values: Mapping[str, Any]) -> str:
    """The fields that a message names, with their values: `batch_size 128, grad_accum 1`."""
    words = set(re.findall(r"[\w.]+", message))
    simple = {name: value for name, value in values.items() if isinstance(value, int | float | str) and value != ""}
    return ", ".join(f"{name} {value}" for name, value in simple.items() if name in words)


def field_names(cls: Any) -> set[str]:
    """Field names of a dataclass; empty for other types."""
    return {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _unknown_field_error(name: str, types_by_name: Mapping[str, Any], fields: list[str], prefix: str) -> VitralError:
    nested = next((f"{group}.{name}" for group in fields if name in field_names(types_by_name[group])), None)
    suggestion = f". Did you mean '{prefix}{nested}'?" if nested else did_you_mean(name, fields)
    group = f" in {prefix[:-1]}" if prefix else ""
    return VitralError(f"no field named '{prefix}{name}'{suggestion}", f"Fields{group}: {', '.join(fields)}")


def _convert(expected: Any, value: Any, name: str) -> Any:
    """The value converted to the annotated type, or a VitralError that names the field."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if dataclasses.is_dataclass(expected) and isinstance(value, Mapping):
        return from_dict(typing.cast(Any, expected), value, name + ".")
    if origin is Literal and value in arguments:
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(next(a for a in arguments if a is not type(None)), value, name)
    if origin is tuple and isinstance(value, list | tuple):
        item_types = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(item_types) == len(value):
            return tuple(_convert(item_type, item, name) for item_type, item in zip(item_types, value, strict=True))
    if expected is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if expected in (int, str, bool) and type(value) is expected:
        return value
    type_name = expected.__name__ if isinstance(expected, type) else str(expected)
    description = f"one of {', '.join(map(str, arguments))}" if origin is Literal else type_name
    raise VitralError(
        f"{name} must be {description}, got {short_repr(value)}",
        "Write numbers bare, text in quotes and lists in brackets",
    )
