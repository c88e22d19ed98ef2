"""Predictions for any number of images, written to one file. Decoding overlaps with inference; runs can be resumed.

While it runs, `predictions.parquet.parts/` holds the predictions made so far, a few hundred per file, each file written
atomically. A restart skips the images in them. At the end they are merged into one file, and
`predictions.parquet.job.json` records the job, so that a repeated command does nothing. Under torchrun, the hash of an
image's path decides which rank predicts it.
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
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from vitral.data.decode import SUPPORTED_FORMATS
from vitral.data.files.walk import SkippedFiles, iter_images
from vitral.distributed.world import World
from vitral.errors import Interrupted, VitralError, shell_quote, truncate_list
from vitral.inference.prediction import (
    Prediction,
    csv_columns,
    csv_rows,
    prediction_from_dict,
    prediction_to_dict,
    table_row,
)
from vitral.inference.predictor import Predictor
from vitral.utils.atomic import atomic_write, atomic_writer
from vitral.utils.json_toml import dump_json, parse_json, read_json
from vitral.utils.progress import format_duration, progress_interval
from vitral.utils.serialization import to_dict
from vitral.utils.text import count_text

PART_SIZE, PART_SECONDS = 512, 10.0  # a part is written after this many predictions or seconds
MAX_LISTED = 3  # unreadable files and empty folders named in the summary
SUFFIXES = (".parquet", ".csv", ".jsonl")
ARROW_BATCH_SIZE = 10_000


def predict_to_file(predictor: Predictor, paths: Sequence[Path], out: Path, *, top: int = 3) -> int:
    """Write exactly one prediction per image in `paths` to `out`. Returns 1 if some could not be read, otherwise 0.

    After an interruption the same call continues; the predictions made so far are kept. If the job is finished already,
    the call does nothing and returns 0.
    """
    world = predictor.hardware.world
    job = _Job(predictor, paths, out, top)
    summary = world.broadcast_from_rank0(job.prepare)
    if summary is not None:
        if world.is_rank0:
            print(f"{summary}. Finished before, nothing to do")
        return 0
    progress, skipped = _Progress(world), SkippedFiles()
    try:
        unreadable, count = _predict(job, progress, skipped)
    except KeyboardInterrupt:
        progress.clear()
        raise Interrupted(
            f"interrupted; {progress.num_done:,} of {progress.total:,} images are predicted and saved in {job.parts}",
            "Continue with the same command",
        ) from None
    if world.is_rank0:
        progress.clear()
        print(_summary(out, count, unreadable))
        if skipped_summary := skipped.summary():
            print(f"  {skipped_summary}", file=sys.stderr)
        empty = [str(path) for path in paths if path.is_dir() and next(iter_images([path]), None) is None]
        if empty:
            print(f"No images in {truncate_list(empty, MAX_LISTED)}", file=sys.stderr)
    return 1 if unreadable else 0


def _predict(job: _Job, progress: _Progress, skipped: SkippedFiles) -> tuple[list[str], int]:
    """Predict the remaining images and merge all parts. Returns the unreadable files and the number of predictions."""
    predictor, world = job.predictor, job.predictor.hardware.world
    done = {_path_hash(record["file"]) for record in _read_parts(job.parts)}
    progress.begin(sum(1 for _ in iter_images(job.paths, skipped.add)), len(done))
    remaining = (
        path
        for path in iter_images(job.paths)
        if (key := _path_hash(str(path))) not in done and key[0] % world.size == world.rank
    )
    writer = _PartWriter(job.parts, world.rank)
    batches = predictor.decode_batches(remaining)
    try:
        for prediction in chain.from_iterable(predictor.predict_batch(batch, job.top) for batch in batches):
            writer.add(prediction)
            progress.step()
    finally:
        writer.flush()
    world.all_gather_objects([True])  # wait until every rank has written its last part
    return world.broadcast_from_rank0(job.finish)


def _path_hash(path: str) -> bytes:
    return hashlib.blake2b(path.encode(errors="surrogateescape"), digest_size=12).digest()


def _summary(out: Path, count: int, unreadable: Sequence[str]) -> str:
    errors = f", {len(unreadable):,} unreadable: {truncate_list(unreadable, MAX_LISTED)}" if unreadable else ""
    return f"{out}: {count_text(count, 'prediction')}{errors}"


class _Job:
    """What is predicted with which model, recorded next to the predictions so that no other job is mixed in."""

    def __init__(self, predictor: Predictor, paths: Sequence[Path], out: Path, top: int) -> None:
        self.predictor, self.paths, self.out, self.top = predictor, paths, out, top
        self.parts = out.with_name(out.name + ".parts")
        self.record_file = out.with_name(out.name + ".job.json")  # of the finished job

    def settings(self) -> dict[str, Any]:
        calibration = self.predictor.model_config.calibration
        return {
            "model": _weights_fingerprint(self.predictor),
            "classes": _path_hash("\0".join(self.predictor.classes)).hex(),
            "calibration": to_dict(replace(calibration, fitted_on="", engine="")),
            "engine": self.predictor.engine.name,
            "top": self.top,
        }

    def prepare(self) -> str | None:
        """Check the arguments and create the folder of parts. Returns the summary of a job that is finished already."""
        out, parts = self.out, self.parts
        if out.suffix.lower() not in SUFFIXES:
            raise VitralError(f"cannot write predictions to {out.name}", f"Supported suffixes: {', '.join(SUFFIXES)}")
        if out.suffix.lower() == ".parquet":
            _import_pyarrow()
        if next(iter_images(self.paths), None) is None:
            raise VitralError(f"no images in {', '.join(map(str, self.paths))}", SUPPORTED_FORMATS)
        settings = self.settings()
        if out.exists() and (self.record_file.exists() or not parts.exists()):
            summary = self.finished_summary(settings)
            shutil.rmtree(parts, ignore_errors=True)
            return summary
        self.record_file.unlink(missing_ok=True)
        parts.mkdir(parents=True, exist_ok=True)
        for leftover in parts.glob(".part-*"):  # of an interrupted write
            leftover.unlink(missing_ok=True)
        job_file = parts / "job.json"
        if job_file.exists() and read_json(job_file) != settings:
            raise VitralError(
                f"{parts} holds predictions of another model or engine, or with another --top",
                f"Delete it to start over: rm -r {shell_quote(parts)}",
            )
        atomic_write(job_file, dump_json(settings))
        return None

    def finished_summary(self, settings: dict[str, Any]) -> str:
        """The summary if `out` is the result of this job; otherwise raise a VitralError."""
        hint = "Choose another --out, or delete it"
        try:
            record = read_json(self.record_file)
            is_unchanged = record["bytes"] == self.out.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            is_unchanged = False
        if not is_unchanged:
            raise VitralError(f"{self.out} already exists", hint)
        if record["settings"] != settings:
            raise VitralError(f"{self.out} holds predictions of another model or engine, or with another --top", hint)
        if record["files"] != self.listing_digest():
            raise VitralError(f"{self.out} holds predictions of other images", hint)
        return _summary(self.out, record["predictions"], record["unreadable"])

    def listing_digest(self) -> str:
        """Hash of all paths, whatever their order."""
        total = sum(int.from_bytes(_path_hash(str(path))) for path in iter_images(self.paths))
        return f"{total % 2**96:024x}"

    def finish(self) -> tuple[list[str], int]:
        """Merge all parts, record the job and delete the parts."""
        unreadable, count = _merge(self.parts, self.out, self.predictor.is_regression)
        record = {
            "settings": self.settings(),
            "files": self.listing_digest(),
            "predictions": count,
            "unreadable": unreadable,
            "bytes": self.out.stat().st_size,
        }
        atomic_write(self.record_file, dump_json(record))
        shutil.rmtree(self.parts)
        return unreadable, count


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


def _merge(parts: Path, out: Path, is_regression: bool) -> tuple[list[str], int]:
    """Merge all parts into `out`. Returns the unreadable files and the number of predictions."""
    unreadable, count = list[str](), 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal count
        for record in _read_parts(parts):
            if "error" in record:
                unreadable.append(_printable(record["file"]))
            count += 1
            yield record

    with atomic_writer(out) as file:
        write = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_jsonl}[out.suffix.lower()]
        write(records(), file, is_regression)
    return unreadable, count


def _printable(path: str) -> str:
    """A path as valid UTF-8: undecodable bytes of file names are escaped."""
    return path.encode(errors="backslashreplace").decode()


def _write_jsonl(records: Iterator[dict[str, Any]], file: Any, is_regression: bool) -> None:
    for record in records:
        file.write((dump_json(record) + "\n").encode())


def _write_csv(records: Iterator[dict[str, Any]], file: Any, is_regression: bool) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(csv_columns(is_regression))
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


def _write_parquet(records: Iterator[dict[str, Any]], file: Any, is_regression: bool) -> None:
    arrow, parquet = _import_pyarrow()
    number, numbers, names = arrow.float64(), arrow.list_(arrow.float64()), arrow.list_(arrow.string())
    schema = arrow.schema(
        [("file", arrow.string()), ("value", number), ("low", number), ("high", number), ("targets", names),
         ("values", numbers), ("lows", numbers), ("highs", numbers), ("coverage", number),
         ("error", arrow.string()), ("engine", arrow.string())]
        if is_regression else
        [("file", arrow.string()), ("label", arrow.string()), ("probability", arrow.float32()),
         ("labels", names), ("probabilities", arrow.list_(arrow.float32())),
         ("ood", arrow.bool_()), ("error", arrow.string()), ("engine", arrow.string()),
         ("prediction_set", names), ("coverage", number), ("present", names)]
    )  # fmt: skip
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := list(islice(records, ARROW_BATCH_SIZE)):
            rows = [table_row(prediction_from_dict(record)) for record in batch]
            rows = [row | {"file": _printable(row["file"])} for row in rows]
            writer.write_table(arrow.Table.from_pylist(rows, schema))


class _Progress:
    """Progress on stderr of rank 0: one line rewritten twice per second on a terminal, one every 30 s elsewhere."""

    def __init__(self, world: World) -> None:
        self.is_shown, self.num_ranks = world.is_rank0, world.size
        self.total = self.resumed = self.count = 0
        self.start = self.last = time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def begin(self, total: int, done: int) -> None:
        self.total, self.resumed = total, done
        self.start = self.last = time.monotonic()
        if done and self.is_shown:
            print(f"Resuming: {done:,} of {total:,} images are already predicted", file=sys.stderr)

    @property
    def num_done(self) -> int:
        """Assumes that all ranks are equally fast."""
        return min(self.resumed + self.count * self.num_ranks, self.total)

    def step(self) -> None:
        self.count += 1
        now = time.monotonic()
        if not self.is_shown or now - self.last < (0.5 if self.is_terminal else progress_interval()):
            return
        self.last, speed = now, self.count * self.num_ranks / (now - self.start)
        remaining = format_duration((self.total - self.num_done) / max(speed, 1e-9))
        line = f"{self.num_done:,} of {self.total:,} images   {speed:,.0f} images/s   {remaining} remaining"
        with contextlib.suppress(OSError):
            if self.is_terminal:
                print(f"\r{line}   ", end="", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.is_terminal and self.is_shown:
            print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
