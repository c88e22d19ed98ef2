"""The named recipes."""


def run(words: list[str]) -> int:
    from vitral.training.recipes import RECIPES, named

    if words[:1] == ["show"] and len(words) == 2:
        recipe = named(words[1])
        print(f"# {' '.join((RECIPES[words[1]].__doc__ or '').split())}\n{recipe.to_toml()}", end="")
    elif not words:
        for name, make in RECIPES.items():
            print(f"{name:<16}{(make.__doc__ or '').strip().splitlines()[0]}")
    else:
        print("usage: vitral recipes                 the named recipes")
        print("       vitral recipes show NAME       a complete one as TOML; vitral train --recipe FILE.toml trains it")
        return 0 if set(words) & {"-h", "--help"} else 2
    return 0
