"""Fields of the configuration dataclasses, read from their source.

`vitral train --help` lists every field of a recipe with its type, default and comment. The classes are defined next to
what they configure, in modules that import torch, and comments are not available at run time. Reading the source gives
all of it in a few milliseconds and without importing torch.

The help text of a field is its trailing comment, the comment lines directly above it, or the string below it.
Supported annotations: int, float, str, bool, Literal, tuple, X | None and other dataclasses of the package.
"""

from __future__ import annotations

import ast
import itertools
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import vitral

NO_DEFAULT: Any = object()
BUILTIN_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "Path": Path}


@dataclass(frozen=True)
class ConfigField:
    """A leaf field: `path` is dotted (`optim.lr`), `default` is NO_DEFAULT for required fields."""

    path: str
    type: Any
    default: Any
    help: str


@cache  # parsing a command line and printing its help read the fields several times
def read_config_fields(module: str, class_name: str, prefix: str = "") -> tuple[ConfigField, ...]:
    """Leaf fields of a dataclass and of the dataclasses nested in it, in the order of the source.

    Args:
        module: Module that defines the class, e.g. `vitral.recipes.schema`.
        class_name: Name of the dataclass.
        prefix: Put in front of every path, e.g. `model.`.
    """
    source = _source(module)
    definition = source.lookup(class_name)[1]
    if not isinstance(definition, ast.ClassDef):
        raise TypeError(f"{module}.{class_name} is not a class")
    return tuple(_class_fields(_ClassRef(source, definition), prefix))


def field_comments(module: str, class_name: str) -> dict[str, str]:
    """The help texts of the fields that a dataclass or named tuple itself defines, by name; "" if there is none."""
    source = _source(module)
    definition = source.lookup(class_name)[1]
    if not isinstance(definition, ast.ClassDef):
        raise TypeError(f"{module}.{class_name} is not a class")
    return {name: field.help for name, field in _ClassRef(source, definition).own_fields()}


@dataclass(frozen=True, eq=False)
class _ClassRef:
    """A class in the source, in place of the type that importing the module would give."""

    source: _Source
    node: ast.ClassDef

    def annotated_fields(self) -> dict[str, _AnnotatedField]:
        """Annotated assignments of the class and its bases, by name; a base's fields come first."""
        fields: dict[str, _AnnotatedField] = {}
        for base in self.node.bases:
            if isinstance(base, ast.Name):
                source, definition = self.source.lookup(base.id)
                if isinstance(definition, ast.ClassDef):
                    fields |= _ClassRef(source, definition).annotated_fields()
        return fields | dict(self.own_fields())

    def own_fields(self) -> Iterator[tuple[str, _AnnotatedField]]:
        """Name and field of each annotated assignment of the class itself."""
        for node, following in itertools.pairwise([*self.node.body, None]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id, _AnnotatedField(self.source, node, following)


@dataclass(frozen=True, eq=False)
class _AnnotatedField:
    """`name: type = default  # comment` in the source, and the statement after it."""

    source: _Source
    node: ast.AnnAssign
    following: ast.stmt | None

    @property
    def help(self) -> str:
        if isinstance(self.following, ast.Expr) and isinstance(self.following.value, ast.Constant):
            return " ".join(str(self.following.value.value).split())
        lines = self.source.lines
        last_line = lines[(self.node.end_lineno or self.node.lineno) - 1]
        if comment := _trailing_comment(last_line) or _trailing_comment(lines[self.node.lineno - 1]):
            return comment
        first = self.node.lineno - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        return " ".join(line.strip().lstrip("# ") for line in lines[first : self.node.lineno - 1])


def _trailing_comment(line: str) -> str:
    code, _, comment = line.partition("#")
    if not comment or not set("\"'") & set(code):  # no string that may contain the #: tokenising would take longer
        return comment.strip("# \n")
    with suppress(tokenize.TokenError):  # the line is the end of a longer expression
        for token in tokenize.generate_tokens(iter([line.strip()]).__next__):
            if token.type == tokenize.COMMENT:
                return token.string.lstrip("# ")
    return ""


class _Source:
    """One parsed module."""

    def __init__(self, module: str) -> None:
        path = Path(vitral.__file__).parent.joinpath(*module.split(".")[1:])
        self.text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def lookup(self, name: str) -> tuple[_Source, ast.expr | ast.ClassDef]:
        """Resolve a module-level name, through imports, to its class definition or assigned expression."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return self, node.value
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _source(node.module).lookup(alias.name)
        raise KeyError(name)


@cache
def _source(module: str) -> _Source:
    return _Source(module)


def _class_fields(ref: _ClassRef, prefix: str) -> Iterator[ConfigField]:
    for name, field in ref.annotated_fields().items():
        source, annotation = field.source, field.node.annotation
        kind = _resolve_type(source, annotation)
        nested = kind if isinstance(kind, _ClassRef) else _nested_optional(source, annotation)
        if nested is not None:
            yield from _class_fields(nested, f"{prefix}{name}.")
        else:
            yield ConfigField(prefix + name, kind, _resolve_default(source, field.node.value), field.help)


def _nested_optional(source: _Source, annotation: ast.expr) -> _ClassRef | None:
    """The class in `Class | None`."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.left, ast.Name):
        kind = _resolve_type(source, annotation.left)
        return kind if isinstance(kind, _ClassRef) else None
    return None


def _resolve_type(source: _Source, node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=value) if value is ...:
            return ...
        case ast.Name(id=name) if name in BUILTIN_TYPES:
            return BUILTIN_TYPES[name]
        case ast.Name(id=name):
            origin, definition = source.lookup(name)
            return (
                _ClassRef(origin, definition)
                if isinstance(definition, ast.ClassDef)
                else _resolve_type(origin, definition)
            )
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            values = ast.literal_eval(choices)
            return Literal[values if isinstance(values, tuple) else (values,)]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=items):
            elements = items.elts if isinstance(items, ast.Tuple) else [items]
            return tuple[tuple(_resolve_type(source, element) for element in elements)]  # type: ignore[misc]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            kinds = _resolve_type(source, left), _resolve_type(source, right)
            return None if any(isinstance(kind, _ClassRef) for kind in kinds) else kinds[0] | kinds[1]
    raise TypeError(f"unsupported annotation: {ast.unparse(node)}")


def _resolve_default(source: _Source, node: ast.expr | None) -> Any:
    """The value of a default, if the source contains it: a literal, a constant of the module, or `Class.field`."""
    match node:
        case None:
            return NO_DEFAULT
        case ast.Name(id=name):
            origin, definition = source.lookup(name)
            return NO_DEFAULT if isinstance(definition, ast.ClassDef) else _resolve_default(origin, definition)
        case ast.Attribute(value=ast.Name(id=class_name), attr=field_name):
            origin, definition = source.lookup(class_name)
            if isinstance(definition, ast.ClassDef):
                field = _ClassRef(origin, definition).annotated_fields()[field_name]
                return _resolve_default(field.source, field.node.value)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NO_DEFAULT
