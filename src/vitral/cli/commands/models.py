"""vitral models: the bundled models."""

from __future__ import annotations

from dataclasses import dataclass

from vitral import bundled
from vitral.cli.parsing import Command, CommandGroup, argument
from vitral.errors import truncate_list, unknown_name_error
from vitral.utils.json_toml import read_json


@dataclass(frozen=True, kw_only=True)
class ModelsListArgs:
    """List the bundled models with their classes, test accuracy and size."""


@dataclass(frozen=True, kw_only=True)
class ModelsShowArgs:
    """Print the model card of a bundled model: results, training and intended use."""

    name: str = argument("name of a bundled model")


@dataclass(frozen=True, kw_only=True)
class ModelsWhereArgs:
    """Print the folder of a bundled model."""

    name: str = argument("name of a bundled model")


def list_models(args: ModelsListArgs) -> int:
    for name in bundled.model_names():
        print(f"{name:<15}{describe(name)}")
    print("\nUse one wherever a model is expected, e.g. vitral predict mnist digit.png")
    return 0


def show(args: ModelsShowArgs) -> int:
    print((bundled.BUNDLED_DIR / check_name(args.name) / "README.md").read_text(encoding="utf-8"))
    return 0


def where(args: ModelsWhereArgs) -> int:
    print(bundled.BUNDLED_DIR / check_name(args.name))
    return 0


def check_name(name: str) -> str:
    name = name.removeprefix(bundled.PREFIX)
    if name not in bundled.model_names():
        raise unknown_name_error("bundled model", name, bundled.model_names())
    return name


def describe(name: str) -> str:
    """Classes, test accuracy, image size and file size in one line."""
    folder = bundled.BUNDLED_DIR / name
    config, test = (read_json(folder / file) for file in ("model/config.json", "test.json"))
    height, width = config["preprocessing"]["image_size"]
    size = (folder / "model" / "weights.safetensors").stat().st_size
    return (
        f"{len(config['classes'])} classes ({truncate_list(config['classes'], 3)}); {test['top1']:.2%} test accuracy "
        f"({test['images']:,} images); {height}x{width} pixels, {size / 1e6:.1f} MB"
    )


COMMAND = CommandGroup(
    "models",
    "The models that are installed with vitral. Use their names wherever a model is expected.",
    {
        "list": (Command("models list", ModelsListArgs, list_models), "list the bundled models"),
        "show": (Command("models show", ModelsShowArgs, show), "print a model card"),
        "where": (Command("models where", ModelsWhereArgs, where), "print the folder of a model"),
    },
    default="list",
)
