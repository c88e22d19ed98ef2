"""`vitral train --help` shows the values of the recipe that the command line would use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.common import Command
from vitral.cli.recipe_values import builtin_values, chosen_recipe
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.recipes.builtin import get_recipe
from vitral.training.setup import resolve_recipe


def shown_default(text: str, flag: str) -> str | None:
    """The default that a help text states for a flag."""
    entry = " ".join(text.partition(f"\n  {flag}")[2].partition("\n  --")[0].split())
    return entry.partition("(default: ")[2].partition(")")[0] or None


def test_the_stored_values_are_those_of_the_recipes() -> None:
    """If this fails: python tools/write_recipe_values.py"""
    import vitral
    from write_recipe_values import render

    file = Path(vitral.__file__).parent / "recipes" / "builtin_values.toml"
    assert file.read_text(encoding="utf-8") == render()


@pytest.mark.parametrize(
    ("words", "recipe", "epochs", "lr"),
    [
        (["--recipe", "cifar10-94"], "cifar10-94", "20", "0.005"),
        (["mnist"], "mnist", "20", "0.005"),
        (["photos/"], "folder-scratch", "60", "0.003"),
        (["photos/", "--init-from", "x.safetensors"], "folder-finetune", "10", "0.0005"),
        (["mnist", "--recipe=digits", "--epochs", "3"], "digits", "150", "0.006"),
    ],
)
def test_help_shows_the_values_of_the_recipe(
    command: Command, words: list[str], recipe: str, epochs: str, lr: str
) -> None:
    code, out, err = command("train", *words, "--help")
    assert (code, err) == (0, "")
    assert f"Defaults: those of the recipe {recipe}" in " ".join(out.split())
    assert (shown_default(out, "--epochs INT"), shown_default(out, "--optim.lr FLOAT")) == (epochs, lr)


def test_help_shows_a_pair_of_values_as_it_is_typed(command: Command) -> None:
    assert shown_default(command("train", "photos/", "--help")[1], "--model.image-size") == "128 128"


def test_help_without_data_says_which_recipe_decides(command: Command) -> None:
    _, out, _ = command("train", "--help")
    assert "folder-finetune with --init-from" in " ".join(out.split())
    assert shown_default(out, "--epochs INT") is None
    assert shown_default(out, "--checkpoint-minutes FLOAT") == "10.0"  # no built-in recipe sets it


def test_help_with_a_checkpoint_states_no_architecture(command: Command) -> None:
    _, out, _ = command("train", "photos/", "--init-from", "x", "--help")
    assert "the checkpoint's architecture" in " ".join(out.split())
    assert shown_default(out, "--model.width INT") is None


def test_help_shows_the_values_of_a_recipe_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(get_recipe("mnist").with_overrides({"epochs": 77, "tensorboard": True}).to_toml(), encoding="utf-8")
    _, out, _ = command("train", "--recipe", file, "--help")
    assert shown_default(out, "--epochs INT") == "77"
    assert shown_default(out, "--tensorboard, --no-tensorboard") == "on"


def test_an_unknown_recipe_is_an_error_with_a_suggestion(command: Command) -> None:
    code, _, err = command("train", "--recipe", "cifar10-49", "--help")
    assert code == 2
    assert "no recipe named 'cifar10-49'. Did you mean 'cifar10-9" in err


@pytest.mark.parametrize("data", ["mnist", "photos/", "photos.csv"])
def test_the_recipe_in_the_help_is_the_one_that_training_uses(data: str) -> None:
    assert chosen_recipe(None, data, has_checkpoint=False) == resolve_recipe(data, None).name


def test_every_built_in_dataset_has_a_recipe_of_its_name() -> None:
    assert all(builtin_values()[name]["data.name"] == name for name in BUILTIN_DATASETS)


def test_help_with_a_recipe_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'rich'): sys.modules[name] = None\n"
        "from vitral.cli.main import main\n"
        "main(['train', 'photos/', '--recipe', 'cifar10-94', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
