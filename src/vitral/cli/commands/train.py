"""Train on class folders or a known set."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.parsing import parse, positional, switches_of, value_of
from vitral.errors import VitralError, typed


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    from vitral import api_train as making
    from vitral.recipes.builtin import named
    from vitral.recipes.schema import Recipe
    from vitral.training.setup import plan_for

    @dataclass(frozen=True)
    class Resume:
        """Go on with an interrupted run, exactly where it was."""

        resume: Path  # the run folder
        on_nan: Literal["stop", "rollback"] | None = None  # this and what follows: None leaves it as it was
        keep: int | None = None  # checkpoints
        checkpoint_minutes: float | None = None
        accumulate: int | None = None  # parts that a batch is computed in
        recompute: bool | None = None  # activations, in the backward pass
        device: Literal["auto", "cpu", "gpu"] | None = None

    if any(word.startswith("--resume") for word in words):
        begun_with = {field.name for field in fields(Recipe)} | {"recipe", "preset", "heads", "out", "compare", "seeds"}
        decided = begun_with - {field.name for field in fields(Resume)}
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            if flag[2:].partition(".")[0].replace("-", "_") in decided:
                raise VitralError(
                    f"--resume goes on with a run as it was begun, without {flag}",
                    "vitral train --recipe RUN/recipe.toml … begins another; --resume RUN --help says what may change",
                )
        again = vars(parse(Resume, words, "train"))
        changes = {name: value for name, value in again.items() if name != "resume" and value is not None}
        making.train(resume=again["resume"], quiet=False, **changes)
        return 0
    # The recipe decides what the other flags' defaults are, so it is looked for first.
    data = positional(words, switches_of(named("digits")) | {"--compare", "--json"})
    recipe, init = value_of("--recipe", words), value_of("--init", words)
    preset, heads = value_of("--preset", words), (value_of("--heads", words) or "")
    showing_help = data is None and recipe is None and ("--help" in words or "-h" in words)
    plan = plan_for(
        "mnist" if showing_help else data, recipe, init, preset, int(heads) if heads and heads.isdigit() else None
    )

    @dataclass(frozen=True)
    class Train:
        """Train a ViT. The defaults below are those of the recipe.

        An interrupted run goes on with: vitral train --resume RUN"""

        data: Positional[str | None]  # a folder with class folders, a CSV list, or a known set (vitral data list)
        recipe: str | None  # a name (vitral recipes) or a TOML file; default: the one named like the data
        preset: str | None  # a model of the tables instead of the recipe's: Ti/16, B/32, R26+S/32, conv-Ti/4 …
        settings: Annotated[Recipe, arg(name="")]
        heads: int | None = None  # of a checkpoint (--init) whose tensors do not tell
        out: Path | None = None  # the run folder to make; default: runs/<recipe>-<date>-<id>
        # train from scratch, as a linear probe and so, on the same split, and say which to take
        compare: FlagCreatePairsOff[bool] = False
        seeds: int = 3  # of --compare
        json: FlagCreatePairsOff[bool] = False  # of --compare: for programs

    Train.__doc__ = str(Train.__doc__).replace("of the recipe.", f"of the recipe {plan.name}.")
    chosen = parse(Train, words, "train", default=Train(data, recipe, preset, plan))
    if (chosen.data, chosen.recipe) != (data, recipe):
        raise VitralError("the data set must come first", f"vitral train {typed(chosen.data)} …")
    if chosen.heads is not None and not init:
        raise VitralError(
            "--heads is for a checkpoint whose tensors do not tell (--init)", "vitral train … --model.heads N"
        )
    if not chosen.compare:
        making.train(recipe=chosen.settings, out=chosen.out, quiet=False)
        return 0
    result = making.compare(recipe=chosen.settings, seeds=chosen.seeds, out=chosen.out, quiet=chosen.json)
    if chosen.json:
        print(json.dumps(result.as_dict()))
    else:
        from vitral.reporting.terminal import tables as terminal

        terminal.show_comparison(result)
        print(f"\nNext:  {making.command()} predict {typed(result.folders[result.verdict.take])} photo.jpg")
    return 0
