"""Images a second in training and inference on a GPU: vitral beside timm, transformers, vit-pytorch and torchvision.

    python benchmarks/gpu_throughput.py [--budget 360] [--vitral bf16 fp8] [--out gpu_throughput.json]
    python benchmarks/gpu_throughput.py --cases vitral:B/16:train timm:B/16:train timm:B/16:train:channels-last

A case is WHO:SIZE:WORK[:SETTING+SETTING]. All cases of a row have the same batch and do the same work: 224 px, 197
tokens, exact GELU, 1000 classes; training is forward, cross-entropy, backward and AdamW with weights in fp32, in bf16
but where vitral is asked for FP8 or takes it by itself.

vitral      the product's own step (vitral.training.trainer) and engine (vitral.inference), as hardware.choose picks them
            unless a setting names a precision (bf16, fp8), eager, unfused, or another model (tanh GELU, mean pooling);
            from uint8 pixels, so normalising them is in its time and not in others'
others      torch.compile, fused AdamW, TF32 for what is left in fp32; images already float, normalised, on the GPU.
            Training under autocast, inference with bf16 weights. Settings: eager, graphs (CUDA graphs, by
            mode="reduce-overhead"), channels-last, autocast, bf16-weights (small updates are lost: not compared with)

Work: train; infer, a large batch; ask-1, ask-8, ask-64: so many images, from pixels on the GPU to logits on the CPU.

Each case is a process of its own. Those of a wave prepare side by side (import, build, compile, first steps), then take
timed turns, one at a time, round after round; the figure is the median of the rounds, with the lowest and highest.
Before that, B/16's training is run alone by vitral and by timm, with an empty compiler cache: seconds from the start
of the process to the first finished step, and the same figures once more, undisturbed. The share of the peak is of the
rate of an 8192³ bf16 product of random matrices, measured first; arithmetic is counted by the products of the model
alone, and three times for training. Memory: the most that was allocated in steps after the first, or, where it is more,
what a recorded graph holds between them.

Whoever fails gets a row that says why. What does not fit into --budget is left out, the last waves first. Without a
GPU there is nothing to compare: a toy version shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from contestants import NEEDS_A_GPU, PEERS, Case, on_gpu, peak, step_of, wait, what_failed

GOALS = {"train": 1.5, "infer": 1.6}
GOAL_MEMORY = 0.75
TOGETHER = 6  # processes of a wave: a training of B/16 takes up to 23 GiB
LEAST = 45.0  # seconds that a wave needs
PATIENCE = 240.0  # seconds for compiling side by side


# ── one contestant, in a process of its own ──────────────────────────────────────────────────────────────────────


def play(case: Case, seconds: float, began: float) -> None:
    """Prepare, say so, then time a turn for each line that comes in."""
    warnings.simplefilter("ignore")

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    try:
        if case.who == "peak":
            say(**peak())
            return
        import torch

        if case.who != "vitral":  # which has what the product sets, and no more
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        info: dict[str, Any] = {"batch": case.batch}
        imported = time.time()
        step = step_of(case, info)
        built = time.time()
        step()
        wait()
        info["first_step_s"], info["building_s"], info["compiling_s"] = (
            time.time() - began, built - imported, time.time() - built,
        )  # fmt: skip
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()
        for _ in range(6):  # recording, and whatever else is set up late
            step()
        wait()
        start = time.perf_counter()
        for _ in range(3):
            step()
        wait()
        count = max(3, math.ceil(seconds / ((time.perf_counter() - start) / 3)))
        if on_gpu():
            info["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            info["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
            torch.cuda.empty_cache()  # for those who prepare beside this one
            info["held_gib"] = torch.cuda.memory_reserved() / 2**30  # a recorded graph lets go of nothing
            info["peak_gib"] = max(info["allocated_gib"], info["held_gib"])
        say(ready=True, **info)
        for _ in sys.stdin:
            step()
            wait()
            start = time.perf_counter()
            for _ in range(count):
                step()
            wait()
            say(images_per_second=count * case.batch / (time.perf_counter() - start))
    except Exception as error:
        say(failed=what_failed(error))


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────


class Player:
    """A contestant's process, spoken to in lines."""

    def __init__(self, case: Case, cache: Path, beside: int, seconds: float) -> None:
        self.case, self.found, self.speeds = case, {}, []  # type: ignore[var-annotated]
        share = max(2, (os.cpu_count() or 2) // beside)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(share),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        words = [sys.executable, __file__, "--play", json.dumps(asdict(case)), "--seconds", str(seconds)]
        self.process = subprocess.Popen(
            [*words, "--began", str(time.time())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ear = threading.Thread(target=self.listen, daemon=True)
        self.ear.start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.heard.put(json.loads(line))
        self.process.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["without a word"])[-1]
        self.heard.put({"failed": f"ended with status {self.process.returncode}: {last[:200]}"})

    def hear(self, patience: float) -> bool:
        """Whether it said something useful in time."""
        try:
            said = self.heard.get(timeout=max(patience, 0.1))
        except queue.Empty:
            said = {"failed": f"no answer within {patience:.0f} s"}
        if "failed" in said:
            self.found["failed"] = said["failed"]
            self.end()
            return False
        if "images_per_second" in said:
            self.speeds.append(said["images_per_second"])
        else:
            self.found |= said
        return True

    def turn(self, patience: float) -> bool:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("turn\n")
            self.process.stdin.flush()
        return self.hear(patience)

    def end(self) -> None:
        """Its compiler's workers too: the process leads a group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.ear.join()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            assert file is not None
            with suppress(BrokenPipeError):
                file.close()


def wave(
    cases: Sequence[Case], cache: Path, rounds: int, seconds: float, until: float, beside: int = 0
) -> list[dict[str, Any]]:
    """Prepared side by side, timed one at a time, turn about."""
    players = [Player(case, cache, beside or len(cases), seconds) for case in cases]
    try:
        patience = min(time.time() + PATIENCE, until)
        playing = [player for player in players if player.hear(patience - time.time())]
        for _ in range(rounds):
            if time.time() > until:
                break
            playing = [player for player in playing if player.turn(30 + 20 * seconds)]
    finally:
        for player in players:
            player.end()
    return [entry(player) for player in players]


def entry(player: Player) -> dict[str, Any]:
    case = player.case
    found: dict[str, Any] = {"case": str(case), **asdict(case), **player.found}
    found.pop("ready", None)
    if player.speeds:
        found["images_per_second"] = statistics.median(player.speeds)
        found["lowest"], found["highest"], found["rounds"] = min(player.speeds), max(player.speeds), len(player.speeds)
        times = 3 if case.work == "train" else 1
        found["tflops"] = found["images_per_second"] * found["gflop"] * times / 1e3
    return found


def plan(ours: Iterable[str]) -> list[list[Case]]:
    """Waves, the most important first."""

    def row(size: str, work: str, *peers: str) -> list[Case]:
        own = [Case("vitral", size, work, "" if name == "auto" else name) for name in ours]
        return own + [Case.read(f"{who.split('+')[0]}:{size}:{work}:{'+'.join(who.split('+')[1:])}") for who in peers]

    return [
        row("B/16", "train", *PEERS),
        row("S/16", "train", *PEERS),
        row("B/16", "infer", *PEERS) + row("S/16", "infer", *PEERS),
        row("Ti/16", "train", "timm") + row("L/16", "train", "timm"),
        row("Ti/16", "infer", "timm", "timm+graphs") + row("L/16", "infer", "timm", "torchvision"),
        [case for work in ("ask-1", "ask-8", "ask-64") for case in row("B/16", work, "timm+graphs")],
        row("B/16", "train", "timm", "timm+channels-last", "timm+bf16-weights"),
    ]


def table(rows: list[dict[str, Any]], peak_tflops: float | None) -> list[str]:
    """A line a case, the cases of a row together, each row with what vitral is to the fastest of the others."""
    lines: list[str] = []
    for name in dict.fromkeys(f"{row['work']} {row['size']}" for row in rows):
        here = [row for row in rows if f"{row['work']} {row['size']}" == name]
        peers = [row for row in here if "images_per_second" in row and counted(row)]
        best = max(peers, key=lambda row: row["images_per_second"], default=None)
        lines.append(f"\n{name}" + (f", batch {here[0]['batch']}" if "batch" in here[0] else ""))
        for row in here:
            who = row["who"] + (f" {row['setting']}" if row["setting"] else "")
            who += f" ({row['alone']})" if row.get("alone") else ""
            if "images_per_second" not in row:
                lines.append(f"  {who:<28} {row.get('failed', 'no turn')}")
                continue
            ratio = f"{row['images_per_second'] / best['images_per_second']:5.2f} ×" if best else ""
            share = f"{row['tflops'] / peak_tflops:5.1%} of the peak" if peak_tflops else ""
            memory = f"{row['peak_gib']:6.2f} GiB" if "peak_gib" in row else ""
            if memory and best:
                memory += f" ({row['peak_gib'] / best['peak_gib']:.2f} ×)"
            first = f"first step after {row['first_step_s']:.1f} s" if row.get("alone") else ""
            lines.append(
                f"  {who:<28} {row['images_per_second']:10,.0f} images/s ({row['lowest']:,.0f} – {row['highest']:,.0f})"
                f"  {ratio}  {share}  {memory}  {first}".rstrip()
            )
    return lines


def counted(row: dict[str, Any]) -> bool:
    return Case(row["who"], row["size"], row["work"], row["setting"]).counts


def verdicts(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each of vitral's cases beside the fastest of the others that did the same work."""
    found: dict[str, dict[str, Any]] = {}
    timed = [row for row in rows if "images_per_second" in row and "alone" not in row]
    for ours in timed:
        same = [row for row in timed if (row["work"], row["size"]) == (ours["work"], ours["size"]) and counted(row)]
        best = max(same, key=lambda row: row["images_per_second"], default=None)
        if ours["who"] != "vitral" or best is None:
            continue
        found[ours["case"]] = {
            "fastest_peer": best["case"],
            "speed": ours["images_per_second"] / best["images_per_second"],
            "goal": GOALS.get(ours["work"]),
        }
        if "peak_gib" in ours:
            found[ours["case"]] |= {"memory": ours["peak_gib"] / best["peak_gib"], "goal_memory": GOAL_MEMORY}
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "timm", "transformers", "vit-pytorch", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def chunks(cases: Sequence[Case], count: int) -> list[list[Case]]:
    return [list(cases[start : start + count]) for start in range(0, len(cases), count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help="these instead of the plan, e.g. timm:B/16:train:channels-last")
    parser.add_argument("--vitral", nargs="+", default=["auto"], help="precisions that vitral is run with, by name")
    parser.add_argument("--only", nargs="+", metavar="WHO", help="of the plan, these contestants alone")
    parser.add_argument("--rows", nargs="+", metavar="WORK", help='of the plan, these rows alone: "train B/16"')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--together", type=int, default=TOGETHER, help="processes that prepare side by side")
    parser.add_argument("--no-alone", action="store_true", help="leave out the runs with an empty compiler cache")
    parser.add_argument(
        "--cache", type=Path, help="compiled code is kept here for the next time, but for the runs alone"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.play:
        play(Case(**json.loads(asked.play)), asked.seconds, asked.began or time.time())
        return
    until = time.time() + asked.budget
    if not (gpu := on_gpu()):
        print(NEEDS_A_GPU)
    if asked.cases:
        waves = chunks([Case.read(name) for name in asked.cases], asked.together)
        alone: list[Case] = []
    elif gpu:
        wanted = [
            [
                case
                for case in cases
                if (not asked.only or case.who in asked.only) and (not asked.rows or case.row in asked.rows)
            ]
            for cases in plan(asked.vitral)
        ]
        waves = [
            part for cases in wanted for part in chunks(cases, 2 * asked.together if infers(cases) else asked.together)
        ]
        alone = [] if asked.no_alone else [Case.read("vitral:B/16:train"), Case.read("timm:B/16:train")]
    else:
        waves = [[Case(who, "toy", work) for who in asked.only or ("vitral", *PEERS)] for work in ("train", "infer")]
        alone = []
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "cores": os.cpu_count(),
        "rounds": asked.rounds,
    }
    with tempfile.TemporaryDirectory(prefix="throughput-", ignore_cleanup_errors=True) as place:
        if gpu:
            player = Player(Case("peak", "", "peak"), Path(place) / "peak", 1, asked.seconds)
            player.hear(90)
            player.end()
            about |= player.found
        print(" · ".join(f"{name} {value}" for name, value in about.items() if name not in ("command", "versions")))
        print(" · ".join(f"{name} {value}" for name, value in about["versions"].items()), flush=True)

        def keep(found: list[dict[str, Any]]) -> None:
            rows.extend(found)
            for line in table(found, about.get("bf16_tflops")):
                print(line, flush=True)
            if asked.out:
                content = {"about": about, "against_the_fastest": verdicts(rows), "rows": rows}
                asked.out.write_text(json.dumps(content, indent=1) + "\n")

        for case in alone:
            cache = Path(place) / case.who
            for cold in (True, False):  # the compiler's cache is empty, then full
                if not cold and case.who != "vitral":
                    continue
                found = wave([case], cache, asked.rounds if cold else 1, asked.seconds, until, beside=1)
                keep([{**one, "alone": "empty cache" if cold else "full cache"} for one in found])
        for cases in waves:
            if not cases:
                continue
            if gpu and until - time.time() < LEAST:
                keep([{"case": str(case), **asdict(case), "failed": "out of time"} for case in cases])
                continue
            keep(wave(cases, asked.cache or Path(place) / "shared", asked.rounds, asked.seconds, until))
    print()
    for name, found in verdicts(rows).items():
        memory = f", memory {found['memory']:.2f} × (goal {found['goal_memory']})" if "memory" in found else ""
        goal = f" (goal {found['goal']})" if found["goal"] and gpu else ""
        print(f"{name} {found['speed']:.2f} × {found['fastest_peer']}{goal}{memory}")


def infers(cases: Sequence[Case]) -> bool:
    return all(case.work != "train" for case in cases)


if __name__ == "__main__":
    main()
