"""Which numbers a model computes with, and why. What was measured is kept beside the weights, machine by machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from vitral import bundled as box
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware, cores, cpu_name
from vitral.errors import VitralError, typed
from vitral.inference.cuda_engine import GpuEngine
from vitral.inference.engine import Checked, Engine, Number, cannot_be_arranged, cannot_run_here
from vitral.inference.int8_calibration import load_ranges
from vitral.models.vit import ViT
from vitral.runs.run import write_atomically
from vitral.utils.serialization import from_plain, to_plain

FILE = "speed.json"
BATCH_GPU = 256
BATCH = 16  # images at once where nothing was measured: enough for the matrices, little enough for the caches

Wish = Literal["auto", "fp32", "bf16", "int8", "bf16-checked", "int8-checked", "fp8"]
WISHES: tuple[Wish, ...] = get_args(Wish)
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to compute, measured."""

    precision: str
    threads: int
    batch: int
    p50_ms: float  # of a batch
    p95_ms: float
    p99_ms: float
    images_per_second: float
    memory_mb: float  # of the matrices
    agreement: float  # share of images with the same first label as in fp32
    again: float  # share of images that a checked way asks twice


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `vitral bench` found on one CPU."""

    cpu: str
    made_by: str
    date: str
    images: int  # that the ways were compared on
    rows: tuple[Row, ...]
    margins: dict[str, float] = field(default_factory=dict)  # of the checked ways
    precision: str = "fp32"  # recommended
    threads: int = 1
    batch: int = BATCH
    why: str = ""


def read_measured(folder: Path) -> dict[str, Measured]:
    """By CPU. A file that cannot be read is as if nothing had been measured: it only says what is quickest."""
    try:
        machines = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found = {}
        for cpu, plain in machines.items():
            margins = {name: float(margin) for name, margin in plain.pop("margins").items()}
            rows = tuple(from_plain(Row, row) for row in plain.pop("rows"))
            found[cpu] = Measured(rows=rows, margins=margins, **plain)
        return found
    except (OSError, ValueError, AttributeError, KeyError, TypeError, VitralError):
        return {}


def write_measured(folder: Path, measured: Measured) -> None:
    machines = read_measured(folder) | {measured.cpu: measured}
    plain = {cpu: to_plain(each) | {"margins": each.margins, "rows": [to_plain(row) for row in each.rows]}
             for cpu, each in machines.items()}  # fmt: skip
    write_atomically(folder / FILE, json.dumps(plain, indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class Choice:
    precision: str
    batch: int
    why: str
    run: Run | None  # None: the model as it is

    def __str__(self) -> str:
        return f"{self.precision} ({self.why})"


def choose(
    model: ViT, preprocessing: Preprocessing, folder: Path | None, wish: Wish = "auto", threads: int | None = None
) -> Choice:
    """How to ask this model on this CPU: as wished, as measured here, or in fp32."""
    if wish not in WISHES:
        raise VitralError(
            f"precision must be one of {', '.join(WISHES)}, not {wish!r}", "auto: what vitral bench found, or fp32"
        )
    if wish == "fp8":
        raise VitralError("there are no FP8 units on a CPU", "use --precision auto")
    if threads is not None:
        check_threads((threads,))
    measured = read_measured(folder).get(cpu_name()) if folder is not None else None
    if threads is not None:
        torch.set_num_threads(threads)
    elif measured is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(measured.threads)
    batch = measured.batch if measured is not None else BATCH
    if why := cannot_be_arranged(model):
        if wish not in ("auto", "fp32"):
            raise VitralError(f"{wish} is not possible: {why}", "use --precision fp32")
        return Choice(precision="fp32", batch=batch, why=why, run=None)
    if wish != "auto":
        return Choice(
            precision=wish, batch=batch, why="as asked", run=arrange(model, preprocessing, wish, folder, measured)
        )
    if measured is not None:
        try:
            run = arrange(model, preprocessing, measured.precision, folder, measured)
            return Choice(precision=measured.precision, batch=batch, why=measured.why, run=run)
        except VitralError as error:  # its ranges are gone, or torch is another
            why = f"{measured.precision} was measured to be best, but {error.what}"
    else:
        why = "not measured on this CPU: vitral bench does"
    return Choice(precision="fp32", batch=batch, why=why, run=arrange(model, preprocessing, "fp32", None, None))


def choose_on_gpu(model: ViT, preprocessing: Preprocessing, hardware: Hardware, wish: Wish = "auto") -> Choice:
    """bf16 weights where the GPU has the units, and calls that are recorded; the model as it is where that fails."""
    if wish not in ("auto", "fp32", "bf16", "fp8"):
        raise VitralError(f"{wish} is for CPUs; on a GPU models compute in bf16, fp8 or fp32", "use --precision bf16")
    try:
        engine = GpuEngine(model, preprocessing, hardware)
        C, (H, W) = preprocessing.channels, preprocessing.image_size
        for images in (1, 16) if hardware.fused else (1,):  # our kernels differ where tokens are a multiple of 16
            engine(torch.zeros(images, C, H, W, dtype=torch.uint8))
    except RuntimeError as error:  # what cannot be recorded or compiled still runs as it is
        said = (str(error).splitlines() or ["unknown"])[0]
        if hardware.fp8:
            raise VitralError(f"fp8 is not possible: {said}", "use --precision bf16, or auto") from error
        return Choice(precision="fp32", batch=BATCH_GPU, why=f"as it is: recording failed ({said})", run=None)
    why = hardware.reasons["precision"] + engine.how
    number = "fp8" if hardware.fp8 else hardware.precision
    return Choice(precision=number, batch=BATCH_GPU, why=f"{why}; recorded as one launch", run=engine)


def arrange(
    model: ViT, preprocessing: Preprocessing, precision: str, folder: Path | None, measured: Measured | None
) -> Run:
    """A function from uint8 images to logits in these numbers, or why there is none."""
    number: Number = precision.removesuffix("-checked")  # type: ignore[assignment]
    if why := cannot_run_here(number):
        raise VitralError(f"{precision} is not possible: {why}", "use --precision fp32")
    ranges = load_ranges(folder) if number == "int8" and folder is not None else None
    if number == "int8" and ranges is None:
        raise VitralError(
            "int8 needs to know how large the activations get, and nobody has measured that for this model",
            _bench(folder),
        )
    quick = Engine(model, preprocessing, number, ranges)
    if precision == number:
        return quick
    margins = measured.margins if measured is not None else {}
    if number not in margins:
        raise VitralError(
            f"{precision} needs to know how far {number} may be off, and nobody has measured that on this CPU",
            _bench(folder),
        )
    sure: Engine | Checked = Engine(model, preprocessing, "fp32")
    if number == "int8" and "bf16" in margins and not cannot_run_here("bf16"):
        sure = Checked(Engine(model, preprocessing, "bf16"), sure, margins["bf16"])
    return Checked(quick, sure, margins[number])


def _bench(folder: Path | None) -> str:
    return f"vitral bench {'RUN' if folder is None else typed(box.called(folder))} measures it"


def check_threads(counts: Iterable[int]) -> None:
    """Thousands of threads are no faster, and starting them hangs."""
    most = max(64, 2 * cores())
    for threads in counts:
        if not 1 <= threads <= most:
            raise VitralError(f"threads must be from 1 to {most}, not {threads}", f"there are {cores()} cores here")


def possible() -> tuple[Number, ...]:
    """The number types that this CPU computes in."""
    return ("fp32", *(n for n in ("bf16", "int8") if not cannot_run_here(n)))
