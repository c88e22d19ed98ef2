"""CPU inference at equal labels: the engine that `vitral bench` would choose, against OpenVINO in every precision.

    vitral train hymenoptera/ --init-from ti16.safetensors --out runs/hymenoptera
    python benchmarks/cpu_labels.py runs/hymenoptera --folder hymenoptera/ [--sizes Ti/16 S/16 B/16] [--save]

Every image is computed once by every implementation, in turns, so that means include what cascades compute twice.
Labels come from these very calls. There are two folds: int8 (ours and NNCF's) and the margins of the cascades are
calibrated on up to 64 images of the other fold, never on those that are measured. `--one-fold` halves the
preparation: every second image calibrates or is left out.

The peer is the variant of OpenVINO with the smallest mean time among those with fp32's label on at least 99.9% of the
images: fp32, bf16 (the default of the package on this CPU) or int8, a batch on all cores or, for larger batches, a
share of it on each core. S/16 and B/16 are the same function widened (see cpu_inference.py).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from cpu_inference import PACKAGES, WIDTH_FACTORS, ForwardFn, openvino_graphs, openvino_peers, widen
from vitral.device.cpu import cpu_name
from vitral.inference.agreement import Agreement
from vitral.inference.bench import SETTLE_SECONDS, build_engines, recommend, shared, speed_columns
from vitral.inference.bench_results import BenchRow
from vitral.inference.cascade import CascadeEngine
from vitral.inference.parallel_batches import share_batch
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT
from vitral.runs.model_io import ModelConfig

CALIBRATION_IMAGES = 64
MIN_AGREEMENT = 0.999  # of a peer
NUM_RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="fine-tuned ViT-Ti/16")
    parser.add_argument("--folder", type=Path, required=True, help="photographs")
    parser.add_argument("--sizes", nargs="+", default=[*WIDTH_FACTORS], choices=[*WIDTH_FACTORS])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=10_000, help="maximum number, evenly spaced")
    parser.add_argument("--one-fold", action="store_true")
    add_output_arguments(parser)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    predictor = Predictor.load(args.run, device="cpu", engine="reference")
    files = sorted(path for path in args.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    files = files[:: max(len(files) // args.images, 1)]
    images = torch.stack([torch.as_tensor(predictor.decode_image(file)[1]) for file in files])
    print(f"{cpu_name()}, torch {torch.__version__}, {args.threads} threads, {len(images)} photographs", flush=True)
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        model, model_config = widen(predictor.model, predictor.model_config, WIDTH_FACTORS[size])
        times, labels, repeated = measure(model, model_config, images, args)
        for batch_size in args.batch_sizes:
            rows += summarise(size, batch_size, times[batch_size], labels[batch_size], repeated, args.threads)
            write_results(args, rows, packages=(*PACKAGES, "nncf"))
        print_choice([row for row in rows if row["size"] == size])


def measure(
    model: ViT, model_config: ModelConfig, images: Tensor, args: argparse.Namespace
) -> tuple[Any, Any, dict[str, float]]:
    """Seconds per batch and labels by batch size and implementation, and the share of images computed again."""
    times: Any = defaultdict(lambda: defaultdict(list))
    labels: Any = defaultdict(lambda: defaultdict(list))
    repeated: dict[str, list[bool]] = defaultdict(list)
    for fold in (0,) if args.one_fold else (0, 1):
        measured, others = images[fold::2], images[1 - fold :: 2]
        calibration = others[:: max(-(-len(others) // CALIBRATION_IMAGES), 1)]
        built = build_engines(model, model_config.preprocessing, calibration, None, log=print)
        ours = {f"vitral {name}": forward for name, forward in shared(built.engines).items()}
        for engine in built.engines.values():  # compiles what cascades need when they compute images again
            share_batch(engine, measured[: args.threads])
        graphs = openvino_graphs(model, model_config, calibration)
        for batch_size in args.batch_sizes:
            peers: dict[str, ForwardFn] = dict(openvino_peers(graphs, args.threads, (batch_size,)))
            if batch_size >= args.threads > 1:
                peers |= openvino_peers(graphs, args.threads, (batch_size,), per_core=True)
            for name, values in run_in_turns({**peers, **ours}, measured, batch_size).items():
                times[batch_size][name] += values[0]
                labels[batch_size][name].append(values[1])
        for name, engine in built.engines.items():
            if isinstance(engine, CascadeEngine):
                ambiguous = [engine.is_ambiguous(engine.fast(part)) for part in measured.split(8)]
                repeated[f"vitral {name}"] += torch.cat(ambiguous).tolist()
    return times, labels, {name: statistics.fmean(values) for name, values in repeated.items()}


def run_in_turns(
    forwards: Mapping[str, ForwardFn], images: Tensor, batch_size: int
) -> dict[str, tuple[list[float], Tensor]]:
    """Seconds of each whole batch, and the labels, of each implementation."""
    results: dict[str, tuple[list[float], list[Tensor]]] = {name: ([], []) for name in forwards}
    for forward in forwards.values():
        for _ in range(2):
            forward(images[:batch_size])
    names = list(forwards)
    for index, batch in enumerate(images[: len(images) // batch_size * batch_size].split(batch_size)):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            logits = forwards[name](batch)
            results[name][0].append(time.perf_counter() - start)
            results[name][1].append(logits.argmax(dim=1))
    return {name: (seconds, torch.cat(labels)) for name, (seconds, labels) in results.items()}


def summarise(
    size: str, batch_size: int, times: Any, labels: Any, repeated: Mapping[str, float], threads: int
) -> list[dict[str, Any]]:
    """One row per implementation, with its speed relative to the peer."""
    expected = torch.cat(labels["vitral fp32"])
    same = {name: int((torch.cat(parts) == expected).sum()) for name, parts in labels.items()}
    means = {name: statistics.fmean(seconds) for name, seconds in times.items()}
    is_peer = {name: "OpenVINO" in name and same[name] >= MIN_AGREEMENT * len(expected) for name in times}
    peer = min((name for name in times if is_peer[name]), key=lambda name: means[name])
    print(f"\n{size}, batch size {batch_size}, {len(expected)} images; peer: {peer}", flush=True)
    rows = []
    for name, seconds in times.items():
        low, high = ratio_interval(times[peer], seconds)
        row = {
            "size": size, "batch_size": batch_size, "threads": threads, "implementation": name, "images": len(expected),
            "mean_ms": means[name] * 1e3, "median_ms": statistics.median(seconds) * 1e3, "same_label": same[name],
            "recheck_rate": repeated.get(name, 0.0), "peer": peer, "ratio_mean": means[peer] / means[name],
            "ratio_low": low, "ratio_high": high,
            "ratio_median": statistics.median(times[peer]) / statistics.median(seconds),
            "p95_ms": speed_columns(batch_size, seconds)["p95_ms"],
        }  # fmt: skip
        rows.append(row)
        print(
            "  {implementation:<26} mean {mean_ms:7.2f} ms, median {median_ms:7.2f}  same label {same_label}/{images}  "
            "repeated {recheck_rate:5.1%}  {ratio_mean:.2f}x the peer in the mean ({ratio_low:.2f}-{ratio_high:.2f}), "
            "{ratio_median:.2f}x in the median".format(**row),
            flush=True,
        )
    return rows


def ratio_interval(peer: list[float], seconds: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the ratio of mean times, over batches."""
    generator, pairs = random.Random(0), list(zip(peer, seconds, strict=True))
    ratios = sorted(
        sum(a for a, _ in sample) / sum(b for _, b in sample)
        for sample in (generator.choices(pairs, k=len(pairs)) for _ in range(NUM_RESAMPLES))
    )
    return ratios[int(0.025 * NUM_RESAMPLES)], ratios[int(0.975 * NUM_RESAMPLES)]


def print_choice(rows: list[dict[str, Any]]) -> None:
    """The engine that `vitral bench` would choose from these figures."""
    bench_rows = []
    for row in rows:
        if row["implementation"].startswith("vitral "):
            agreement = Agreement(same=row["same_label"], images=row["images"])
            bench_rows.append(
                BenchRow(
                    engine=row["implementation"].removeprefix("vitral "), threads=row["threads"],
                    batch_size=row["batch_size"], p50_ms=row["median_ms"], p95_ms=row["p95_ms"], p99_ms=row["p95_ms"],
                    images_per_second=row["batch_size"] / row["mean_ms"] * 1e3, memory_mb=0, agreement=agreement.value,
                    agreement_low=agreement.interval.low, agreement_high=agreement.interval.high,
                    recheck_rate=row["recheck_rate"],
                )
            )  # fmt: skip
    best, reason = recommend(bench_rows, rows[0]["images"])
    print(f"\n{rows[0]['size']}: vitral bench would choose {best.engine}: {reason}", flush=True)


if __name__ == "__main__":
    main()
