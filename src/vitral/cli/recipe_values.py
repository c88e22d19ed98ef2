"""The values of a recipe's fields, for `vitral train --help`, without importing torch.

Built-in recipes are Python functions that need torch; builtin_values.toml holds their values. A test compares the two,
and `python tools/write_recipe_values.py` writes the file again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitral.errors import unknown_name_error
from vitral.recipes.files import read_recipe_values
from vitral.utils.json_toml import parse_toml


@cache
def builtin_values() -> dict[str, dict[str, Any]]:
    """The fields of each built-in recipe that differ from the defaults of their classes, by dotted path."""
    text = (files("vitral.recipes") / "builtin_values.toml").read_text(encoding="utf-8")
    return parse_toml(text)


def varying_fields() -> set[str]:
    """Paths of fields that some built-in recipe sets."""
    return {path for values in builtin_values().values() for path in values}


def chosen_recipe(recipe: str | None, data: str | None, has_checkpoint: bool, resume: Path | None = None) -> str | None:
    """Name or file of the recipe that training uses; None if nothing determines it. As `resolve_recipe` chooses."""
    if resume is not None:
        return str(resume / "recipe.toml")
    if recipe is not None or data is None:
        return recipe or ("folder-finetune" if has_checkpoint else None)
    if has_checkpoint:
        return "folder-finetune"
    return data if builtin_values().get(data, {}).get("data.name") == data else "folder-scratch"


def recipe_values(name: str) -> dict[str, Any]:
    """Field values by dotted path: of a built-in recipe those that differ from the defaults, of a TOML file all."""
    if name.endswith(".toml"):
        return flatten(read_recipe_values(Path(name)))
    if name not in builtin_values():
        raise unknown_name_error("recipe", name, builtin_values())
    return flatten(builtin_values()[name])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted paths, arrays as tuples."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = tuple(value) if isinstance(value, list) else value
    return flat
