"""The command line: a thin shell. Every command is a call of a public function; torch is imported where one needs it.

Annotations are evaluated here (no `from __future__ import annotations`): tyro reads the flags off local dataclasses.
"""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vitral import __version__
from vitral.errors import VitralError, nearest

HELP = f"""vitral {__version__}: a Vision Transformer workshop

usage: vitral COMMAND …          vitral COMMAND --help says more

  demo                           train a small ViT in about a minute and look at it
  train DATA                     train on class folders or a known set; every field of the recipe is a flag
  evaluate RUN                   loss, accuracy, per-class figures, confusion matrix
  predict RUN FILES…             ranked labels for image files and folders
  probe DATA --init SOURCE       how good a checkpoint's features are for your images
  embed RUN FILES… --out FILE    feature vectors as .npy, .parquet or .csv
  convert SOURCE FILE --to LIB   a checkpoint of one library as another's
  summary PRESET                 a model layer by layer: shapes, parameters, arithmetic, memory
  recipes [show NAME]            the named recipes; a complete one as TOML
  data list | fetch | where      the known sets

A run is the folder that `vitral train` leaves behind: runs/<recipe>-<date>-<id>.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, with 2 where a person can fix it, with 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    if words[0] in ("-V", "--version"):
        print(f"vitral {__version__}")
        return
    try:
        if words[0] not in COMMANDS:
            raise VitralError(
                f"there is no command {words[0]!r}.{nearest(words[0], COMMANDS)}", f"Known: {', '.join(COMMANDS)}"
            )
        sys.exit(COMMANDS[words[0]](words[1:]))
    except VitralError as error:
        interrupted = type(error).__name__ == "Interrupted"  # by name: its module would import torch
        print(error.what if interrupted else f"error: {error.what}", file=sys.stderr)
        for line in error.hint.splitlines():
            print(line if interrupted else f"       {line}", file=sys.stderr)
        sys.exit(130 if interrupted else 2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def parse(kind: Callable[..., Any], words: list[str], command: str, default: Any = None) -> Any:
    """Typed flags from the fields of a dataclass; a mistake in them is a VitralError like any other."""
    import tyro

    said = io.StringIO()
    more = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, args=_squares(words), prog=f"vitral {command}", **more)
    except ValueError as error:  # from a dataclass that refuses its values
        raise VitralError(str(error), f"vitral {command} --help lists the flags") from error
    except SystemExit as stop:
        if not stop.code:
            raise
    raise _in_two_lines(said.getvalue(), command)


def _in_two_lines(boxed: str, command: str) -> VitralError:
    """What tyro prints as a box, drawn with lines or with dashes, as a sentence and a hint."""
    lines = [line.strip("╭╮╰╯│ ") for line in boxed.splitlines()]
    text = " ".join("¶" if set(line) <= set("─-") else line for line in lines if line and not line.startswith("─ "))
    parts = [part.strip() for part in text.split("¶") if part.strip()]
    what = (parts if boxed.startswith("╭") else parts[1:] or [boxed])[0]  # without lines, the title is a part
    if match := re.match(r"Unrecognized options: (\S+?),?(?= |$)", what):
        what = f"vitral {command} has no flag {match[1]}."
        if close := re.search(r"Perhaps you meant: (--[\w.-]+)", text):
            what += f" Did you mean {close[1]}?"
    elif match := re.match(r"Error parsing (\S+): (.*)", what):
        what = f"{match[1]}: {match[2]}" if match[1].startswith("-") else match[2]
    return VitralError(what, f"vitral {command} --help lists the flags")


def _squares(words: list[str]) -> list[str]:
    """`--model.image-size 224` means 224 224."""
    written: list[str] = []
    for index, word in enumerate(words):
        written.append(word)
        alone = word.isdigit() and not (index + 1 < len(words) and words[index + 1].isdigit())
        if alone and index and words[index - 1].endswith("image-size"):
            written.append(word)
    return written


def _train(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    from vitral import workshop
    from vitral.training.plan import plan_for
    from vitral.training.recipe import Recipe

    @dataclass(frozen=True)
    class Resume:
        """Go on with an interrupted run, exactly where it was."""

        resume: Path  # the run folder

    if any(word.startswith("--resume") for word in words):
        workshop.train(resume=parse(Resume, words, "train").resume, quiet=False)
        return 0
    # The recipe decides what the other flags' defaults are, so it is looked for first.
    data, recipe, init = _positional(words), _value_of("--recipe", words), _value_of("--init", words)
    showing_help = data is None and recipe is None and ("--help" in words or "-h" in words)
    plan = plan_for("mnist" if showing_help else data, recipe, init)

    @dataclass(frozen=True)
    class Train:
        """Train a ViT. The defaults below are those of the recipe.

        An interrupted run goes on with: vitral train --resume RUN"""

        data: Positional[str | None]  # a folder with class folders, a CSV list, or a known set (vitral data list)
        recipe: str | None  # a name (vitral recipes) or a TOML file; default: the one named like the data
        settings: Annotated[Recipe, arg(name="")]
        out: Path | None = None  # the run folder to make; default: runs/<recipe>-<date>-<id>

    chosen = parse(Train, words, "train", default=Train(data, recipe, plan))
    if (chosen.data, chosen.recipe) != (data, recipe):
        raise VitralError("the data set must come first", f"vitral train {chosen.data} …")
    workshop.train(recipe=chosen.settings, out=chosen.out, quiet=False)
    return 0


def _positional(words: list[str]) -> str | None:
    """The first word that is neither a flag nor stands behind one."""
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("-") and (not before.startswith("--") or "=" in before):
            return word
    return None


def _value_of(flag: str, words: list[str]) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return None


def _demo(words: list[str]) -> int:
    @dataclass(frozen=True)
    class Demo:
        """Train a small ViT in about a minute, look at what it does, and say what to try next."""

        out: Path | None = None  # the run folder to make

    out = parse(Demo, words, "demo").out
    from vitral import workshop

    workshop.demo(out=out, quiet=False)
    return 0


def _evaluate(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Evaluate:
        """How good a model is: loss, accuracy, per-class figures, confusion matrix."""

        run: Positional[Path]  # a run folder or a model folder
        data: str | None = None  # another set or folder with classes the model knows; default: what it was trained on
        split: Literal["test", "validation", "train"] = "test"
        json: bool = False  # for programs

    chosen = parse(Evaluate, words, "evaluate")
    from vitral import workshop

    metrics = workshop.evaluate(chosen.run, data=chosen.data, split=chosen.split)
    if chosen.json:
        print(json.dumps(metrics.as_dict()))
    else:
        from vitral.report import terminal

        terminal.show_metrics(metrics, split=chosen.split)
    return 0


def _predict(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional

    @dataclass(frozen=True)
    class Predict:
        """Ranked labels for image files of any size, mode and orientation, and for the images in folders."""

        run: Positional[str]  # a run folder, a model folder, a checkpoint file, or hf:owner/name
        files: Positional[tuple[Path, ...]]
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        top: int = 3  # labels a picture
        json: FlagCreatePairsOff[bool] = False  # one object a line
        csv: FlagCreatePairsOff[bool] = False  # file, rank, label, probability, error

    chosen = parse(Predict, words, "predict")
    if not chosen.files:
        raise VitralError("which images?", f"vitral predict {chosen.run} photo.jpg folder/")
    from vitral.predict import Predictor
    from vitral.report import terminal

    answers = Predictor.load(chosen.run, labels=chosen.labels).predict_files(chosen.files, top=chosen.top)
    show = terminal.as_json if chosen.json else terminal.as_csv if chosen.csv else terminal.as_lines
    show(answers)
    failed = [answer for answer in answers if answer.error]
    for answer in failed:
        print(f"error: {answer.error}", file=sys.stderr)
    if failed:
        print(f"       {len(failed)} of {len(answers)} files could not be read", file=sys.stderr)
    return 1 if failed else 0


def _probe(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Probe:
        """How good a checkpoint's features are for your images, without training it: minutes on a CPU."""

        data: Positional[str]  # a folder with class folders, a CSV list, or a known set
        init: str  # a run folder, a model folder, a checkpoint file, or hf:owner/name
        out: Path | None = None  # a plot: probe.png
        json: bool = False  # for programs

    chosen = parse(Probe, words, "probe")
    from vitral import workshop
    from vitral.report import terminal

    result = workshop.probe(chosen.data, chosen.init, out=chosen.out)
    if chosen.json:
        print(json.dumps(result.as_dict()))
    else:
        terminal.show_probe(result)
    return 0


def _embed(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Embed:
        """One vector an image, from before the head, for programs of your own."""

        run: Positional[str]  # a run folder, a model folder, a checkpoint file, or hf:owner/name
        files: Positional[tuple[Path, ...]]
        out: Path  # features.npy, .parquet or .csv

    chosen = parse(Embed, words, "embed")
    from vitral import workshop

    troubles = workshop.embed(chosen.run, chosen.files, chosen.out)
    for trouble in troubles:
        print(f"error: {trouble}", file=sys.stderr)
    print(f"{chosen.out}: written")
    return 1 if troubles else 0


def _convert(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Convert:
        """Write a checkpoint of one library as another's, and prove that nothing was lost."""

        source: Positional[str]  # a file, a folder, a run, or hf:owner/name[@revision]
        destination: Positional[Path]
        to: Literal["vitral", "timm", "transformers", "torchvision", "npz", "vit-pytorch"] = "vitral"
        heads: int | None = None  # where the tensors do not tell
        image_size: tuple[int, int] | None = None  # likewise

    chosen = parse(Convert, words, "convert")
    from vitral import weights

    for note in weights.convert(
        chosen.source, chosen.destination, to=chosen.to, heads=chosen.heads, image_size=chosen.image_size
    ):
        print(note)
    print(f"{chosen.destination}: written for {chosen.to}")
    return 0


def _summary(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    from vitral.presets import PRESETS, PUBLISHED, preset
    from vitral.vit import ViTConfig

    name = _positional(words)
    if name is None and not {"-h", "--help"} & set(words):
        raise VitralError("which model?", f"Known: {', '.join(PRESETS)}")

    @dataclass(frozen=True)
    class Summary:
        """A model layer by layer: shapes, parameters, arithmetic and memory for one image."""

        preset: Positional[str]
        config: Annotated[ViTConfig, arg(name="")]
        levels: int = 3  # how deep the table goes into the modules

    default = Summary(name or "B/16", preset(name or "B/16"))
    chosen = parse(Summary, words, "summary", default=default)
    from vitral.summary import summarise

    print(summarise(chosen.config, chosen.levels))
    if name in PUBLISHED:
        print(f"published           {PUBLISHED[name]}")
    return 0


def _recipes(words: list[str]) -> int:
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


def _data(words: list[str]) -> int:
    from vitral import data

    action, names = (words or ["list"])[0], words[1:]
    if action == "list" and not names:
        for entry in data.catalogue():
            state = (
                "no files needed"
                if entry.paths == []
                else "in the cache"
                if entry.cached
                else f"{entry.size / 1e6:.0f} MB to fetch"
            )
            print(f"{entry.name:<15}{entry.description}  ({state})")
    elif action == "fetch" and names:
        for name in names:
            found = data.fetch(name, progress=True)
            print(f"{name}: {found.source}")
    elif action == "where" and len(names) == 1:
        paths = data.where(names[0])
        if paths is None:
            raise VitralError(f"{names[0]} is not on this machine", f"vitral data fetch {names[0]}")
        print("\n".join(map(str, paths)) or f"{names[0]} comes with scikit-learn and needs no files")
    else:
        print("usage: vitral data list                the known sets, and which are here")
        print("       vitral data fetch NAME …        get them now")
        print("       vitral data where NAME          the files of one")
        return 0 if set(words) & {"-h", "--help"} else 2
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": _demo,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "probe": _probe,
    "embed": _embed,
    "convert": _convert,
    "summary": _summary,
    "recipes": _recipes,
    "data": _data,
}
