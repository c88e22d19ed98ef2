"""What a model says about a picture, and how that is written down: without torch, for every way to ask."""

from __future__ import annotations

import csv
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vitral.errors import VitralError


@dataclass(frozen=True, kw_only=True)
class Label:
    name: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the model says about one picture, or why it could not be asked."""

    source: str
    labels: tuple[Label, ...] = ()  # most probable first
    unknown: bool = False  # it looks like nothing the model was trained on
    exchanged: Label | None = None  # with light and dark exchanged, where they are other than in its training
    error: str = ""

    @property
    def best(self) -> Label:
        if not self.labels:
            raise VitralError(f"there is no answer for {self.source}: {self.error}", "look at .error before .best")
        return self.labels[0]


def ranked(names: Sequence[str], probabilities: Sequence[float], top: int | None) -> tuple[Label, ...]:
    order = sorted(zip(names, probabilities, strict=True), key=lambda item: -item[1])
    return tuple(Label(name=name, probability=probability) for name, probability in order[:top])


def in_order(
    waiting: Iterable[tuple[str, object]],
    rows: Iterable[tuple[Sequence[float], bool]],
    names: Sequence[str],
    top: int | None,
) -> Iterator[Prediction]:
    """An answer for each picture that waited, by its name and pixels, or with a sentence instead of pixels.

    `rows`: probabilities, and whether it is unknown, of those with pixels.
    """
    answered = iter(rows)
    for source, pixels in waiting:
        if isinstance(pixels, str):
            yield Prediction(source=source, error=pixels)
        else:
            probabilities, unknown = next(answered)
            yield Prediction(source=source, labels=ranked(names, probabilities, top), unknown=unknown)


def in_words(labels: Sequence[Label], unknown: bool) -> str:
    """glass 0.94 · plastic 0.04, most probable first; or that it does not know, and what comes nearest."""
    said = [f"{label.name} {label.probability:.2f}" for label in labels]
    return f"unsure: looks like nothing it was trained on (nearest: {said[0]})" if unknown else " · ".join(said)


def cells(text: str) -> int:
    """How wide a text is on a terminal: Korean, Chinese and Japanese letters take two places."""
    letters = unicodedata.normalize("NFC", text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in letters
    )


def as_lines(answers: Sequence[Prediction]) -> None:
    """bottle.jpg     glass 0.94 · plastic 0.04 · metal 0.01"""
    width = max(cells(answer.source) for answer in answers)
    for answer in answers:
        if answer.error:
            continue
        labels = in_words(answer.labels, answer.unknown)
        if answer.exchanged is not None:
            labels += f"; with light and dark exchanged: {answer.exchanged.name} {answer.exchanged.probability:.2f}"
        print(f"{answer.source}{' ' * (width - cells(answer.source))}   {labels}")


def as_json(answers: Sequence[Prediction]) -> None:
    for answer in answers:
        print(json.dumps(plain(answer)))


def plain(answer: Prediction) -> dict[str, object]:
    labels = [{"name": label.name, "probability": label.probability} for label in answer.labels]
    answered: dict[str, object] = {"file": answer.source, "labels": labels}
    if answer.exchanged is not None:
        answered["exchanged"] = {"name": answer.exchanged.name, "probability": answer.exchanged.probability}
    return answered | ({"error": answer.error} if answer.error else {"unknown": answer.unknown})


COLUMNS = ("file", "rank", "label", "probability", "unknown", "error")


def rows(answer: Prediction) -> list[list[str]]:
    """As columns: one row a label, or one with the error."""
    if answer.error:
        return [[answer.source, "", "", "", "", answer.error]]
    unknown = "yes" if answer.unknown else "no"
    return [
        [answer.source, str(rank), label.name, f"{label.probability:.6f}", unknown, ""]
        for rank, label in enumerate(answer.labels, start=1)
    ]


def as_csv(answers: Sequence[Prediction]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for answer in answers:
        writer.writerows(rows(answer))


def show(answers: Sequence[Prediction], form: str) -> int:
    """Print what could be read to stdout, what could not to stderr; the exit status."""
    {"json": as_json, "csv": as_csv}.get(form, as_lines)(answers)
    failed = [answer for answer in answers if answer.error]
    for answer in failed:
        print(f"error: {answer.error}", file=sys.stderr)
    return exit_status(len(failed), len(answers))


def exit_status(failed: int, asked: int) -> int:
    """Of a command that was asked about so many files; how many failed is said."""
    if failed:
        print(f"       {failed} of {asked} files could not be read", file=sys.stderr)
    return 1 if failed else 0
