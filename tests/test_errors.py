"""Helpers for error messages."""

from __future__ import annotations

import pytest

from vitral.errors import edit_distance, nearest_name, one_line

NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "pedestal", "bee", "house", "train", "B/16", "lr")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cifar01", "cifar10"), ("minst", "mnist"), ("mnsit", "mnist"), ("mnisr", "mnist"), ("MNIST", "mnist"),
        ("fashion_mnist", "fashion-mnist"), ("fashionmnist", "fashion-mnist"), ("fasion-mnits", "fashion-mnist"),
        ("cifar-10", "cifar10"), ("cifar1000", "cifar100"), ("digit", "digits"), ("be", "bee"), ("tran", "train"),
        ("pedastal", "pedestal"), ("B/61", "B/16"), ("b/16", "B/16"), ("lrr", "lr"),
    ],
)  # fmt: skip
def test_misspelled_names_are_recognised(typed, meant):
    assert nearest_name(typed, NAMES) == meant


@pytest.mark.parametrize(
    "typed", ["metal", "imagenet", "fee", "mouse trap", "photos", "", "x", "brain scan", "B/32", "cat", "m" * 10_000]
)
def test_other_words_are_not_taken_for_misspellings(typed):
    assert nearest_name(typed, NAMES) is None


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "abc", 3), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "abxc", 1), ("abc", "abd", 1.2), ("ca", "abc", 3)],
)
def test_edit_distance_of_known_pairs(a, b, distance):
    assert edit_distance(a, b) == edit_distance(b, a) == pytest.approx(distance)


def test_control_characters_are_escaped_and_other_text_is_kept():
    assert one_line("a\nb\x1b[31m\0\u202e é 한국어 \udcff") == "a\\nb\\x1b[31m\\x00\\u202e é 한국어 \udcff"


def test_the_middle_of_a_long_text_is_left_out():
    text = one_line("a" * 10**6 + "b")
    assert len(text) < 1010
    assert text.startswith("aaa")
    assert text.endswith("ab")
