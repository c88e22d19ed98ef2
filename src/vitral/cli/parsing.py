"""Typed command-line flags from dataclasses.

A command is a frozen dataclass with one field per argument (`argument`), flag (`option`) or set of configuration
fields (`config_options`), and a function that takes it; `Command` connects the two. Field types decide how values are
parsed: `int`, `float`, `str`, `Path`, `bool` (`--x`, `--no-x`), `Literal`, `tuple` and `X | None`.

No library is used for parsing. argparse and its relatives report errors as rendered text, read `-1e-3` as a flag, and
cannot end a list of numbers before a positional argument (`--model.image-size 32 32 photos`). The grammar here is
small: long flags, `--flag value` or `--flag=value`, arguments anywhere, `--` before arguments that begin with a dash.
Every mistake is a VitralError. Flags of configuration fields that are not given are absent from the result, because
their defaults come from a recipe or a preset.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from vitral.cli.config_fields import NO_DEFAULT, ConfigField
from vitral.errors import VitralError, did_you_mean

T = TypeVar("T")
TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", Path: "a path"}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One argument or flag as it is shown and parsed. `dest` is the field's name, dotted for nested fields."""

    dest: str
    type: Any
    default: Any = NO_DEFAULT
    help: str = ""
    group: str = "Flags"
    is_positional: bool = False
    config_field: str | None = None  # the `config_options` field that collects the value
    repeatable: bool = False  # given once per value instead of once with all values

    @property
    def name(self) -> str:
        """`--optim.lr`, or `MODEL` for a positional argument."""
        if self.is_positional:
            return self.dest.upper().replace("_", "-") + ("..." if self.is_variadic else "")
        return f"--{self.dest.replace('_', '-')}"

    @property
    def negative_name(self) -> str:
        """`--no-compile`, `--augment.no-flip`."""
        *groups, last = self.name.removeprefix("--").split(".")
        return "--" + ".".join([*groups, f"no-{last}"])

    @property
    def value_type(self) -> Any:
        """The type without `| None`."""
        if typing.get_origin(self.type) in (types.UnionType, typing.Union):
            return next(kind for kind in typing.get_args(self.type) if kind is not types.NoneType)
        return self.type

    @property
    def keywords(self) -> tuple[str, ...]:
        """Words that a flag accepts instead of a value, as in `int | Literal["auto"]`."""
        others = [kind for kind in typing.get_args(self.type) if kind is not self.value_type]
        return tuple(word for kind in others if typing.get_origin(kind) is Literal for word in typing.get_args(kind))

    @property
    def is_switch(self) -> bool:
        return self.value_type is bool

    @property
    def has_negative(self) -> bool:
        """Whether the flag can be given as `--no-x`, which a switch that is off by default does not need."""
        return self.is_switch and (self.config_field is not None or self.default is not False)

    @property
    def is_tuple(self) -> bool:
        return typing.get_origin(self.value_type) is tuple

    @property
    def is_variadic(self) -> bool:
        return self.is_tuple and typing.get_args(self.value_type)[-1] is Ellipsis

    @property
    def item_type(self) -> Any:
        """The type of one value."""
        return typing.get_args(self.value_type)[0] if self.is_tuple else self.value_type

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.item_type) if typing.get_origin(self.item_type) is Literal else ()

    @property
    def is_required(self) -> bool:
        return self.default is NO_DEFAULT and self.config_field is None


def argument(help: str, *, default: Any = dataclasses.MISSING) -> Any:
    """A positional argument; required unless it has a default or its type is a tuple of any length."""
    return field(default=default, metadata={"help": help, "is_positional": True})


def option(default: T, help: str, *, group: str = "Flags", repeatable: bool = False) -> T:
    """A flag with a default."""
    return field(default=default, metadata={"help": help, "group": group, "repeatable": repeatable})


def required_option(help: str) -> Any:
    """A flag that must be given."""
    return field(metadata={"help": help})


def config_options(
    read: Callable[[], Iterable[ConfigField]], group: str | Callable[[str], str] = "Flags"
) -> Mapping[str, Any]:
    """One flag per configuration field; the field holds the values that were given, by dotted path.

    Args:
        read: Returns the configuration fields; called when the command is parsed.
        group: Heading in the help, or a function from a field's path to its heading.
    """
    return field(default_factory=dict, metadata={"config_fields": read, "group": group})


@dataclass(frozen=True)
class HelpDefaults:
    """Defaults of configuration fields that depend on the rest of the command line, for its help."""

    note: str  # a sentence that says where they come from
    values: Mapping[str, Any]  # by dotted path; NO_DEFAULT hides the default
    show_switches: bool = False  # state whether a switch is on


@dataclass(frozen=True)
class Command(Generic[T]):
    """Name, arguments and action of a command. `action` returns the exit status."""

    name: str
    args: type[T]
    action: Callable[[T], int]
    help_defaults: Callable[[T | None], HelpDefaults] | None = None  # from the other words of the command line

    def __call__(self, words: Sequence[str]) -> int:
        return self.action(self.parse(words))

    @property
    def flags(self) -> list[Flag]:
        return list(flags_of(self.args))

    def parse(self, words: Sequence[str]) -> T:
        """Typed arguments from the words after the command's name.

        Raises:
            VitralError: A flag is unknown, or a value is missing or not of the flag's type.
            SystemExit: Help was requested and has been printed.
        """
        try:
            return self.args(**_parse_words(self.flags, words))
        except _HelpRequested:
            from vitral.cli.help import command_help

            print(command_help(self, self._help_defaults(words)), end="")
            raise SystemExit(0) from None
        except _UsageError as error:
            raise VitralError(str(error), f"See `vitral {self.name} --help`") from error

    def _help_defaults(self, words: Sequence[str]) -> HelpDefaults | None:
        if self.help_defaults is None:
            return None
        try:
            args = self.args(**_parse_words(self.flags, [word for word in words if word not in ("-h", "--help")]))
        except _UsageError:
            args = None
        return self.help_defaults(args)


@dataclass(frozen=True)
class CommandGroup:
    """A command with subcommands (`vitral data fetch`); without one, `default` runs."""

    name: str
    description: str
    commands: Mapping[str, tuple[Command[Any], str]]  # subcommand -> command, one-line summary
    default: str

    def __call__(self, words: Sequence[str]) -> int:
        if words and words[0] in self.commands:
            return self.commands[words[0]][0](words[1:])
        if {"-h", "--help"} & set(words[:1]):
            from vitral.cli.help import group_help

            print(group_help(self), end="")
            return 0
        if words and not words[0].startswith("-"):
            raise VitralError(
                f"no command '{self.name} {words[0]}'{did_you_mean(words[0], self.commands)}",
                f"Commands of vitral {self.name}: {', '.join(self.commands)}",
            )
        return self.commands[self.default][0](words)


class _HelpRequested(Exception):
    pass


class _UsageError(Exception):
    """A mistake on the command line, without the hint, which depends on the command."""


def flags_of(args: type) -> Iterable[Flag]:
    """The arguments and flags of a command's dataclass."""
    hints = typing.get_type_hints(args)
    for f in dataclasses.fields(args):
        metadata = dict(f.metadata)
        if "config_fields" in metadata:
            group = metadata["group"]
            for config in metadata["config_fields"]():
                yield Flag(
                    dest=config.path,
                    type=config.type,
                    default=config.default,
                    help=config.help,
                    group=group(config.path) if callable(group) else group,
                    config_field=f.name,
                )
            continue
        default = f.default
        if default is dataclasses.MISSING:
            default = () if metadata.get("is_positional") and typing.get_origin(hints[f.name]) is tuple else NO_DEFAULT
        yield Flag(dest=f.name, type=hints[f.name], default=default, **metadata)


def _parse_words(flags: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of the command's dataclass; values of configuration fields are collected in one mapping."""
    by_name = {flag.name: flag for flag in flags if not flag.is_positional}
    by_negative_name = {flag.negative_name: flag for flag in flags if flag.is_switch}
    values: dict[str, Any] = {}
    positional_words: list[str] = []
    queue = deque(words)
    while queue:
        word = queue.popleft()
        if word in ("-h", "--help"):
            raise _HelpRequested
        if word == "--":
            positional_words += queue
            break
        if not word.startswith("-") or word == "-" or _is_number(word):
            positional_words.append(word)
            continue
        name, equals, value = word.partition("=")
        if (flag := by_name.get(name) or by_negative_name.get(name)) is None:
            suggestion = _suggest_flag(name, [*by_name, *by_negative_name])
            raise _UsageError(f"no flag '{name}'{suggestion}")
        if flag.is_switch:
            if equals:
                raise _UsageError(f"{name} takes no value; use {flag.name} or {flag.negative_name}")
            values[flag.dest] = name == flag.name
            continue
        converted = _convert(flag, [value] if equals else _take_values(flag, queue))
        values[flag.dest] = values.get(flag.dest, ()) + converted if flag.repeatable else converted
    values |= _positional_values([flag for flag in flags if flag.is_positional], positional_words)
    if missing := [flag for flag in flags if flag.is_required and flag.dest not in values]:
        kind = "argument" if missing[0].is_positional else "flag"
        raise _UsageError(f"missing {kind} {missing[0].name}: {missing[0].help}")
    for flag in flags:
        if flag.config_field is not None and flag.dest in values:
            values.setdefault(flag.config_field, {})[flag.dest] = values.pop(flag.dest)
    return values


def _take_values(flag: Flag, queue: deque[str]) -> list[str]:
    """Remove a flag's values from the words that follow it."""
    if not queue or _is_flag(queue[0]):
        raise _UsageError(f"{flag.name} needs a value")
    values = [queue.popleft()]
    if not flag.is_tuple or flag.repeatable:
        return values
    limit = len(queue) if flag.is_variadic else len(typing.get_args(flag.value_type)) - len(values)
    numeric = flag.item_type in (int, float)
    while queue and limit > 0 and not _is_flag(queue[0]) and (not numeric or _is_number(queue[0])):
        values.append(queue.popleft())
        limit -= 1
    return values


def _positional_values(arguments: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    queue = deque(words)
    for flag in arguments:
        if flag.is_variadic:
            values[flag.dest] = ()
        if queue:
            argument_words = list(queue) if flag.is_tuple else [queue[0]]
            values[flag.dest] = _convert(flag, argument_words)
            for _ in argument_words:
                queue.popleft()
    if queue:
        expected = " ".join(flag.name for flag in arguments) or "flags"
        raise _UsageError(f"unexpected argument '{queue[0]}', expected only {expected}")
    return values


def _convert(flag: Flag, words: Sequence[str]) -> Any:
    """The value of a flag from its words, e.g. `["32,32"]` or `["32", "32"]` to (32, 32)."""
    accepts_none = types.NoneType in typing.get_args(flag.type) and flag.item_type not in (str, Path)
    if accepts_none and [word.lower() for word in words] == ["none"]:
        return None
    if not flag.is_tuple:
        return _convert_one(flag, words[0])
    if flag.item_type not in (str, Path):
        words = [part for word in words for part in word.split(",")]
    items = tuple(_convert_one(flag, word) for word in words)
    if flag.is_variadic:
        return items
    length = len(typing.get_args(flag.value_type))
    if len(items) == 1 and flag.item_type is int:  # --image-size 224 means 224 224
        return items * length
    if len(items) != length:
        raise _UsageError(f"{flag.name}: expected {length} values, got {len(items)}")
    return items


def _convert_one(flag: Flag, word: str) -> Any:
    if word in flag.keywords:
        return word
    if flag.choices:
        if word not in flag.choices:
            suggestion = did_you_mean(word, flag.choices)
            raise _UsageError(f"{flag.name}: expected one of {', '.join(flag.choices)}, got {word!r}{suggestion}")
        return word
    try:
        return flag.item_type(word)
    except ValueError:
        expected = " or ".join([TYPE_NAMES[flag.item_type], *flag.keywords])
        raise _UsageError(f"{flag.name}: expected {expected}, got {word!r}") from None


def _suggest_flag(name: str, flag_names: Sequence[str]) -> str:
    """Suggest a nested flag with the same last part (--lr: --optim.lr), what other tools call so, or a similar name."""
    if name in REPLACED_FLAGS:
        return f". {REPLACED_FLAGS[name]}"
    elsewhere = [flag for flag in FLAGS_ELSEWHERE.get(name, ()) if flag in flag_names]
    same_last_part = [flag for flag in flag_names if flag.endswith(f".{name.lstrip('-')}")]
    completions = [flag for flag in flag_names if flag.startswith(name) and name != "--"]
    suggestions = same_last_part or elsewhere or completions
    return f". Did you mean '{suggestions[0]}'?" if suggestions else did_you_mean(name, flag_names)


FLAGS_ELSEWHERE = {  # names in other tools
    "--amp": ("--precision",),
    "--arch": ("--preset",),
    "--checkpoint": ("--init-from",),
    "--img-size": ("--model.image-size", "--image-size"),
    "--model": ("--preset",),
    "--opt": ("--optim.name",),
    "--output": ("--out",),
    "--output-dir": ("--out",),
    "--pretrained": ("--init-from",),
    "--sched": ("--optim.schedule",),
    "--weights": ("--init-from",),
}
REPLACED_FLAGS = {
    "--freeze": "It was replaced by --tune: --tune head trains only the head, --tune last-N the last N blocks too"
}


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return all(part.isdigit() for part in word.split(",")) if "," in word else False
    return True
