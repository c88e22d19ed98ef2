"""Run a benchmark's seeds as separate processes, several of them side by side on one GPU.

A small model leaves most of a GPU idle, so that several runs at once take less time than one after the other. Each run
then takes longer than alone: times of such runs are upper bounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def add_seed_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="run N seeds at a time, one per process")


def seeds_of(args: argparse.Namespace) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def run_side_by_side(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all seeds, each of which repeats this command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        results = [Path(folder) / f"seed-{seed}.json" for seed in seeds_of(args)]
        list(pool.map(run_seed, seeds_of(args), results))
        return [row for path in results for row in json.loads(path.read_text())["rows"]]


def run_seed(seed: int, result: Path) -> None:
    """Repeat this command for one seed. Its output is shown, each line with the seed in front."""
    words = [*without_output_options(sys.argv[1:]), "--seeds", "1", "--first-seed", str(seed), "--processes", "1"]
    command = [sys.executable, sys.argv[0], *words, "--json", str(result)]
    process = subprocess.run(command, capture_output=True, text=True)
    for line in (process.stdout + (process.stderr if process.returncode else "")).splitlines():
        print(f"seed {seed}: {line}", flush=True)
    if process.returncode:
        raise SystemExit(f"seed {seed} failed with status {process.returncode}")


def without_output_options(words: Sequence[str]) -> list[str]:
    """A command line without --save, --csv and --json, which belong to the process that collects the rows."""
    kept, skip = list[str](), False
    for word in words:
        if not skip and word.partition("=")[0] not in ("--save", "--csv", "--json"):
            kept.append(word)
        skip = not skip and word in ("--csv", "--json")
    return kept
