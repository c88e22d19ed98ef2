"""griffe extension: the fields of dataclasses and named tuples, with their comments, as attributes in the reference."""

from __future__ import annotations

from typing import Any

import griffe

from vitral.cli.config_fields import field_comments


class FieldComments(griffe.Extension):
    """Appends an `Attributes:` section to the docstring of each class of fields."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if not has_fields(cls):
            return
        fields: dict[str, str] = {}
        for definition in (*reversed(cls.mro()), cls):
            if has_fields(definition):
                fields |= field_comments(definition.module.path, definition.name)
        lines = [f"    {name}: {escape(comment)}" for name, comment in fields.items() if not name.startswith("_")]
        text = cls.docstring.value if cls.docstring else ""
        cls.docstring = griffe.Docstring("\n".join([text, "", "Attributes:", *lines]).strip(), parent=cls)


def escape(comment: str) -> str:
    """The comment with brackets outside of code that are not read as links or tags."""
    parts = comment.split("`")
    parts[::2] = (part.replace("[", "&#91;").replace("<", "&lt;") for part in parts[::2])
    return "`".join(parts)


def has_fields(cls: griffe.Class) -> bool:
    """Whether the class is a dataclass or a named tuple of a module."""
    is_dataclass = any("dataclass" in str(decorator.value) for decorator in cls.decorators)
    return (is_dataclass or "NamedTuple" in map(str, cls.bases)) and isinstance(cls.parent, griffe.Module)
