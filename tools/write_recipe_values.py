"""Write src/vitral/recipes/builtin_values.toml, from which `vitral train --help` reads the values of the recipes.

python tools/write_recipe_values.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

import vitral
from vitral.cli.config_fields import read_config_fields
from vitral.cli.recipe_values import flatten
from vitral.recipes.builtin import RECIPES
from vitral.recipes.schema import arrays_on_one_line
from vitral.utils.serialization import to_dict

HEADER = (
    "# Written by tools/write_recipe_values.py: fields of the built-in recipes that differ from their defaults.\n\n"
)


def changed_values() -> dict[str, dict[str, Any]]:
    """For each built-in recipe the fields that differ from the defaults in the source, by dotted path."""
    fields = (
        *read_config_fields("vitral.recipes.schema", "Recipe"),
        *read_config_fields("vitral.models.variants.hybrid", "HybridConfig", "model."),
    )
    defaults = {field.path: field.default for field in fields}
    return {
        name: {
            path: value
            for path, value in flatten(to_dict(make_recipe())).items()
            if path not in defaults or defaults[path] != value
        }
        for name, make_recipe in RECIPES.items()
    }


def render() -> str:
    return HEADER + arrays_on_one_line(tomli_w.dumps(changed_values()))


if __name__ == "__main__":
    path = Path(vitral.__file__).parent / "recipes" / "builtin_values.toml"
    path.write_text(render(), encoding="utf-8")
    print(f"Wrote {path}")
