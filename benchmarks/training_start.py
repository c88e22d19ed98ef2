"""Seconds from the command to the first training step and to the end of `vitral train`, for several source trees.

    python benchmarks/training_start.py FOLDER --weights vit_tiny_patch16_224.timm.safetensors --trees OLD . --rounds 3

FOLDER has train/CLASS and val/CLASS, so that copies of training images are searched in val before training. Each
measurement is a process with an empty cache; trees alternate.

images_seconds   until the images are packed and compared: the run folder is created
step_seconds     until the first step has ended, after the head has been fitted
total_seconds    until the command has ended, with evaluation and report
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _output import add_output_arguments, write_results

POLL_SECONDS = 0.01


def measure(args: argparse.Namespace, tree: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        env = {**os.environ, "VITRAL_HOME": str(Path(folder) / "home"), "PYTHONPATH": str(tree.resolve() / "src")}
        command = [sys.executable, __file__, str(args.folder), "--weights", str(args.weights), "--out", str(run)]
        started, seconds = time.perf_counter(), dict[str, float]()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            while not run.exists() and process.poll() is None:
                time.sleep(POLL_SECONDS)
            seconds["images_seconds"] = time.perf_counter() - started
            for line in process.stdout:
                if line == "step\n":
                    seconds["step_seconds"] = time.perf_counter() - started
        seconds["total_seconds"] = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"vitral failed with status {process.returncode}")
    return seconds


def train(args: argparse.Namespace) -> None:
    """Train as the command line does, and print a line after the first step."""
    import vitral
    from vitral.device.malloc import keep_freed_memory
    from vitral.training.callbacks import Callback

    class FirstStep(Callback):
        is_over = False

        def on_step(self, *_: Any) -> None:
            if not self.is_over:
                print("step", flush=True)
                self.is_over = True

    keep_freed_memory()
    vitral.train(args.folder, init_from=args.weights, epochs=1, out=args.out, callbacks=[FirstStep()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with train/CLASS and val/CLASS")
    parser.add_argument("--weights", type=Path, required=True, help="vit_tiny_patch16_224 of timm as safetensors")
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path()], help="checkouts of vitral to compare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a process of the benchmark itself
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.out is not None:
        train(args)
        return
    rows = list[dict[str, Any]]()
    for number in range(1, args.rounds + 1):
        for position, tree in enumerate(args.trees):
            rows.append({"round": number, "tree": position, **measure(args, tree)})
            print(rows[-1], flush=True)
            write_results(args, rows, {"data": args.folder.name})
    for name in ("images_seconds", "step_seconds", "total_seconds"):
        for position, tree in enumerate(args.trees):
            values = [row[name] for row in rows if row["tree"] == position]
            print(f"{name:<16}{tree!s:<24}{statistics.median(values):8.2f} ({min(values):.2f} - {max(values):.2f}) s")


if __name__ == "__main__":
    main()
