"""The named recipes."""

import inspect
import textwrap

from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from vitral.recipes.builtin import GROUPS, RECIPES, named

    if words[:1] == ["show"] and len(words) == 2:
        recipe = named(words[1])
        print(textwrap.indent(inspect.getdoc(RECIPES[words[1]]) or "", "# ", lambda _: True).replace("# \n", "#\n"))
        print(recipe.to_toml(), end="")
    elif not words:
        for group, recipes in GROUPS.items():
            print(group)
            for name, make in recipes.items():
                print(f"  {name:<17}{(make.__doc__ or '').strip().splitlines()[0]}")
        print("\nvitral train DATA --recipe NAME trains one; vitral recipes show NAME prints all of it.")
    elif {"-h", "--help"} & set(words):
        print("usage: vitral recipes                 the named recipes")
        print("       vitral recipes show NAME       a complete one as TOML; vitral train --recipe FILE.toml trains it")
    else:
        raise VitralError(f"vitral recipes has no use for {' '.join(words)!r}", "vitral recipes show NAME prints one")
    return 0
