"""Recipe files as plain values. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitral.errors import VitralError, error_reason
from vitral.utils.json_toml import read_toml


def read_recipe_values(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, not yet checked against the fields of a recipe."""
    try:
        return read_toml(path)
    except (OSError, UnicodeDecodeError) as error:
        raise VitralError(
            f"cannot read the recipe {path}: {error_reason(error)}",
            "`vitral recipes show NAME > FILE.toml` writes one",
        ) from error
    except ValueError as error:
        raise VitralError(
            f"{path} is not valid TOML: {error}", "`vitral recipes show NAME` prints a valid recipe"
        ) from error
