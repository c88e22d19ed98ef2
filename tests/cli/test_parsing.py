"""Typed flags from dataclasses: values, errors, suggestions and the configuration fields read from source."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from vitral.cli import options
from vitral.cli.commands import train
from vitral.cli.config_fields import NO_DEFAULT, ConfigField, read_config_fields
from vitral.cli.parsing import Command, argument, config_options, option, required_option
from vitral.data.geometry import Resize
from vitral.errors import VitralError

CONFIG_FIELDS = [
    ConfigField("optim.lr", float, 1e-3, "learning rate"),
    ConfigField("model.image_size", tuple[int, int], (32, 32), "image size"),
    ConfigField("model.widths", tuple[int, ...], (), "channels"),
    ConfigField("data.mean", tuple[float, ...] | None, None, "mean"),
    ConfigField("augment.flip", bool, False, "flip"),
    ConfigField("epochs", int, 3, "epochs"),
]


@dataclass(frozen=True, kw_only=True)
class ExampleArgs:
    """An example."""

    data: str = argument("data")
    files: tuple[Path, ...] = argument("files")
    schedule: Literal["cosine", "linear"] = option("cosine", "schedule")
    top: int | None = option(None, "count")
    scale: float = option(1.0, "factor")
    names: tuple[str, ...] = option((), "names")
    label: tuple[str, ...] = option((), "one name per flag", repeatable=True)
    code: bool = option(True, "show code")
    overrides: Mapping[str, Any] = config_options(lambda: CONFIG_FIELDS)


@dataclass(frozen=True, kw_only=True)
class OutArgs:
    """A required flag."""

    out: Path = required_option("file to write")


EXAMPLE = Command("example", ExampleArgs, lambda args: 0)


def parse(line: str) -> ExampleArgs:
    return EXAMPLE.parse(line.split())


def usage_error(line: str) -> str:
    with pytest.raises(VitralError) as error:
        parse(line)
    assert error.value.hint == "See `vitral example --help`"
    return error.value.what


def test_defaults_are_used_for_flags_that_are_not_given() -> None:
    assert parse("photos") == ExampleArgs(data="photos", files=())
    assert parse("photos").overrides == {}


def test_values_have_the_type_of_the_field() -> None:
    args = parse("photos a.png b.png --schedule linear --top 5 --scale=1e-3 --no-code --names x y --label a --label=b")
    assert args == ExampleArgs(
        data="photos",
        files=(Path("a.png"), Path("b.png")),
        schedule="linear",
        top=5,
        scale=1e-3,
        code=False,
        names=("x", "y"),
        label=("a", "b"),
    )


@pytest.mark.parametrize(
    ("line", "overrides"),
    [
        ("photos --optim.lr 3e-4 --epochs 2", {"optim.lr": 3e-4, "epochs": 2}),
        ("photos --model.image-size 64 32", {"model.image_size": (64, 32)}),
        ("photos --model.image-size 64", {"model.image_size": (64, 64)}),
        ("photos --model.image-size 64,32", {"model.image_size": (64, 32)}),
        ("photos --model.widths 8,16,32", {"model.widths": (8, 16, 32)}),
        ("photos --data.mean 0.5 0.5 1e-1", {"data.mean": (0.5, 0.5, 0.1)}),
        ("photos --data.mean none", {"data.mean": None}),
        ("photos --augment.flip", {"augment.flip": True}),
        ("photos --augment.no-flip", {"augment.flip": False}),
        ("photos --optim.lr -1e-3", {"optim.lr": -1e-3}),
    ],
)
def test_only_given_configuration_fields_are_overrides(line: str, overrides: dict[str, Any]) -> None:
    assert parse(line).overrides == overrides


@pytest.mark.parametrize(
    "line",
    [
        "photos",
        "--model.image-size 64 64 photos",
        "--data.mean 0.5 0.5 1e-1 photos --epochs 3",
        "--no-code photos",
        "--augment.no-flip photos",
        "--epochs=3 photos",
        "--epochs 3 -- photos",
    ],
)
def test_numbers_after_a_flag_do_not_swallow_the_argument(line: str) -> None:
    assert parse(line).data == "photos"


def test_words_after_two_dashes_are_arguments() -> None:
    assert parse("photos -- --top").files == (Path("--top"),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("photos --top many", "--top: expected an integer, got 'many'"),
        ("photos --top 1.5", "--top: expected an integer, got '1.5'"),
        ("photos --scale big", "--scale: expected a number, got 'big'"),
        ("photos --top", "--top needs a value"),
        ("photos --top --no-code", "--top needs a value"),
        ("photos --model.image-size 1,2,3", "--model.image-size: expected 2 values, got 3"),
        ("photos --code=yes", "--code takes no value; use --code or --no-code"),
        ("--top 3", "missing argument DATA: data"),
        ("photos -x", "no flag '-x'"),
    ],
)
def test_mistakes_are_named(line: str, message: str) -> None:
    assert usage_error(line) == message


def test_a_wrong_choice_lists_the_choices() -> None:
    message = usage_error("photos --schedule cosin")
    assert message.startswith("--schedule: expected one of cosine, linear, got 'cosin'. Did you mean")


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ("--scal", "--scale"),
        ("--shcedule", "--schedule"),
        ("--lr", "--optim.lr"),
        ("--epoch", "--epochs"),
        ("--optim.lrr", "--optim.lr"),
        ("--image-size", "--model.image-size"),
        ("--no-cod", "--no-code"),
    ],
)
def test_misspelt_flags_are_corrected(given: str, suggested: str) -> None:
    assert usage_error(f"photos {given} 1") == f"no flag '{given}'. Did you mean '{suggested}'?"


def test_an_unrelated_flag_gets_no_suggestion() -> None:
    assert usage_error("photos --zzz") == "no flag '--zzz'"


def test_a_required_flag_is_named() -> None:
    with pytest.raises(VitralError, match="missing flag --out: file to write"):
        Command("out", OutArgs, lambda args: 0).parse([])


def test_an_argument_too_many_is_named() -> None:
    with pytest.raises(VitralError, match="unexpected argument 'more'"):
        Command("out", OutArgs, lambda args: 0).parse(["--out", "x", "more"])


def test_help_shows_types_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        EXAMPLE.parse(["photos", "--help"])
    assert stop.value.code == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    for text in (
        "usage: vitral example DATA FILES... [FLAGS]",
        "An example.",
        "--schedule cosine|linear schedule (default: cosine)",
        "--code, --no-code show code",
        "--model.image-size HEIGHT WIDTH image size (default: 32 32)",
        "--optim.lr FLOAT learning rate (default: 0.001)",
    ):
        assert text in printed


def config_types(config_class: type, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Types and defaults of a dataclass by dotted path, from the imported class."""
    types: dict[str, tuple[Any, Any]] = {}
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        nested = next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)
        if nested is not None:
            types |= config_types(nested, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            types[prefix + field.name] = hint, field.default
    return types


def imported_config(name: str) -> type:
    from vitral.models.variants.hybrid import HybridConfig
    from vitral.recipes.schema import Recipe
    from vitral.serve.limits import Limits

    return {"Recipe": Recipe, "HybridConfig": HybridConfig, "Limits": Limits}[name]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vitral.recipes.schema", "Recipe"),
        ("vitral.models.variants.hybrid", "HybridConfig"),
        ("vitral.serve.limits", "Limits"),
    ],
)
def test_fields_read_from_source_match_the_imported_class(module: str, name: str) -> None:
    read = {field.path: field for field in read_config_fields(module, name)}
    imported = config_types(imported_config(name))
    assert list(read) == list(imported)
    for path, (hint, default) in imported.items():
        assert read[path].type == hint, path
        if read[path].default is not NO_DEFAULT:
            assert read[path].default == default, path


def test_shared_choices_match_the_types_of_the_library() -> None:
    from vitral.device.select import DeviceOption
    from vitral.evaluation.data import SplitName
    from vitral.inference.engine import EngineName

    assert set(typing.get_args(options.DeviceFlag)) == set(typing.get_args(DeviceOption))
    assert set(typing.get_args(options.SplitFlag)) == set(typing.get_args(SplitName))
    assert options.ResizeFlag == Resize
    assert set(typing.get_args(options.EngineFlag)) == set(typing.get_args(EngineName))


def test_train_flags_cover_every_recipe_field_once() -> None:
    names = [flag.name for flag in train.COMMAND.flags]
    assert len(names) == len(set(names))
    recipe = {field.path for field in read_config_fields("vitral.recipes.schema", "Recipe")}
    fields = {path for path in recipe if not path.startswith(train.OTHER_FLAGS)}
    assert fields <= {flag.dest for flag in train.COMMAND.flags}


def test_the_flags_that_people_use_come_first_in_train_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.COMMAND.parse(["--help"])
    common = capsys.readouterr().out.partition("Common flags\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in common.splitlines() if line.startswith("  --")] == [
        "--recipe",
        "--preset",
        "--init-from",
        "--tune",
        "--epochs",
        "--batch-size",
        "--optim.lr",
        "--device",
        "--precision",
        "--seed",
        "--out",
        "--resume",
        "--test-split",
        "--resize",
        "--find-lr",
    ]
