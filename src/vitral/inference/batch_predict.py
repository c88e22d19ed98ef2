"""Answers for folders of any size, in one file: decoding and the model overlap, an interruption costs seconds.

While it works, `answers.parquet.parts/` holds what was answered: files that are whole or not there, each with some
hundred answers. Whoever starts again reads their names and asks about the rest. At the end they become one file. Under
torchrun an image belongs to the process that the hash of its name says.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from vitral.data.decode import SUFFIXES
from vitral.errors import VitralError, few
from vitral.inference.prediction import COLUMNS, Prediction, plain, rows
from vitral.inference.predictor import Predictor
from vitral.runs.run import whole_or_not, write_atomically

PART, SECONDS = 512, 10.0  # a part is written after so many answers, or so many seconds: what a power cut can cost
NAMED = 3  # files that could not be read, and folders without pictures: at the end
ENDINGS = (".parquet", ".csv", ".jsonl")


def harvest(predictor: Predictor, paths: Sequence[Path], out: Path, *, top: int = 3, quiet: bool = False) -> int:
    """Every image in `paths` answered exactly once in `out`; the exit status: 1 where some could not be read."""
    world = predictor.hardware.world
    parts = out.with_name(out.name + ".parts")
    world.tell(lambda: _prepare(predictor, paths, out, parts, top))
    done = {_hash(answer["file"]) for answer in _kept(parts)}
    show = _Progress(sum(1 for _ in walk(paths)), len(done), quiet or not world.first, world.size)
    mine = (path for path in walk(paths) if (key := _hash(str(path))) not in done and key[0] % world.size == world.rank)
    number = 1 + max((int(p.stem.rsplit("-", 1)[1]) for p in parts.glob(f"part-{world.rank}-*.jsonl")), default=0)
    waiting: list[Prediction] = []
    since = time.monotonic()
    for answer in chain.from_iterable(predictor.answer(opened, top) for opened in predictor.open_ahead(mine)):
        waiting.append(answer)
        show.step()
        if len(waiting) >= PART or time.monotonic() - since > SECONDS:
            _write_part(parts / f"part-{world.rank}-{number:06}.jsonl", waiting)
            waiting, number, since = [], number + 1, time.monotonic()
    if waiting:
        _write_part(parts / f"part-{world.rank}-{number:06}.jsonl", waiting)
    world.gather([True])  # all have written their last part
    failed, count = world.tell(lambda: _merge(parts, out))
    if world.first and not quiet:
        what = "an error" if len(failed) == 1 else "errors"
        errors = f", {len(failed):,} of them {what}: {few(failed, NAMED)}; its column error says why" if failed else ""
        show.end(f"{out}: {count:,} answer{'s' if count != 1 else ''}{errors}")
        if empty := [str(path) for path in paths if path.is_dir() and next(walk([path]), None) is None]:
            print(f"no images in {few(empty, NAMED)}", file=sys.stderr)
    return 1 if failed else 0


def walk(paths: Iterable[Path]) -> Iterator[Path]:
    """Files as given, and the pictures in and below folders, folder by folder in order; hidden ones are passed over."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, below, files in os.walk(path):
            below[:] = sorted(name for name in below if not name.startswith("."))
            names = (n for n in files if Path(n).suffix.lower() in SUFFIXES and not n.startswith("."))
            yield from (Path(folder) / name for name in sorted(names))


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=12).digest()


def _prepare(predictor: Predictor, paths: Sequence[Path], out: Path, parts: Path, top: int) -> None:
    if out.suffix.lower() not in ENDINGS:
        raise VitralError(f"answers cannot be written to {out.name}", f"Known endings: {', '.join(ENDINGS)}")
    if out.suffix.lower() == ".parquet":
        _arrow()
    if next(walk(paths), None) is None:
        raise VitralError(f"no images in {', '.join(map(str, paths))}", "JPEG, PNG, WebP, BMP, GIF and TIFF are read")
    if out.exists() and not parts.exists():
        raise VitralError(f"{out} is already there", "choose another --out, or delete it")
    parts.mkdir(parents=True, exist_ok=True)
    for leftover in parts.glob(".part-*"):  # of a write that was cut short
        leftover.unlink(missing_ok=True)
    about = {"model": _fingerprint(predictor), "top": top, "classes": len(predictor.classes)}
    said = parts / "about.json"
    if said.exists() and json.loads(said.read_text()) != about:
        raise VitralError(
            f"{parts} holds answers of another model, or with another --top",
            f"delete it to begin again: rm -r {parts}",
        )
    write_atomically(said, json.dumps(about))


def _fingerprint(predictor: Predictor) -> str:
    """Of the weights: a sum of each tensor is enough to tell models apart."""
    sums = torch.stack([p.detach().double().abs().sum().cpu() for p in predictor.model.parameters()])
    return hashlib.blake2b(sums.numpy().tobytes(), digest_size=12).hexdigest()


def _write_part(path: Path, answers: list[Prediction]) -> None:
    write_atomically(path, "".join(json.dumps(plain(answer)) + "\n" for answer in answers))


def _kept(parts: Path) -> Iterator[dict[str, Any]]:
    """All answers so far, one at a time."""
    for part in sorted(parts.glob("part-*.jsonl")):
        with part.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def _merge(parts: Path, out: Path) -> tuple[list[str], int]:
    """All parts as one file, then no parts. Files that are errors, and how many answers there are."""
    failed, count = list[str](), 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal count
        for answer in _kept(parts):
            if "error" in answer:
                failed.append(answer["file"].encode(errors="backslashreplace").decode())  # to be told, in any terminal
            count += 1
            yield answer

    with whole_or_not(out) as file:
        {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}[out.suffix.lower()](counted(), file)
    shutil.rmtree(parts)
    return failed, count


def _jsonl(answers: Iterator[dict[str, Any]], file: Any) -> None:
    for answer in answers:
        file.write((json.dumps(answer) + "\n").encode())


def _csv(answers: Iterator[dict[str, Any]], file: Any) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for answer in answers:
        writer.writerows(rows(_prediction(answer)))
    text.flush()
    text.detach()


def _prediction(answer: dict[str, Any]) -> Prediction:
    from vitral.inference.prediction import Label

    labels = tuple(Label(**label) for label in answer["labels"])
    return Prediction(
        source=answer["file"], labels=labels, unknown=answer.get("unknown", False), error=answer.get("error", "")
    )


def _arrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise VitralError(
            "writing Parquet needs pyarrow", "pip install 'vitral[data]', or use .csv or .jsonl"
        ) from error


def _parquet(answers: Iterator[dict[str, Any]], file: Any) -> None:
    """file, label, probability, labels, probabilities, unknown, error."""
    arrow, parquet = _arrow()
    schema = arrow.schema(
        [("file", arrow.string()), ("label", arrow.string()), ("probability", arrow.float32()),
         ("labels", arrow.list_(arrow.string())), ("probabilities", arrow.list_(arrow.float32())),
         ("unknown", arrow.bool_()), ("error", arrow.string())]
    )  # fmt: skip
    with parquet.ParquetWriter(file, schema) as writer:
        while some := [answer for answer, _ in zip(answers, range(10_000), strict=False)]:
            writer.write_table(arrow.Table.from_pylist([_columns(answer) for answer in some], schema))


def _columns(answer: dict[str, Any]) -> dict[str, Any]:
    first = answer["labels"][0] if answer["labels"] else {"name": None, "probability": None}
    return {
        "file": answer["file"].encode(errors="backslashreplace").decode(),  # Parquet's text is UTF-8
        "label": first["name"],
        "probability": first["probability"],
        "labels": [label["name"] for label in answer["labels"]],
        "probabilities": [label["probability"] for label in answer["labels"]],
        "unknown": answer.get("unknown"),
        "error": answer.get("error"),
    }


class _Progress:
    """One line on stderr that is written over, at most twice a second; on a file or a pipe, one line in ten seconds."""

    def __init__(self, total: int, done: int, quiet: bool, processes: int) -> None:
        self.total, self.before, self.count, self.quiet, self.processes = total, done, 0, quiet, processes
        self.start = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()
        if done and not quiet:
            print(f"going on: {done:,} of {total:,} images were answered before", file=sys.stderr)

    def step(self) -> None:
        self.count += 1
        now = time.monotonic()
        if self.quiet or now - self.last < (0.5 if self.terminal else 10):
            return
        self.last, speed = now, self.count * self.processes / (now - self.start)
        done = min(self.before + self.count * self.processes, self.total)  # the others are as far, more or less
        left = time.strftime("%H:%M:%S", time.gmtime((self.total - done) / max(speed, 1e-9)))
        with contextlib.suppress(OSError):
            line = f"{done:,} of {self.total:,} images   {speed:,.0f}/s   {left} left"
            print(
                f"\r{line}   " if self.terminal else line,
                end="" if self.terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    def end(self, line: str) -> None:
        if self.terminal:
            print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
        print(line)
