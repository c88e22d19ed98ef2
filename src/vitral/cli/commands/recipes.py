"""vitral recipes: the built-in recipes."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass

from vitral.cli.parsing import Command, CommandGroup, argument


@dataclass(frozen=True, kw_only=True)
class RecipesListArgs:
    """List the built-in recipes."""


@dataclass(frozen=True, kw_only=True)
class RecipesShowArgs:
    """Print a complete recipe as TOML. Edit the file and train with it: vitral train --recipe FILE.toml"""

    name: str = argument("name of a built-in recipe")


def list_recipes(args: RecipesListArgs) -> int:
    from vitral.recipes.builtin import GROUPS

    width = max(len(name) for recipes in GROUPS.values() for name in recipes)
    for group, recipes in GROUPS.items():
        print(group)
        for name, make_recipe in recipes.items():
            print(f"  {name:<{width}}  {(make_recipe.__doc__ or '').strip().splitlines()[0]}")
    print(
        "\nTrain with one: vitral train DATA --recipe NAME, without labels: vitral pretrain IMAGES --recipe NAME\n"
        "Print one: vitral recipes show NAME"
    )
    return 0


def show(args: RecipesShowArgs) -> int:
    from vitral.recipes.builtin import RECIPES, get_recipe

    recipe = get_recipe(args.name)
    description = inspect.getdoc(RECIPES[args.name]) or ""
    print(textwrap.indent(description, "# ", lambda _: True).replace("# \n", "#\n"))
    print(recipe.to_toml(), end="")
    return 0


COMMAND = CommandGroup(
    "recipes",
    "The built-in recipes: model, augmentation, optimizer and schedule for one task.",
    {
        "list": (Command("recipes list", RecipesListArgs, list_recipes), "list the built-in recipes"),
        "show": (Command("recipes show", RecipesShowArgs, show), "print a complete recipe as TOML"),
    },
    default="list",
)
