"""Predictions for any number of images, written to one file. Decoding overlaps with inference; runs can be resumed.

While it runs, `predictions.parquet.parts/` holds the predictions made so far, a few hundred per file, each file written
atomically. A restart skips the images in them. At the end they are merged into one file. Under torchrun, the hash of
an image's path decides which rank predicts it.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import io
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from vitral.data.files.walk import SkippedFiles, iter_images
from vitral.errors import VitralError, truncate_list
from vitral.inference.prediction import CSV_COLUMNS, Prediction, csv_rows, prediction_from_dict, prediction_to_dict
from vitral.inference.predictor import READABLE_FORMATS, Predictor
from vitral.utils.atomic import atomic_write, atomic_writer
from vitral.utils.json_toml import dump_json, parse_json, read_json
from vitral.utils.progress import progress_interval

PART_SIZE, PART_SECONDS = 512, 10.0  # a part is written after this many predictions or seconds
MAX_LISTED = 3  # unreadable files and empty folders named in the summary
SUFFIXES = (".parquet", ".csv", ".jsonl")
ARROW_BATCH_SIZE = 10_000


def predict_to_file(
    predictor: Predictor, paths: Sequence[Path], out: Path, *, top: int = 3, quiet: bool = False
) -> int:
    """Write exactly one prediction per image in `paths` to `out`. Returns 1 if some could not be read, otherwise 0."""
    world = predictor.hardware.world
    parts = out.with_name(out.name + ".parts")
    world.broadcast_from_rank0(lambda: _prepare(predictor, paths, out, parts, top))
    done = {_path_hash(record["file"]) for record in _read_parts(parts)}
    skipped = SkippedFiles()
    total = sum(1 for _ in iter_images(paths, skipped.add))
    progress = _Progress(total, len(done), quiet or not world.is_rank0, world.size)
    remaining = (
        path
        for path in iter_images(paths)
        if (key := _path_hash(str(path))) not in done and key[0] % world.size == world.rank
    )
    writer = _PartWriter(parts, world.rank)
    batches = predictor.decode_batches(remaining)
    for prediction in chain.from_iterable(predictor.predict_batch(batch, top) for batch in batches):
        writer.add(prediction)
        progress.step()
    writer.flush()
    world.all_gather_objects([True])  # wait until every rank has written its last part
    unreadable, count = world.broadcast_from_rank0(lambda: _merge(parts, out))
    if world.is_rank0 and not quiet:
        errors = f", {len(unreadable):,} unreadable: {truncate_list(unreadable, MAX_LISTED)}" if unreadable else ""
        progress.finish(f"{out}: {count:,} prediction{'s' if count != 1 else ''}{errors}")
        if summary := skipped.summary():
            print(f"  {summary}", file=sys.stderr)
        empty = [str(path) for path in paths if path.is_dir() and next(iter_images([path]), None) is None]
        if empty:
            print(f"No images in {truncate_list(empty, MAX_LISTED)}", file=sys.stderr)
    return 1 if unreadable else 0


def _path_hash(path: str) -> bytes:
    return hashlib.blake2b(path.encode(errors="surrogateescape"), digest_size=12).digest()


def _prepare(predictor: Predictor, paths: Sequence[Path], out: Path, parts: Path, top: int) -> None:
    """Check the arguments, create the folder of parts, or check that an existing one belongs to the same job."""
    if out.suffix.lower() not in SUFFIXES:
        raise VitralError(f"cannot write predictions to {out.name}", f"Supported suffixes: {', '.join(SUFFIXES)}")
    if out.suffix.lower() == ".parquet":
        _import_pyarrow()
    if next(iter_images(paths), None) is None:
        raise VitralError(f"no images in {', '.join(map(str, paths))}", READABLE_FORMATS)
    if out.exists() and not parts.exists():
        raise VitralError(f"{out} already exists", "Choose another --out, or delete it")
    parts.mkdir(parents=True, exist_ok=True)
    for leftover in parts.glob(".part-*"):  # of an interrupted write
        leftover.unlink(missing_ok=True)
    job = {
        "model": _weights_fingerprint(predictor),
        "engine": predictor.engine.name,
        "top": top,
        "classes": len(predictor.classes),
    }
    job_file = parts / "job.json"
    if job_file.exists() and read_json(job_file) != job:
        raise VitralError(
            f"{parts} holds predictions of another model or engine, or with another --top",
            f"Delete it to start over: rm -r {parts}",
        )
    atomic_write(job_file, dump_json(job))


def _weights_fingerprint(predictor: Predictor) -> str:
    """Hash of the sums of all parameters, which is enough to tell models apart."""
    sums = torch.stack([p.detach().double().abs().sum().cpu() for p in predictor.model.parameters()])
    return hashlib.blake2b(sums.numpy().tobytes(), digest_size=12).hexdigest()


class _PartWriter:
    """Collects predictions and writes them as numbered part files of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        numbers = (int(part.stem.rsplit("-", 1)[1]) for part in folder.glob(f"part-{rank}-*.jsonl"))
        self.number = 1 + max(numbers, default=0)
        self.predictions: list[Prediction] = []
        self.last_write = time.monotonic()

    def add(self, prediction: Prediction) -> None:
        self.predictions.append(prediction)
        if len(self.predictions) >= PART_SIZE or time.monotonic() - self.last_write > PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.predictions:
            lines = [dump_json(prediction_to_dict(prediction)) + "\n" for prediction in self.predictions]
            atomic_write(self.folder / f"part-{self.rank}-{self.number:06}.jsonl", "".join(lines))
            self.number += 1
        self.predictions, self.last_write = [], time.monotonic()


def _read_parts(parts: Path) -> Iterator[dict[str, Any]]:
    for part in sorted(parts.glob("part-*.jsonl")):
        with part.open(encoding="utf-8") as lines:
            for line in lines:
                yield parse_json(line)


def _merge(parts: Path, out: Path) -> tuple[list[str], int]:
    """Merge all parts into `out` and delete them. Returns the unreadable files and the number of predictions."""
    unreadable, count = list[str](), 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal count
        for record in _read_parts(parts):
            if "error" in record:
                unreadable.append(_printable(record["file"]))
            count += 1
            yield record

    with atomic_writer(out) as file:
        {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_jsonl}[out.suffix.lower()](records(), file)
    shutil.rmtree(parts)
    return unreadable, count


def _printable(path: str) -> str:
    """A path as valid UTF-8: undecodable bytes of file names are escaped."""
    return path.encode(errors="backslashreplace").decode()


def _write_jsonl(records: Iterator[dict[str, Any]], file: Any) -> None:
    for record in records:
        file.write((dump_json(record) + "\n").encode())


def _write_csv(records: Iterator[dict[str, Any]], file: Any) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for record in records:
        writer.writerows(csv_rows(prediction_from_dict(record)))
    text.flush()
    text.detach()


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise VitralError(
            "writing Parquet requires pyarrow", "pip install 'vitral[data]', or write .csv or .jsonl"
        ) from error


def _write_parquet(records: Iterator[dict[str, Any]], file: Any) -> None:
    arrow, parquet = _import_pyarrow()
    schema = arrow.schema(
        [("file", arrow.string()), ("label", arrow.string()), ("probability", arrow.float32()),
         ("labels", arrow.list_(arrow.string())), ("probabilities", arrow.list_(arrow.float32())),
         ("ood", arrow.bool_()), ("error", arrow.string()), ("engine", arrow.string())]
    )  # fmt: skip
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := [record for record, _ in zip(records, range(ARROW_BATCH_SIZE), strict=False)]:
            writer.write_table(arrow.Table.from_pylist([_parquet_row(record) for record in batch], schema))


def _parquet_row(record: dict[str, Any]) -> dict[str, Any]:
    best = record["labels"][0] if record["labels"] else {"name": None, "probability": None}
    return {
        "file": _printable(record["file"]),
        "label": best["name"],
        "probability": best["probability"],
        "labels": [label["name"] for label in record["labels"]],
        "probabilities": [label["probability"] for label in record["labels"]],
        "ood": record.get("ood"),
        "error": record.get("error"),
        "engine": record.get("engine"),
    }


class _Progress:
    """Progress on stderr: one line rewritten twice per second on a terminal, one line every 30 s elsewhere."""

    def __init__(self, total: int, done: int, quiet: bool, num_ranks: int) -> None:
        self.total, self.resumed, self.count, self.quiet, self.num_ranks = total, done, 0, quiet, num_ranks
        self.start = self.last = time.monotonic()
        self.is_terminal = sys.stderr.isatty()
        if done and not quiet:
            print(f"Resuming: {done:,} of {total:,} images are already predicted", file=sys.stderr)

    def step(self) -> None:
        self.count += 1
        now = time.monotonic()
        if self.quiet or now - self.last < (0.5 if self.is_terminal else progress_interval()):
            return
        self.last, speed = now, self.count * self.num_ranks / (now - self.start)
        done = min(self.resumed + self.count * self.num_ranks, self.total)  # assumes that all ranks are equally fast
        remaining = time.strftime("%H:%M:%S", time.gmtime((self.total - done) / max(speed, 1e-9)))
        line = f"{done:,} of {self.total:,} images   {speed:,.0f} images/s   {remaining} remaining"
        with contextlib.suppress(OSError):
            if self.is_terminal:
                print(f"\r{line}   ", end="", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)

    def finish(self, summary: str) -> None:
        if self.is_terminal:
            print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
        print(summary)
