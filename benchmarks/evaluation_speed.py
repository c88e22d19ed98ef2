"""Time `vitral probe`, `report`, `evaluate --robustness` and `bench` as real processes, start-up included.

    python benchmarks/evaluation_speed.py probe PHOTOS --init-from vit.safetensors
    python benchmarks/evaluation_speed.py robustness RUN --data PHOTOS --repetitions 3 --baseline ../before/src
    python benchmarks/evaluation_speed.py report RUN --data PHOTOS --repetitions 3 --baseline ../before/src
    python benchmarks/evaluation_speed.py bench RUN --repetitions 3 --baseline ../before/src

With `--baseline`, the sources of another version run in turns with these. For probe and robustness, the largest
difference between the numbers that they print as JSON is given too. The cache of the fingerprints of a folder is not
used, so that every run is a first one. `bench` measures a copy of the model, and its choice is not used by the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _output import add_output_arguments, write_results

SOURCES = Path(__file__).parents[1] / "src"
ESTIMATE = re.compile(r"about ([\d.]+) (s|min|h)\b")
BENCH_ESTIMATE = re.compile(r"Estimated time: (?:(\d+):)?(\d+):(\d+)")
UNITS = {"s": 1, "min": 60, "h": 3600}
IGNORED = ("engine",)  # fields that state what ran, not what was measured


def run_command(words: list[str], sources: Path) -> tuple[float, str, str]:
    """Seconds, standard output and standard error of a `vitral` command."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(sources), "XDG_CACHE_HOME": cache}
        command, started = [sys.executable, "-m", "vitral", *words], time.perf_counter()
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return seconds, result.stdout, result.stderr


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a JSON value by their path."""
    children: Any = ()
    if isinstance(value, dict):
        children = ((name, child) for name, child in value.items() if name not in IGNORED)
    elif isinstance(value, list):
        children = enumerate(value)
    elif isinstance(value, int | float):
        yield path, float(value)
    for name, child in children:
        yield from numbers(child, f"{path}/{name}")


def largest_difference(before: str, after: str) -> float:
    first, second = (dict(numbers(json.loads(text))) for text in (before, after))
    if first.keys() != second.keys():
        raise SystemExit(f"the results differ in {sorted(first.keys() ^ second.keys())[:5]}")
    return max((abs(first[name] - second[name]) for name in first), default=0.0)


def expected_seconds(errors: str) -> float | None:
    """The estimate that a command printed."""
    if estimate := ESTIMATE.search(errors):
        return float(estimate[1]) * UNITS[estimate[2]]
    if estimate := BENCH_ESTIMATE.search(errors):
        hours, minutes, seconds = (int(part or 0) for part in estimate.groups())
        return 3600.0 * hours + 60 * minutes + seconds
    return None


def command_words(args: argparse.Namespace, out: Path) -> list[str]:
    data = ["--data", args.data] if args.data else []
    if args.command == "probe":
        return ["probe", args.source, "--init-from", args.init_from, "--json"]
    if args.command == "report":
        return ["report", args.source, *data, "--out", str(out / "report.html")]
    if args.command == "bench":
        return ["bench", str(out / "model"), *data, "--json"]
    return ["evaluate", args.source, *data, "--robustness", "--json"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("probe", "report", "robustness", "bench"))
    parser.add_argument("source", help="model; for probe a dataset or folder")
    parser.add_argument("--init-from", help="model to probe")
    parser.add_argument("--data", help="dataset or folder to evaluate on")
    parser.add_argument("--baseline", type=Path, metavar="SRC", help="sources of a version to compare with")
    parser.add_argument("--repetitions", type=int, default=1)
    add_output_arguments(parser)
    args = parser.parse_args()
    versions = {"before": args.baseline, "after": SOURCES} if args.baseline else {"after": SOURCES}
    rows: list[dict[str, Any]] = []
    outputs: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as out:
        words = command_words(args, Path(out))
        for repetition in range(args.repetitions):
            for version, sources in versions.items():
                if args.command == "bench":
                    shutil.rmtree(Path(out) / "model", ignore_errors=True)
                    shutil.copytree(args.source, Path(out) / "model")
                seconds, outputs[version], errors = run_command(words, sources)
                row = {
                    "command": args.command,
                    "model": Path(args.init_from or args.source).name,
                    "data": Path(args.data or args.source).name,
                    "version": version,
                    "repetition": repetition,
                    "seconds": round(seconds, 2),
                    "estimate": expected_seconds(errors),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                write_results(args, rows)
    medians = {name: statistics.median(row["seconds"] for row in rows if row["version"] == name) for name in versions}
    print(", ".join(f"{name}: median {seconds:.1f} s" for name, seconds in medians.items()))
    if args.baseline:
        print(f"{medians['before'] / medians['after']:.2f}x as fast")
        if args.command in ("probe", "robustness"):
            print(
                f"largest difference between the results: {largest_difference(outputs['before'], outputs['after']):.3g}"
            )


if __name__ == "__main__":
    main()
