"""Flags off dataclasses, and what is wrong with them in two lines.

Annotations are evaluated in this package (no `from __future__ import annotations`): tyro reads the flags off local
dataclasses. Each command is a file with `run(words) -> exit status`; torch is imported where one needs it.
"""

import io
import re
import sys
from collections.abc import Callable, Container
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from vitral import bundled as box
from vitral.errors import VitralError, typed

NUMBERS = {"INT": "whole number", "FLOAT": "number"}


def a_model(others: str = "a run or model folder, a checkpoint file, or hf:owner/name") -> str:
    """The help of what names a model: a path, an address, or a name."""
    return f"{others}; or one that comes with vitral: {', '.join(box.names())}"


def which_images(command: str, said: str) -> VitralError:
    """Where one name was given for a model and its images: the other one is missing."""
    from vitral.data.decode import SUFFIXES

    if Path(said).suffix.lower() in SUFFIXES:
        hint = f"vitral {command} {box.names()[0]} {typed(said)}"
        return VitralError(f"which model? {said} is a picture", hint)
    return VitralError("which images?", f"vitral {command} {typed(said)} photo.jpg folder/")


def parse(kind: Callable[..., Any], words: list[str], command: str, default: Any = None) -> Any:
    """Typed flags from the fields of a dataclass; a mistake in them is a VitralError like any other."""
    import tyro

    said, shown = io.StringIO(), _Kept()
    more = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said), redirect_stdout(shown):
            return tyro.cli(
                kind, args=_spread(words), prog=f"vitral {command}", config=(tyro.conf.AvoidSubcommands,), **more
            )
    except ValueError as error:  # from a dataclass that refuses its values
        raise VitralError(str(error), f"vitral {command} --help lists the flags") from error
    except SystemExit as stop:
        if not stop.code:
            print(_plainer(shown.getvalue()), end="")
            raise
    raise _in_two_lines(said.getvalue(), command)


class _Kept(io.StringIO):
    """What would be printed, for one who asks first whether it goes to a terminal, and of which encoding."""

    encoding = property(lambda _: sys.__stdout__.encoding if sys.__stdout__ else "utf-8")

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def _plainer(text: str) -> str:
    """Help without tyro's {None}|STR and (default: None) of flags that can be left out; columns stay where they are."""
    usage, box, options = text.partition("╭")
    options = re.sub(r"\{None,([^\s│\x1b]*)", rf"{{\1{' ' * len('None,')}", options)
    metavar, colour = r"\{None\}\|(\{\[.*?\]\}|[^\s│\x1b]*)", r"\x1b\[[0-9;]*m"
    options = re.sub(metavar, rf"\1{' ' * len('{None}|')}", options)
    default, letter = rf"\(default:(?:\s|│|{colour})*(?:None)?\)", rf"({colour})|[^\s│]"
    options = re.sub(default, lambda found: re.sub(letter, lambda one: one[1] or "\0", found[0]), options)
    lines = [line for line in options.split("\n") if "\0" not in line or re.sub(colour, "", line).strip("│ \0")]
    return re.sub(metavar, r"\1", usage.replace("{None,", "{")) + box + "\n".join(lines).replace("\0", " ")


def _in_two_lines(boxed: str, command: str) -> VitralError:
    """What tyro prints as a box, drawn with lines or with dashes, as a sentence and a hint."""
    lines = [line.strip("╭╮╰╯│ ") for line in boxed.splitlines()]
    text = " ".join("¶" if set(line) <= set("─-") else line for line in lines if line and not line.startswith("─ "))
    parts = [part.strip() for part in text.split("¶") if part.strip()]
    what = (parts if boxed.startswith("╭") else parts[1:] or [boxed])[0]  # without lines, the title is a part
    if match := re.match(r"Unrecognized options: (\S+?),?(?= |$)", what):
        kind = "flag" if match[1].startswith("-") else "use for"
        what = f"vitral {command} has no {kind} {match[1]}."
        if close := re.findall(r"(?<= )--[\w.-]+", text.partition("Perhaps you meant:")[2]):
            same = [flag for flag in close if flag.endswith(f".{match[1].lstrip('-')}")]  # --lr: --optim.lr
            begun = [flag for flag in close if flag.startswith(match[1])]  # --epoch: --epochs, not --checkpoint-epochs
            what += f" Did you mean {(same or begun or close)[0]}?"
    elif match := re.match(r"Missing from [^:]*: (.*)", what):
        each = [
            re.sub(r"^ ?(?:(--\S+) )?[A-Z]+ ", r"\1 ", part).strip() for part in match[1].split(" (required)") if part
        ]
        what = f"vitral {command} needs {'; '.join(each)}"
    elif match := re.match(r"invalid choice (.*) for argument '(.*)'. Expected one of \((.*?)\)", what):
        choices = [choice for choice in re.findall(r"'(.*?)'", match[3]) if choice != "None"]
        what = f"{match[2]}: {match[1]} is none of {', '.join(choices)}"
    elif match := re.match(r"Missing value for argument '(.*)'. Expected (\d+) values", what):
        what = f"{match[1]} needs {'a value' if match[2] == '1' else match[2] + ' values'}"
    elif match := re.match(r"Error parsing (\S+): (.*)", what):
        said = match[2]
        if got := re.match(r"no type matching \{None\}\|(\w+) could be instantiated from \['(.*?)'\]", said):
            said = f"{got[2]!r} is no {NUMBERS.get(got[1], got[1].lower())}"
        elif got := re.match(r"no type matching .* could be instantiated from \[(.*?)\]", said):
            said = f"{got[1]} is not what it takes"
        elif got := re.match(r"invalid literal for int\(\) with base 10: '(.*)'", said):
            said = f"{got[1]!r} is no whole number"
        elif got := re.match(r"could not convert string to float: '(.*)'", said):
            said = f"{got[1]!r} is no number"
        what = f"{match[1]}: {said}" if match[1].startswith("-") else said
    return VitralError(what, f"vitral {command} --help lists the flags")


def _spread(words: list[str]) -> list[str]:
    """`--model.image-size 224` means 224 224, and `--model.conv.widths 32,128,256` means 32 128 256."""
    written: list[str] = []
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        behind = bool(equals) or (index > 0 and words[index - 1].startswith("--"))
        several = value.split(",")
        if behind and len(several) > 1 and all(map(_number, several)):
            written += [flag, *several] if flag else several
            continue
        written.append(word)
        alone = word.isdigit() and not (index + 1 < len(words) and words[index + 1].isdigit())
        if alone and index and words[index - 1].endswith("image-size"):
            written.append(word)
    return written


def positional(words: list[str], switches: Container[str] = ()) -> str | None:
    """The first word that is neither a flag nor the value of one: what stands behind it, and numbers behind that."""
    expected = "nothing"
    for word in words:
        if word.startswith("-"):
            takes_value = "=" not in word and word not in switches and not re.search(r"(^--|\.)no-", word)
            expected = "a value" if takes_value else "nothing"
        elif expected == "a value":
            expected = "more numbers"
        elif expected == "nothing" or not _number(word):
            return word
    return None


def switches_of(settings: Any, prefix: str = "--") -> set[str]:
    """The flags of a dataclass that are said without a value."""
    found = set()
    for field in fields(settings):
        name, value = prefix + field.name.replace("_", "-"), getattr(settings, field.name)
        if is_dataclass(value):
            found |= switches_of(value, name + ".")
        elif isinstance(value, bool):
            found.add(name)
    return found


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def value_of(flag: str, words: list[str]) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return None
