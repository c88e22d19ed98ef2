"""The examples in the docstrings of the public functions run, and the reference lists these functions."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitral
import vitral.api
import vitral.data
import vitral.explain
import vitral.weights

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(vitral.api, name) for name in vitral.api.__all__}
FUNCTIONS |= {
    "Predictor.predict": vitral.Predictor.predict,
    "data.load": vitral.data.load,
    "explain.explain": vitral.explain.explain,
    "weights.convert": vitral.weights.convert,
    "weights.read": vitral.weights.read,
    "weights.write": vitral.weights.write,
}


def examples_of(function: Callable[..., Any]) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(function) or "")


@pytest.mark.parametrize("name", vitral.api.__all__)
def test_the_reference_lists_the_function(name: str) -> None:
    assert re.search(rf"^::: vitral\.(api\.)?{name}$", REFERENCE, flags=re.MULTILINE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described_and_there_is_an_example(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    described = re.findall(r"^    (\w+): ", text, flags=re.MULTILINE)
    arguments = [argument for argument in inspect.signature(function).parameters if argument != "self"]
    assert examples_of(function)
    assert "Arguments as for" in text or described == arguments


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "demo"])  # which downloads MNIST
def test_the_example_runs(
    name: str, reader_folder: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for item in reader_folder.iterdir():
        (tmp_path / item.name).symlink_to(item)
    names = {"vitral": vitral}
    for example in examples_of(FUNCTIONS[name]):
        exec(compile(example.source, name, "single"), names)
