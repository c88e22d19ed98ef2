"""Every way to ask a model on this CPU, timed in turns: number type × threads × batch, and which one to take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import cpu_name, is_busy
from vitral.errors import VitralError
from vitral.inference.engine import Checked, Engine, cannot_be_arranged, margin_of
from vitral.inference.engine_selection import Measured, Row, check_threads, possible, write_measured
from vitral.inference.int8_calibration import measure_ranges, save_ranges
from vitral.models.vit import ViT

SAME = 0.999  # a way is recommended if so many images keep their first label
LEAST_IMAGES = 16
MOST_AT_ONCE = 4096
SIMPLER = 1.2  # a way that is not this much quicker than fp32 is not worth being less plain
Ways = dict[str, Engine | Checked]
Margins = dict[str, float]


def ways_of(model: ViT, preprocessing: Preprocessing, images_NCHW: Tensor, folder: Path | None) -> tuple[Ways, Margins]:
    """All ways this CPU offers, and the margins of the checked ones, learned from these images.

    With a folder, what int8 needs to know about the model is kept there.
    """
    if why := cannot_be_arranged(model):
        raise VitralError(f"there is nothing to choose: {why}", "the model is run as it is, in fp32")
    fp32 = Engine(model, preprocessing, "fp32")
    ways: dict[str, Engine] = {"fp32": fp32}
    margins: Margins = {}
    answers = in_batches(fp32, images_NCHW)
    for number in possible()[1:]:
        ranges = measure_ranges(model, images_NCHW.split(16), preprocessing) if number == "int8" else None
        if ranges is not None and folder is not None:
            save_ranges(folder, ranges)
        ways[number] = quick = Engine(model, preprocessing, number, ranges)
        margins[number] = margin_of(in_batches(quick, images_NCHW), answers)
    return dict(ways) | checked(ways, margins), margins


def checked(engines: dict[str, Engine], margins: Margins) -> dict[str, Checked]:
    """int8 asks bf16 where it is in doubt, and that asks fp32."""
    found: dict[str, Checked] = {}
    for number, margin in margins.items():
        sure = found.get("bf16-checked", engines["fp32"])
        found[f"{number}-checked"] = Checked(engines[number], sure, margin)
    return found


def in_batches(run: Callable[[Tensor], Tensor], images_NCHW: Tensor) -> Tensor:
    return torch.cat([run(images) for images in images_NCHW.split(16)])


def bench(
    model: ViT,
    preprocessing: Preprocessing,
    images_NCHW: Tensor,
    folder: Path | None = None,
    *,
    threads: Sequence[int],
    batches: Sequence[int] = (1, 8, 32),
    seconds: float = 1.0,
    say: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Measured with uint8 images as the model wants them: half of them to learn from, the others to compare on.

    `seconds` for each row of the table; the ways take turns, so that a busy moment meets all of them.
    """
    if len(images_NCHW) < LEAST_IMAGES:
        raise VitralError(f"{len(images_NCHW)} images are too few to measure with", f"at least {LEAST_IMAGES}")
    check_threads(threads)
    if not 0 < seconds < math.inf:
        raise VitralError(f"seconds must be above 0, not {seconds}", "leave --seconds out for 1")
    for batch in batches:
        if not 1 <= batch <= MOST_AT_ONCE:
            raise VitralError(f"batches must be from 1 to {MOST_AT_ONCE:,} images, not {batch}", "--batches 1 8 32")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(max(threads))
        if busy := is_busy():
            say(busy)
        say(f"learning from {len(images_NCHW[::2])} images how large the numbers get")
        ways, margins = ways_of(model, preprocessing, images_NCHW[::2], folder)
        compared = images_NCHW[1::2]
        answers = {name: in_batches(way, compared) for name, way in ways.items()}
        said = {name: logits.argmax(dim=1) for name, logits in answers.items()}
        agreement = {name: float((labels == said["fp32"]).double().mean()) for name, labels in said.items()}
        again = {
            name: float(way.close(answers[name.removesuffix("-checked")]).double().mean())
            for name, way in ways.items()
            if isinstance(way, Checked)
        }
        rows: list[Row] = []
        for count in threads:
            torch.set_num_threads(count)
            for batch in batches:
                say(f"{count} thread{'s' if count > 1 else ''}, {batch} image{'s' if batch > 1 else ''} at once")
                times = _in_turns(ways, _repeated(compared, batch), batch, seconds)
                rows += [
                    _row(name, ways[name], count, batch, times[name], agreement[name], again.get(name, 0.0))
                    for name in ways
                ]
    finally:
        torch.set_num_threads(before)
    best, why = recommend(rows, len(compared))
    measured = Measured(
        cpu=cpu_name(),
        made_by=f"vitral {__version__}, torch {torch.__version__}",
        date=time.strftime("%Y-%m-%d"),
        images=len(compared),
        rows=tuple(rows),
        margins=margins,
        precision=best.precision,
        threads=best.threads,
        batch=best.batch,
        why=why,
    )
    if folder is not None:
        write_measured(folder, measured)
    return measured


def _repeated(images_NCHW: Tensor, least: int) -> Tensor:
    return images_NCHW.repeat(-(-least // len(images_NCHW)), 1, 1, 1)


def _in_turns(ways: Ways, images_NCHW: Tensor, batch: int, seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    places = range(0, len(images_NCHW) - batch + 1, batch)
    turn, end = 0, time.perf_counter() + seconds * len(ways)
    for way in ways.values():
        way(images_NCHW[:batch])  # the first call of a shape makes oneDNN write its kernels
    while turn < 5 or time.perf_counter() < end:
        images = images_NCHW[places[turn % len(places)] :][:batch]  # others each time: what is close changes
        for name, way in ways.items():
            start = time.perf_counter()
            way(images)
            times[name].append(time.perf_counter() - start)
        turn += 1
    return times


def _row(
    name: str, way: Engine | Checked, threads: int, batch: int, times: list[float], agreement: float, again: float
) -> Row:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    # A checked way is slower where it asks twice, so its speed is that of the mean, as is everybody's.
    return Row(
        precision=name,
        threads=threads,
        batch=batch,
        p50_ms=round(cuts[49] * 1e3, 3),
        p95_ms=round(cuts[94] * 1e3, 3),
        p99_ms=round(cuts[98] * 1e3, 3),
        images_per_second=round(batch / statistics.mean(times), 1),
        memory_mb=round(way.nbytes / 1e6, 1),
        agreement=agreement,
        again=again,
    )


def recommend(rows: Sequence[Row], images: int) -> tuple[Row, str]:
    """The quickest way that keeps the first label of 999 images in a thousand, and the sentence that says so."""
    plain = max((row for row in rows if row.precision == "fp32"), key=lambda row: row.images_per_second)
    best = plain
    for row in sorted(rows, key=lambda row: row.images_per_second):
        if row.agreement >= SAME and row.images_per_second > SIMPLER * plain.images_per_second:
            best = row
    same = round(best.agreement * images)
    faster = best.images_per_second / plain.images_per_second
    why = (
        f"{best.images_per_second:,.0f} images/s with {best.threads} thread{'s' if best.threads > 1 else ''}, "
        + (f"{faster:.1f} × fp32; " if best is not plain else "nothing quicker agrees; ")
        + f"the same first label on {same:,} of {images:,} images"
    )
    return best, why
