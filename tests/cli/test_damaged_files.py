"""Files that are damaged or hostile: an error of two lines, or the file is ignored, but never a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.common import TINY_MODEL, Command, skip_figures
from support.photos import save_photo
from vitral import api
from vitral.errors import VitralError
from vitral.recipes.schema import read_recipe, recipe_from_dict
from vitral.runs.model_io import load_model_config
from vitral.runs.run import Run
from vitral.utils.json_toml import MAX_FILE_BYTES, parse_toml

DEPTH = 100_000
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "deep list": b"[" * DEPTH + b"]" * DEPTH,
    "deep object": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
    "deep toml": b"a = " + b"[" * DEPTH + b"]" * DEPTH,
    "deep toml table": b"[" + b".".join([b"a"] * DEPTH) + b"]",
    "long number": b'{"format": ' + b"9" * 5_000 + b"}",
    "long toml number": b"epochs = " + b"9" * 5_000,
    "list": b"[1, 2]",
    "text": b'"text"',
    "number": b"7",
    "zero bytes": b"\0" * 100,
    "not utf-8": b"\xff\xfe\x00\x80",
    "another object": b'{"format": [], "data": 3, "classes": "x", "epoch": "x"}',
    "long line": b"x" * 200_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, photographs in two classes, and a list of them."""
    folder = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        api.train("digits", epochs=1, out=folder / "run", **TINY_MODEL)
    for index in range(8):
        save_photo(folder / "photos" / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    return folder


@pytest.fixture
def damaged_run(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path / "run"


def is_error(code: int, err: str) -> bool:
    """Whether a command failed with an error of two lines, which are short enough to read."""
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "       "))]
    return code == 2 and lines[0].startswith("error: ") and len(lines) == 2 and max(map(len, lines)) < 1_100


def commands(name: str, run: Path, photo: Path) -> Iterator[tuple[Any, ...]]:
    """Commands that read a file of a run folder."""
    if name == "recipe.toml":
        yield "train", "--recipe", run / name
        yield "train", "--resume", run
        yield "push", run, "hf:me/x", "--dry-run"
    elif name == "test.json":
        yield "push", run, "hf:me/x", "--dry-run"
    else:
        yield "predict", run, photo
        yield "summary", run


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", ["recipe.toml", "model/config.json", "test.json"])
def test_damaged_file_of_a_run_is_named_in_two_lines(
    name: str, content: bytes, damaged_run: Path, folder: Path, command: Command
) -> None:
    (damaged_run / name).write_bytes(content)
    for words in commands(name, damaged_run, folder / "photos" / "ants" / "0.png"):
        code, out, err = command(*words)
        assert is_error(code, err), (words[0], code, out, err)
        assert Path(name).name in err


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_damaged_metrics_and_environment_are_ignored(content: bytes, damaged_run: Path) -> None:
    run = Run(damaged_run)
    row = run.load_metrics()[0]
    with run.metrics_file.open("ab") as file:
        file.write(content.replace(b"\n", b"") + b"\n" + json.dumps(row | {"epoch": 2}).encode() + b"\n")
    assert [row["epoch"] for row in run.load_metrics()] == [1, 2]
    run.environment_file.write_bytes(content)
    assert isinstance(run.load_environment(), dict)


@pytest.mark.parametrize(
    "row",
    ['{"epoch": "one"}', '{"epoch": 2, "train_loss": "high"}', '{"epoch": true}', '{"epoch": 2.5}', '{"step": 1}',
     '{"epoch": 2, "train_loss": [1]}'],
)  # fmt: skip
def test_rows_of_metrics_with_text_are_skipped(row: str, damaged_run: Path) -> None:
    run = Run(damaged_run)
    with run.metrics_file.open("a") as file:
        file.write(row + "\n")
    assert len(run.load_metrics()) == 1


def test_report_of_a_run_with_damaged_metrics_and_environment(damaged_run: Path, command: Command) -> None:
    run = Run(damaged_run)
    row = run.load_metrics()[0]
    run.metrics_file.write_text(f'"text"\n{json.dumps(row)}\n{json.dumps(row | {"epoch": 2, "train_loss": None})}\n')
    run.environment_file.write_text('{"format": 2, "hardware": [1], "command": 7, "data": "x", "reasons": 3}')
    code, _, err = command("report", damaged_run, "--fast", "--out", damaged_run / "r.html")
    assert code == 0
    assert re.fullmatch(r"  Evaluating on [\d,]+ test images: about .*\n", err), "nothing but the estimate"


def test_metrics_that_are_too_large_to_read_are_named(damaged_run: Path) -> None:
    run = Run(damaged_run)
    with run.metrics_file.open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(VitralError, match=r"metrics\.jsonl: larger than 256 MiB"):
        run.load_metrics()


WRONG_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**62, 1.5, float("nan"), float("inf"), "", "x", "\0", "../../x", [], [1, 2, 3], {}, {"a": 1}
)  # fmt: skip


def paths(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, name))


def replace_value(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *inner = path
    return values | {name: replace_value(values[name], tuple(inner), value) if inner else value}


@pytest.mark.slow
def test_every_field_of_config_json_with_wrong_values_is_accepted_or_refused(damaged_run: Path) -> None:
    file = damaged_run / "model" / "config.json"
    values = json.loads(file.read_text())
    for path in paths(values):
        for value in WRONG_VALUES:
            file.write_text(json.dumps(replace_value(values, path, value)))
            with suppress(VitralError):
                load_model_config(file)


@pytest.mark.slow
def test_every_field_of_a_recipe_with_wrong_values_is_accepted_or_refused(damaged_run: Path) -> None:
    values = parse_toml((damaged_run / "recipe.toml").read_text())
    for path in paths(values):
        for value in WRONG_VALUES:
            with suppress(VitralError):
                recipe_from_dict(replace_value(values, path, value))


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "a\\b", "..", ".", "", "a\nb", "\x1b[31m", "x" * 300])
def test_recipe_name_that_is_a_path_is_refused_and_nothing_is_written(
    name: str, damaged_run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    toml = (damaged_run / "recipe.toml").read_text()
    (tmp_path / "mine.toml").write_text(toml.replace('name = "digits"', f"name = {json.dumps(name)}", 1))
    before = sorted(tmp_path.rglob("*"))
    code, _, err = command("train", "--recipe", tmp_path / "mine.toml")
    assert is_error(code, err)
    assert "name must be a plain name" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_recipe_name_may_have_letters_of_any_script_and_spaces(damaged_run: Path) -> None:
    recipe = read_recipe(damaged_run / "recipe.toml")
    for name in ("folder-finetune", "cifar10-94", "my photos (2)", "꽃 사진", "v1.2"):
        assert recipe.with_overrides({"name": name}).name == name


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_damaged_class_names_are_refused(content: bytes, folder: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "names.txt").write_bytes(content)
    code, _, err = command("predict", "mnist", folder / "photos" / "ants" / "0.png", "--labels", tmp_path / "names.txt")
    assert is_error(code, err), err
    assert "names.txt" in err


@pytest.mark.parametrize("line", [b"zero\x00one", b"\x1b[31mred", "a\u2028b".encode()])
def test_class_names_with_control_characters_are_refused(
    line: bytes, folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "names.txt").write_bytes(b"\n".join([line, *(b"%d" % index for index in range(9))]))
    code, _, err = command("predict", "mnist", folder / "photos" / "ants" / "0.png", "--labels", tmp_path / "names.txt")
    assert is_error(code, err), err
    assert "control character" in err


@pytest.mark.parametrize(
    "content",
    [*HOSTILE.values(), b"path,label\nphotos/ants/0.png\0,ants\n", b"path,label\na.png,\"" + b"x" * 200_000 + b"\"\n",
     b"path,label\n\"a.png,ants\n", b"path,label\n" + b"x" * 5_000 + b".png,ants\n", b"path,label\na.png,a\0b\n"],
)  # fmt: skip
@pytest.mark.parametrize("words", [("train",), ("doctor",)])
def test_damaged_csv_lists_are_refused(content: bytes, words: tuple[str], folder: Path, command: Command) -> None:
    (folder / "list.csv").write_bytes(content)
    code, out, err = command(*words, folder / "list.csv")
    assert is_error(code, err) or (words == ("doctor",) and code == 1 and out), (out, err)
