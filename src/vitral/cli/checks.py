"""Checks of a command's arguments that need neither torch nor the data: a mistyped name is reported at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vitral import bundled
from vitral.errors import VitralError, truncate_list, unknown_name_error


def check_inputs(
    *models: str | None,
    data: str | None = None,
    sources: Sequence[str] = (),
    images: Sequence[Path] = (),
    labels: Path | None = None,
    recipe: str | None = None,
) -> None:
    """Raise VitralError for a model, dataset, image, list of class names or recipe file that does not exist.

    Arguments that are None are not checked. Images are refused only if none of them exists: of several, the others
    are read. `sources` are those of unlabelled images, all of which must exist.
    """
    for model in models:
        if model is not None:
            check_model(model)
    if images and not any(path.exists() for path in images):
        is_one = len(images) == 1
        names = truncate_list([str(path) for path in images])
        raise VitralError(
            f"no such file or folder: {names}" if is_one else f"none of these files exists: {names}",
            "Pass image files or folders of images",
        )
    if data is not None:
        from vitral.data.names import check_dataset_exists

        check_dataset_exists(data)
    for source in sources:
        from vitral.data.names import check_source_exists

        check_source_exists(source)
    if labels is not None:
        from vitral.data.names import read_class_names

        read_class_names(labels)
    if recipe is not None:
        check_recipe(recipe)


def check_output(path: Path | None) -> None:
    """Raise VitralError if a file or folder cannot be written to, before the work whose result goes there."""
    if path is None:
        return
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir() and existing != path:
        raise VitralError(f"cannot write {path}: {existing} is not a folder", "Choose another path")
    if not os.access(existing, os.W_OK):
        raise VitralError(f"cannot write {path}: no permission to write to {existing}", "Choose another path")


def check_recipe(recipe: str) -> None:
    """Raise VitralError if there is no built-in recipe or readable file of this name."""
    from vitral.cli.recipe_values import builtin_values
    from vitral.recipes.files import read_recipe_values

    if not recipe.endswith(".toml"):
        if recipe not in builtin_values():
            raise unknown_name_error("recipe", recipe, builtin_values())
    else:
        read_recipe_values(Path(recipe))


def check_model(source: str) -> None:
    """Raise VitralError if there is no run, model folder, checkpoint or bundled model of this name."""
    from vitral.runs.run import find_model_dir, is_checkpoint, read_error_guard

    path = bundled.resolve(source)
    with read_error_guard(Path(path)):
        if not is_checkpoint(path):
            find_model_dir(Path(path))
