"""Strict JSON out; hostile JSON and TOML in: a ValueError, never another exception."""

from __future__ import annotations

import json
import math
import tomllib

import pytest

from vitral.utils import json_toml
from vitral.utils.json_toml import (
    MAX_DEPTH,
    dump_json,
    parse_json,
    parse_toml,
    read_json,
    read_json_object,
    read_text,
    read_toml,
)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def test_non_finite_values_are_written_as_null_at_any_depth():
    values = {"loss": math.nan, "rows": [{"x": math.inf}, (-math.inf, 1.5)], "name": "NaN", "none": None, "flag": True}
    parsed = json.loads(dump_json(values), parse_constant=refuse_constant)
    assert parsed == {"loss": None, "rows": [{"x": None}, [None, 1.5]], "name": "NaN", "none": None, "flag": True}


def test_options_of_json_dumps_apply():
    assert dump_json({"b": "é"}, ensure_ascii=False, separators=(",", ":")) == '{"b":"é"}'


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, "x", null, true]}', "-9223372036854775808", "[]", '"\\u0000"'])
def test_ordinary_json_is_unchanged(text):
    assert parse_json(text) == json.loads(text)


def test_nesting_up_to_the_limit_is_accepted():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert parse_toml("a = " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_nested_deeper_is_a_value_error(opening, depth):
    closing = {"[": "]", '{"a":': "}"}[opening]
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        parse_json(opening * depth + "1" + closing * depth)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200, 100_000])
def test_toml_nested_deeper_is_a_value_error(depth):
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        parse_toml("a = " + "[" * depth + "]" * depth)


@pytest.mark.parametrize("text", ["[" + ".".join(["a"] * 100_000) + "]", ".".join(["a"] * 100_000) + " = 1"])
def test_toml_keys_with_too_many_dots_are_refused_at_once(text):
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        parse_toml(text)


def test_toml_values_may_have_any_number_of_dots():
    assert parse_toml(f'a = "{"." * 1_000}"')


@pytest.mark.parametrize("digits", ["1" * 21, "-" + "1" * 400, "1" * 5_000])
def test_long_integers_are_a_value_error(digits):
    for parse, text in ((parse_json, f'{{"a": [{digits}]}}'), (parse_toml, f"a = [{digits}]")):
        with pytest.raises(ValueError, match="more than 19 digits"):
            parse(text)


def test_damaged_files_are_a_value_error(tmp_path, monkeypatch):
    file = tmp_path / "x"
    for content in (b"", b"\0", b'{"a": ', b"[1,]", b'{"a": \x00}'):
        file.write_bytes(content)
        with pytest.raises(json.JSONDecodeError):
            read_json(file)
    for content in (b"\0", b"a = ", b"a = 1\na = 2"):
        file.write_bytes(content)
        with pytest.raises(tomllib.TOMLDecodeError):
            read_toml(file)
    file.write_bytes(b"\xff\xfe")
    for read in (read_json, read_toml, read_text):
        with pytest.raises(UnicodeDecodeError):
            read(file)
    file.write_bytes(b"[1]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        read_json_object(file)
    monkeypatch.setattr(json_toml, "MAX_FILE_BYTES", 2**20)
    file.write_bytes(b" " * (2**20 + 1))
    for read in (read_text, read_toml):
        with pytest.raises(ValueError, match="larger than 1 MiB"):
            read(file)
